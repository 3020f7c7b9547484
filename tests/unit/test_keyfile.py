"""A file of keys: names and ends beside the contract's form, who else could read it, and what a reload makes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topics import limits
from topics.actors.supervisor.admin_socket import KeysRead
from topics.errors import SettingsError
from topics.keyfile import KeyFile
from topics.keys import Key, Scope, difference, parse_keys, renumbered
from topics.settings import load

SECRET = "s3cr3t-Zq9"


def parse(text: str) -> tuple[Key, ...]:
    return parse_keys(text, source="here", attributes=True)


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def key_file(path: str, *, strict: bool = False, kept: bool = False) -> KeyFile:
    return KeyFile(path, shown=path, named="TOPICS_API_KEYS_FILE", strict=strict, kept=kept)


# --- names and ends ----------------------------------------------------------------------------------


def test_a_name_and_an_end_follow_the_key_in_either_order() -> None:
    found = parse(
        "one:rw:in: name=ci expires=2027-01-01T00:00:00Z\ntwo expires=1999-12-31T23:59:59Z name=Old.key_1-b\nthree\n"
        "four:read, five\n"
    )
    assert [(key.number, key.name, key.expires_ms, key.label) for key in found] == [
        (1, "ci", 1_798_761_600_000, "ci"),
        (2, "Old.key_1-b", 946_684_799_000, "Old.key_1-b"),
        (3, "", 0, "3"),
        (4, "", 0, "4"),
        (5, "", 0, "5"),
    ]
    assert (found[0].scopes, found[0].prefixes) == (Scope.READ | Scope.WRITE, ("in:",))


@pytest.mark.parametrize(
    "rest",
    [
        "name=",
        "name=3",
        "name=-a",
        "name=a/b",
        "name=a=b",
        'name="a"',
        "name=\u00fc",
        "name=a\x1b[31m",
        "name=" + "a" * (limits.MAX_KEY_NAME_CHARS + 1),
        "Name=a",
        "name a",
        "name = a",
        "name=a name=b",
        "named=a",
        "expires=",
        "expires=2027-01-01",
        "expires=2027-01-01T00:00:00",
        "expires=2027-01-01T00:00:00+00:00",
        "expires=2027-01-01T00:00:00.5Z",
        "expires=2027-1-1T0:0:0Z",
        "expires=2027-02-30T00:00:00Z",
        "expires=2027-01-01T24:00:00Z",
        "expires=1970-01-01T00:00:00Z",
        "expires=0001-01-01T00:00:00Z",
        "expires=never",
        "expires=2027-01-01T00:00:00Z expires=2028-01-01T00:00:00Z",
        "# mine",
        "x",
        "scopes=read",
        f"name={SECRET}",
        f"name=a-{SECRET}",
        "name=a, name=b",
        ",other name=a",
        "name=a,other",
    ],
)
def test_what_else_follows_a_key_refuses(rest: str) -> None:
    for separator in ("", " "):
        with pytest.raises(SettingsError) as caught:
            parse(f"{SECRET}:read:in:{separator if rest.startswith(',') else ' '}{rest}")
        assert str(caught.value).startswith("here, key ")
        assert SECRET not in str(caught.value)


def test_the_longest_name() -> None:
    name = "a" * limits.MAX_KEY_NAME_CHARS
    assert parse(f"{SECRET} name={name}")[0].name == name


def test_names_are_unique() -> None:
    with pytest.raises(SettingsError, match="key 2: another key has this name"):
        parse(f"one name=ci\n{SECRET} name=ci")


def test_the_list_of_the_environment_has_no_names() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_keys(f"{SECRET} name=ci", source="TOPICS_API_KEYS")
    assert SECRET not in str(caught.value)


def test_there_is_a_bound_on_keys_and_on_what_they_say() -> None:
    assert len(parse("\n".join(f"k{number}" for number in range(limits.MAX_API_KEYS)))) == limits.MAX_API_KEYS
    with pytest.raises(SettingsError, match="too much"):
        parse("\n".join(f"k{number}" for number in range(limits.MAX_API_KEYS + 1)))
    with pytest.raises(SettingsError, match="too much"):
        parse("k::" + "|".join("a" * 200 for _ in range(1_000)))


def test_when_a_key_has_ended() -> None:
    (key,) = parse("one expires=2027-01-01T00:00:00Z")
    assert [key.expired(key.expires_ms + late) for late in (-1, 0, 1)] == [False, True, True]
    assert not parse("one")[0].expired(2**62)


# --- the file ----------------------------------------------------------------------------------------


def test_comments_and_names_together(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "# who\n\none:read name=dash\n  # two name=x\ntwo\n")
    assert [key.label for key in key_file(path).read()] == ["dash", "2"]


def test_a_file_that_is_too_long_or_no_file(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "one\n" + "#" * limits.MAX_KEY_FILE_BYTES)
    with pytest.raises(SettingsError, match="more than"):
        key_file(path).read()
    for wrong in (tmp_path / "missing", tmp_path):
        with pytest.raises(SettingsError, match="can't be read"):
            key_file(str(wrong)).read()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o610])
def test_others_could_read_it(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys", "one", mode)
    assert f"mode {mode:04o}" in key_file(path).exposure()
    assert len(key_file(path).read()) == 1
    with pytest.raises(SettingsError, match="TOPICS_STRICT_FILES"):
        key_file(path, strict=True).read()
    assert not key_file(path, kept=True).exposure(), "systemd's folder is for the service alone"
    assert key_file(path, strict=True, kept=True).read()


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_nobody_else_could_read_it(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys", "one", mode)
    assert not key_file(path).exposure()
    assert len(key_file(path, strict=True).read()) == 1


def test_a_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "keys", "one")
    owner = os.stat(path).st_uid
    if owner == 0:
        os.chown(path, 4_711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert "another user" in key_file(path).exposure()
    with pytest.raises(SettingsError, match="another user"):
        key_file(path, strict=True).read()


def test_the_setting_is_read_from_all_places(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "one", 0o644)
    environ = {"TOPICS_API_KEYS_FILE": path}
    found = load(environ)
    assert found.key_file is not None
    assert found.key_file.exposure()
    with pytest.raises(SettingsError, match="TOPICS_STRICT_FILES"):
        load({**environ, "TOPICS_STRICT_FILES": "1"})
    config = write(tmp_path / "topics.toml", f'strict_files = true\napi_keys_file = "{path}"\n')
    with pytest.raises(SettingsError, match="TOPICS_STRICT_FILES"):
        load({}, config=config)
    assert load({"TOPICS_STRICT_FILES": "0"}, config=config).settings.api_keys


def test_what_can_be_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "one")
    assert load({"TOPICS_API_KEYS": "one"}).key_file is None
    assert load({}).key_file is None
    found = load({"TOPICS_API_KEYS_FILE": path}).key_file
    assert found is not None
    assert found.path == path
    Path(path).write_text("two name=b")
    assert [key.name for key in found.read(again=True)] == ["b"]
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(SettingsError, match="no plain file"):  # and nobody waits for a writer
        found.read(again=True)
    read, writing = os.pipe()
    os.write(writing, b"three")
    os.close(writing)
    piped = load({"TOPICS_API_KEYS_FILE": f"/dev/fd/{read}"})
    os.close(read)
    assert (len(piped.settings.api_keys), piped.key_file) == (1, None)


# --- again -------------------------------------------------------------------------------------------


def test_a_secret_keeps_its_number_and_no_number_is_given_twice() -> None:
    before = parse("one\ntwo\nthree")
    after = renumbered(parse("three\nfour\none\nfive"), before)
    assert [key.number for key in after] == [3, 4, 1, 5], "two's slot may still be held"
    again = renumbered(parse("six\nfive"), after)
    assert [key.number for key in again] == [2, 5]


def test_numbers_have_a_bound() -> None:
    most = limits.MAX_API_KEYS
    before = parse("\n".join(f"a{number}" for number in range(most)))
    for letter in "bcd":
        before = renumbered(parse("\n".join(f"{letter}{number}" for number in range(most))), before)
        assert len({key.number for key in before}) == most
        assert max(key.number for key in before) <= 2 * most


def test_what_has_changed_by_name() -> None:
    before = parse("one name=a\ntwo name=b\nthree:r\nfour::x|y")
    after = renumbered(parse("one name=z\nthree:rw\nfive name=c\nfour::y|x\nsix"), before)
    found = difference(before, after)
    assert (found.added, found.removed, found.changed) == (["c", "6"], ["b"], ["z", "3"])
    told = KeysRead.of(5, found)
    assert str(told) == "5 in effect; added: c, 6; removed: b; changed: z, 3"
    assert str(KeysRead.of(1, difference(before, before))) == "1 in effect; none has changed"
    many = parse("\n".join(f"{SECRET}{number}" for number in range(100)))
    shortened = KeysRead.of(100, difference((), many))
    assert (len(shortened.added), shortened.added[-1]) == (21, "and 80 more")
