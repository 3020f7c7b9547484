"""How keys are written, what each is worth, where they come from. What can't be read refuses, and is not repeated."""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from topics import keys
from topics.errors import SettingsError
from topics.keys import Key, Keyring, Scope, digest_of, parse_keys
from topics.settings import CREDENTIAL, Settings, from_environment

R, W, D, A, ALL = Scope.READ, Scope.WRITE, Scope.DELETE, Scope.ADMIN, Scope.ALL
SECRET = "s3cr3t-Zq9"


def parse(text: str) -> tuple[Key, ...]:
    return parse_keys(text, source="here")


def refusal(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(text)
    return str(caught.value)


# --- one key -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "scopes", "prefixes"),
    [
        ("", ALL, ()),
        (":", ALL, ()),
        ("::", ALL, ()),
        (":read", R, ()),
        (":write", W, ()),
        (":delete", D, ()),
        (":admin", A, ()),
        (":r", R, ()),
        (":w", W, ()),
        (":d", D, ()),
        (":a", A, ()),
        (":rw", R | W, ()),
        (":read+write", R | W, ()),
        (":r+w+d+a", ALL, ()),
        (":rw+d", R | W | D, ()),
        (":read+r+read", R, ()),
        (":admin+read:", A | R, ()),
        (":read:a", R, ("a",)),
        ("::a", ALL, ("a",)),
        ("::tenant42:", ALL, ("tenant42:",)),
        (":r:tenant42:|shared.", R, ("tenant42:", "shared.")),
        ("::a:b:c|d", ALL, ("a:b:c", "d")),
        ("::a|a", ALL, ("a", "a")),
    ],
)
def test_every_form(rest: str, scopes: Scope, prefixes: tuple[str, ...]) -> None:
    (key,) = parse(SECRET + rest)
    assert key.digest == digest_of(SECRET.encode())
    assert key.scopes == scopes
    assert key.prefixes == prefixes


@pytest.mark.parametrize("name", ["READ", "Read", "reads", "rd", "wr", "rwd", "all", "*", "none", "r w", "0"])
@pytest.mark.parametrize("form", ["{secret}:{name}", "{secret}:r+{name}", "{secret}:{name}+r", "{secret}:{name}:in:"])
def test_a_scope_that_is_none_refuses(name: str, form: str) -> None:
    text = refusal(form.format(secret=SECRET, name=name))
    assert "here, key" in text
    assert SECRET not in text


@pytest.mark.parametrize("scopes", ["+", "++", "read+", "+read", "read++write", "read +write", "read+ write"])
@pytest.mark.parametrize("prefixes", ["", ":", ":in:"])
def test_a_hole_between_scopes_is_not_all_scopes(scopes: str, prefixes: str) -> None:
    assert SECRET not in refusal(f"{SECRET}:{scopes}{prefixes}")


@pytest.mark.parametrize("prefixes", ["|", "a|", "|a", "a||b", "||"])
def test_an_empty_prefix_is_not_every_name(prefixes: str) -> None:
    text = refusal(f"{SECRET}:read:{prefixes}")
    assert "prefix" in text
    assert SECRET not in text


@pytest.mark.parametrize("text", [":", "::", ":read", "::in:", ":read:in:", "ok,:read", ":read,ok"])
def test_an_empty_secret_refuses(text: str) -> None:
    assert "secret" in refusal(text)


@pytest.mark.parametrize("secret", ["two words", "tab\tb", "\u00fc", "nul\0", "del\x7f", "\udcff\udcfe", "\x1b"])
def test_a_secret_that_no_header_could_carry_refuses(secret: str) -> None:
    text = refusal(f"{secret}:read")
    assert secret not in text
    assert repr(secret)[1:-1] not in text


@pytest.mark.parametrize("secret", ["a", "!#$%&'()*+-./;<=>?@[]^_`{|}~", "A" * 4_096, "#hash", "+", "|", "read"])
def test_a_secret_of_any_printable_signs(secret: str) -> None:
    (key,) = parse(f"{secret}:read")
    assert (key.digest, key.scopes) == (digest_of(secret.encode()), R)


def test_a_secret_with_a_colon_is_not_repeated_either() -> None:
    """Everything behind the colon was meant as secret by whoever wrote this."""
    for entry in ("Zq9first:Yp8second", "Zq9first:Yp8second:Xo7third|", "Zq9first:r+Yp8second"):
        text = refusal(entry)
        assert not any(part in text for part in ("Zq9first", "Yp8second", "Xo7third")), text


# --- several -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "one,two:read",
        " one , two:read ",
        "one,,two:read,",
        ",one,two:read",
        "one\ntwo:read",
        "one\r\ntwo:read\r\n",
        "\n\none,\n  two:read\n\n",
    ],
)
def test_lists_and_lines_with_blanks_between(text: str) -> None:
    assert [(key.digest, key.scopes) for key in parse(text)] == [(digest_of(b"one"), ALL), (digest_of(b"two"), R)]


@pytest.mark.parametrize("text", ["", " ", ",", ", ,", "\n", "\n,\n"])
def test_no_key_at_all_refuses(text: str) -> None:
    assert "no key" in refusal(text)


@pytest.mark.parametrize("second", [SECRET, f"{SECRET}:read", f"{SECRET}::in:", f" {SECRET} "])
@pytest.mark.parametrize("between", [",", "\n", ",other,"])
def test_the_same_secret_twice_refuses(second: str, between: str) -> None:
    text = refusal(f"{SECRET}:write{between}{second}")
    assert "twice" in text
    assert SECRET not in text


def test_an_error_says_which_key_it_is_about() -> None:
    assert refusal("one,two,three:bad,four").startswith("here, key 3:")


def test_one_bad_key_refuses_all() -> None:
    refusal("good," * 3 + "x:+")


# --- rights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has", range(1, 16))
@pytest.mark.parametrize("needs", range(16))
def test_a_key_allows_what_it_has_all_of(has: int, needs: int) -> None:
    names = [name for scope, name in ((R, "r"), (W, "w"), (D, "d"), (A, "a")) if has & scope]
    (key,) = parse(f"x:{'+'.join(names)}")
    assert key.scopes == has
    assert key.allows(needs) is all(has & bit for bit in (1, 2, 4, 8) if needs & bit)


@pytest.mark.parametrize(
    ("prefixes", "name", "covered"),
    [
        ("", "anything", True),
        ("a", "a", True),
        ("a", "ab", True),
        ("a", "A", False),
        ("a", "ba", False),
        ("ab", "a", False),
        ("tenant42:", "tenant42:jobs", True),
        ("tenant42:", "tenant42", False),
        ("tenant42:", "tenant420:jobs", False),
        ("tenant42:", "tenant4", False),
        ("a:|b.", "b.c", True),
        ("a:|b.", "a:", True),
        ("a:|b.", "b:c", False),
        ("a.b", "acb", False),
        ("a->", "a->b", True),
    ],
)
def test_prefixes_are_no_patterns(prefixes: str, name: str, covered: bool) -> None:
    (key,) = parse(f"x::{prefixes}")
    assert key.covers(name) is covered


# --- the ring ----------------------------------------------------------------------------------------


def test_a_ring_finds_every_key_and_nothing_else() -> None:
    ring = Keyring(parse("one:r,two:w,three:d"))
    assert [key.scopes if (key := ring.find(token)) else None for token in (b"one", b"two", b"three")] == [R, W, D]
    strangers = [b"", b"on", b"one ", b"ONE", b"one:r", b"four", b"\xff\xfe", digest_of(b"one"), b"x" * 100_000]
    assert [ring.find(token) for token in strangers] == [None] * len(strangers)


@pytest.mark.parametrize("token", [b"one", b"two", b"three", b"none of them"])
def test_every_key_is_looked_at_whichever_it_is(token: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Keyring(parse("one,two,three"))
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, given)

    monkeypatch.setattr(keys, "hmac", type("Counting", (), {"compare_digest": staticmethod(compare)}))
    ring.find(token)
    assert compared == [digest_of(b"one"), digest_of(b"two"), digest_of(b"three")]


def test_an_empty_ring_is_off() -> None:
    assert not Keyring(())
    assert Keyring(parse("x"))
    assert Keyring(()).find(b"x") is None


def test_nothing_that_is_shown_tells_a_secret_or_its_digest() -> None:
    found = parse(f"{SECRET}:read:in:")
    digest = digest_of(SECRET.encode())
    settings = Settings(api_keys=found)
    for text in (repr(found), str(found[0]), repr(Keyring(found)), repr(settings), f"{found[0]}"):
        assert SECRET not in text
        assert digest.hex() not in text
        assert repr(digest)[2:-1] not in text


def test_keys_travel_to_children_as_digests() -> None:
    settings = Settings(api_keys=parse(f"{SECRET}:rw:in:|out."))
    for codec in (msgspec.json, msgspec.msgpack):
        packed = codec.encode(settings)
        assert SECRET.encode() not in packed
        (key,) = codec.decode(packed, type=Settings).api_keys
        assert (key.digest, key.scopes, key.prefixes) == (digest_of(SECRET.encode()), R | W, ("in:", "out."))


@pytest.mark.parametrize("prefixes", ["a*", ".*", " a", "a b", "a # mine", "/", "-a", "\u00fc", "a\udcff", "ok|\udc80"])
def test_a_prefix_that_no_name_has_refuses(prefixes: str) -> None:
    """It is a mistake of whoever wrote it; what is no UTF-8 could not even travel to the children."""
    assert SECRET not in refusal(f"{SECRET}:read:{prefixes}")


# --- where they come from ----------------------------------------------------------------------------


def rights(settings: Settings) -> list[tuple[bytes, int, tuple[str, ...]]]:
    return [(key.digest, key.scopes, key.prefixes) for key in settings.api_keys]


def only(secret: str, scopes: int = ALL, prefixes: tuple[str, ...] = ()) -> list[Any]:
    return [(digest_of(secret.encode()), scopes, prefixes)]


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_none_anywhere() -> None:
    assert from_environment({}).api_keys == ()
    assert from_environment({"TOPICS_API_KEYS": "", "TOPICS_API_KEYS_FILE": ""}).api_keys == ()


def test_from_the_environment() -> None:
    assert rights(from_environment({"TOPICS_API_KEYS": "one:rw:in:"})) == only("one", R | W, ("in:",))


@pytest.mark.parametrize("name", ["TOPICS_API_KEYS", "TOPICS_API_KEYS_FILE"])
def test_an_error_names_its_source_and_no_secret(name: str, tmp_path: Path) -> None:
    text = f"good,{SECRET}:+"
    path = write(tmp_path / "keys", text)
    with pytest.raises(SettingsError) as caught:
        from_environment({name: text if name == "TOPICS_API_KEYS" else path})
    assert (name if name == "TOPICS_API_KEYS" else path) in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_list_without_a_key_refuses_rather_than_open_the_door() -> None:
    with pytest.raises(SettingsError, match="TOPICS_API_KEYS"):
        from_environment({"TOPICS_API_KEYS": ",,"})


def test_from_a_file_with_comments_and_blanks(tmp_path: Path) -> None:
    text = "# who may do what\n\none:rw:in:\n   # two: left\n  \ntwo:read,three\r\n#four\n"
    settings = from_environment({"TOPICS_API_KEYS_FILE": write(tmp_path / "keys", text)})
    assert rights(settings) == only("one", R | W, ("in:",)) + only("two", R) + only("three")


@pytest.mark.parametrize("text", ["", "\n", "# only words\n", "#a\n  # b\n\n"])
def test_a_file_without_a_key_refuses(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "keys", text)
    with pytest.raises(SettingsError, match="no key") as caught:
        from_environment({"TOPICS_API_KEYS_FILE": path})
    assert path in str(caught.value)


@pytest.mark.parametrize(
    "line", [f"{SECRET} # mine", f"{SECRET}:read # mine", f"{SECRET}:read#mine", f"{SECRET}::in: # mine"]
)
def test_a_comment_behind_a_key_refuses(line: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        from_environment({"TOPICS_API_KEYS_FILE": write(tmp_path / "keys", line)})
    assert SECRET not in str(caught.value)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    binary = write(tmp_path / "binary", SECRET.encode() + b"\xff\xfe")
    for path in (str(tmp_path / "missing"), str(folder), binary):
        with pytest.raises(SettingsError, match="TOPICS_API_KEYS_FILE") as caught:
            from_environment({"TOPICS_API_KEYS_FILE": path})
        assert path in str(caught.value)
        assert SECRET not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", SECRET)
    os.chmod(path, 0)
    with pytest.raises(SettingsError, match="TOPICS_API_KEYS_FILE"):
        from_environment({"TOPICS_API_KEYS_FILE": path})


def test_both_set_refuses(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "one")
    with pytest.raises(SettingsError, match="TOPICS_API_KEYS and TOPICS_API_KEYS_FILE") as caught:
        from_environment({"TOPICS_API_KEYS": SECRET, "TOPICS_API_KEYS_FILE": path})
    assert SECRET not in str(caught.value)


def test_from_credentials_of_the_service_manager(tmp_path: Path) -> None:
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert from_environment(environ).api_keys == ()
    write(tmp_path / CREDENTIAL, "# the service's\ncredential:read\n")
    assert rights(from_environment(environ)) == only("credential", R)


def test_a_file_that_is_named_wins_over_credentials(tmp_path: Path) -> None:
    write(tmp_path / CREDENTIAL, "credential")
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path), "TOPICS_API_KEYS_FILE": write(tmp_path / "keys", "named")}
    assert rights(from_environment(environ)) == only("named")


def test_credentials_that_are_bad_refuse(tmp_path: Path) -> None:
    write(tmp_path / CREDENTIAL, f"{SECRET}:read+")
    with pytest.raises(SettingsError) as caught:
        from_environment({"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]:4000", "10.0.0.7", "example.test"])
def test_a_public_address_with_and_without_keys(host: str, tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "one")
    for none in ({}, {"TOPICS_API_KEYS": ""}, {"TOPICS_ALLOW_INSECURE_NO_AUTH": "0"}):
        with pytest.raises(SettingsError, match="without API keys"):
            from_environment({"TOPICS_HOST": host, **none})
    for some in ({"TOPICS_API_KEYS": "one"}, {"TOPICS_API_KEYS_FILE": path}):
        assert rights(from_environment({"TOPICS_HOST": host, **some})) == only("one")
    assert from_environment({"TOPICS_HOST": host, "TOPICS_ALLOW_INSECURE_NO_AUTH": "1"}).api_keys == ()
