"""Request bodies: what is accepted and as what, what is refused and with which code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics import limits
from topics.errors import ApiError
from topics.gateway.api import schemas
from topics.settings import Settings
from topics.storage.columns import Columns, pack_joined
from topics.storage.config import TopicConfig

SETTINGS = Settings()
SMALL = Settings(
    max_batch_records=3, max_record_bytes=60, max_meta_bytes=30, max_tag_bytes=5, max_node_bytes=4, max_limit=50
)


def append(body: bytes | dict[str, Any], settings: Settings = SETTINGS, key: str | None = None) -> tuple[Any, Columns]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head, batch = schemas.decode_append(raw, "t", settings, key=key)
    return head, Columns(batch, count=head.count, ts=0)


def refused(body: bytes | dict[str, Any], settings: Settings = SETTINGS, key: str | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        append(body, settings, key)
    return caught.value


# --- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "A", "0", "a.b_c:d-e", "render-queue:tenantA", "a" * 255, "9..", "z::"])
def test_good_names(name: str) -> None:
    assert schemas.check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".a", "_a", ":a", "-a", "a/b", "a b", "a\n", "a\0", "é", "aé", "a" * 256, "a%20", "$a", "a*", "\u0661"]
)
def test_bad_names(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        schemas.check_name(name)
    assert caught.value.code == "invalid_request"


# --- append ------------------------------------------------------------------------------------------


def test_all_fields_of_an_append() -> None:
    head, batch = append(
        b'{"records":[{"data":{"a" : 1.0},"tag":"x","node":"n1","meta":{"k" : "v"}},{"data":null}],'
        b'"node":"n0","idempotency_key":"key","create":false,"config":{"ttl_ms":5},"disable_backpressure":true,"new":1}'
    )
    assert (head.topic, head.count, head.create, head.key) == ("t", 2, False, "key")
    assert head.config == TopicConfig(ttl_ms=5)
    assert batch.data() == [b'{"a" : 1.0}', b"null"]
    assert batch.tags() == ["x", None]
    assert batch.nodes() == ["n1", "n0"]
    assert batch.metas() == [b'{"k" : "v"}', None]
    assert head.size == batch.size == sum(batch.sizes())


@pytest.mark.parametrize(
    "value",
    [
        b"null",
        b"0",
        b"-0",
        b"1.50",
        b"1E+400",
        b"123456789012345678901234567890",
        b'"\\u00e9\\/\\""',
        '"é😀"'.encode(),
        b'{"b":1, "a":2,"b":3}',
        b"[ 1,\t2,\r\n3 ]",
        b'""',
    ],
)
def test_data_is_kept_byte_for_byte(value: bytes) -> None:
    for body in (b'{"records":[{"data":%b}]}' % value, b'{"records":[{"data": %b },{"data":1,"tag":"x"}]}' % value):
        assert append(body)[1].data()[0] == value


def test_a_batch_node_is_everybodys_unless_they_have_their_own() -> None:
    assert append({"records": [{"data": 1}, {"data": 2}], "node": "n"})[1].nodes() == ["n", "n"]
    assert append({"records": [{"data": 1, "node": "m"}, {"data": 2}]})[1].nodes() == ["m", None]
    assert append({"records": [{"data": 1, "tag": "x"}], "node": "n"})[1].nodes() == ["n"]


@pytest.mark.parametrize("meta", [b"null", None])
def test_null_means_absent(meta: bytes | None) -> None:
    part = b"" if meta is None else b',"meta":null,"tag":null,"node":null'
    _, batch = append(
        b'{"records":[{"data":1%b}],"node":null,"idempotency_key":null,"create":null,"config":null}' % part
    )
    assert (batch.has_tags, batch.has_nodes, batch.has_metas) == (False, False, False)


def test_the_last_of_two_equal_keys_counts() -> None:
    head, batch = append(b'{"records":[{"data":1}],"records":[{"data":2,"data":3,"tag":"a","tag":"b"}]}')
    assert head.count == 1
    assert (batch.data(), batch.tags()) == ([b"3"], ["b"])


def test_the_header_key_is_used_unless_the_body_has_one() -> None:
    assert append({"records": [{"data": 1}]}, key="header")[0].key == "header"
    assert append({"records": [{"data": 1}], "idempotency_key": "body"}, key="header")[0].key == "body"


INVALID = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b'{"records":null}',
    b'{"records":[]}',
    b'{"records":{}}',
    b'{"records":[1]}',
    b'{"records":[null]}',
    b'{"records":[{}]}',
    b'{"records":[{"tag":"x"}]}',
    b'{"records":[{"data":1,"tag":1}]}',
    b'{"records":[{"data":1,"node":["n"]}]}',
    b'{"records":[{"data":1,"meta":[]}]}',
    b'{"records":[{"data":1,"meta":"x"}]}',
    b'{"records":[{"data":1,"meta":1}]}',
    b'{"records":[{"data":1}],"node":1}',
    b'{"records":[{"data":1}],"create":"yes"}',
    b'{"records":[{"data":1}],"create":1}',
    b'{"records":[{"data":1}],"idempotency_key":7}',
    b'{"records":[{"data":1}],"idempotency_key":""}',
    b'{"records":[{"data":1}],"config":[]}',
    b'{"records":[{"data":1}],"config":{"ttl_ms":-1}}',
    b'{"records":[{"data":1}],"disable_backpressure":"no"}',
    b'{"records":[{"data":1}]',
    b'{"records":[{"data":1}]}x',
    b'{"records":[{"data":01}]}',
    b'{"records":[{"data":nul}]}',
    b'{"records":[{"data":[1,]}]}',
    b'{"records":[{"data":"a\x1eb"}]}',
    b'{"records":[{"data":"\x00"}]}',
    b'{"records":[{"data":"\xff"}]}',
    b'{"records":[{"data":"\xed\xa0\x80"}]}',
    b'{"records":[{"data":1,"meta":{"a":"\xff"}}]}',
    b'{"records":[{"data":1,"tag":"\\ud800"}]}',
    b'{"records":[{"data":NaN}]}',
    b"{'records':[{'data':1}]}",
    b'{"records":[{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    b'\xef\xbb\xbf{"records":[{"data":1}]}',
]


@pytest.mark.parametrize("body", INVALID, ids=lambda body: repr(body[:50]))
def test_bodies_that_are_refused(body: bytes) -> None:
    assert refused(body).code == "invalid_request"


@pytest.mark.parametrize(
    "half", [r"\ud800", r"\uDBFF", r"\udc00", r"\ud800x", r"\ud83d\n", r"\ud800\u0041", r"\\\ud800"]
)
@pytest.mark.parametrize(
    "body",
    [
        '{"records":[{"data":"%s"}]}',
        '{"records":[{"data":"x%s and more"}]}',
        '{"records":[{"data":{"%s":1}}]}',
        '{"records":[{"data":1,"tag":"%s"}]}',
        '{"records":[{"data":1,"meta":{"a":"%s"}}]}',
        '{"records":[{"data":1}],"node":"%s"}',
        '{"records":[{"data":1}],"%s":1}',
    ],
)
def test_a_lone_surrogate_is_called_that(body: str, half: str) -> None:
    """The decoder says of some that the body is cut, of others that something is wrong with an escape."""
    error = refused((body % half).encode())
    assert error.code == "invalid_request"
    assert "a lone surrogate" in error.message, error.message
    assert "truncated" not in error.message
    assert "both halves" in error.message


@pytest.mark.parametrize("end", ["", '"', "\\", r"\ud83d", "\\ud83d\\", r"\ud83d\u", r"\ud83d\ude0", r"\\ud83d x"])
def test_a_body_that_is_cut_is_called_that(end: str) -> None:
    error = refused(('{"records":[{"data":"' + "x" * 600 + end).encode())
    assert error.message == "the body is not valid JSON: it ends too early"


def test_a_surrogate_with_its_other_half_is_text() -> None:
    assert append(rb'{"records":[{"data":"\ud83d\ude00"}]}')[1].data() == [rb'"\ud83d\ude00"']
    assert append(rb'{"records":[{"data":"\\ud800"}]}')[1].data() == [rb'"\\ud800"']


def test_the_bounds_of_an_append() -> None:
    ok = {"data": 1}
    assert append({"records": [ok] * 3}, SMALL)[0].count == 3
    error = refused({"records": [ok] * 4}, SMALL)
    assert (error.code, error.detail) == ("batch_too_large", {"count": 4, "max": 3})
    assert append({"records": [{"data": 1, "tag": "12345"}]}, SMALL)[1].tags() == ["12345"]
    assert refused({"records": [{"data": 1, "tag": "123456"}]}, SMALL).code == "invalid_request"
    assert refused('{"records":[{"data":1,"tag":"ééé"}]}'.encode(), SMALL).code == "invalid_request"
    assert append({"records": [{"data": 1, "node": "1234"}]}, SMALL)
    assert refused({"records": [{"data": 1, "node": "12345"}]}, SMALL).code == "invalid_request"
    assert refused({"records": [ok], "node": "12345"}, SMALL).code == "invalid_request"


def test_the_bounds_of_a_record() -> None:
    exact = b'"' + b"x" * 58 + b'"'
    assert append(b'{"records":[{"data":%b}]}' % exact, SMALL)[1].data() == [exact]
    error = refused(b'{"records":[{"data":1},{"data":%b}]}' % (b'"' + b"x" * 59 + b'"'), SMALL)
    assert error.code == "record_too_large"
    assert error.detail is not None
    assert error.detail["record"] == 1
    meta = b'{"k":"%b"}' % (b"v" * 20)
    assert len(meta) == 28
    assert append(b'{"records":[{"data":%b,"meta":%b}]}' % (b"1" * 32, meta), SMALL)
    assert refused(b'{"records":[{"data":%b,"meta":%b}]}' % (b"1" * 33, meta), SMALL).code == "record_too_large"
    assert refused(b'{"records":[{"data":1,"meta":{"k":"%b"}}]}' % (b"v" * 23), SMALL).code == "invalid_request"


def test_the_bounds_of_meta_keys() -> None:
    def meta(keys: int) -> dict[str, Any]:
        return {"records": [{"data": 1, "meta": {f"k{key}": "a:b:c" for key in range(keys)}}]}

    assert append(meta(limits.MAX_META_KEYS))
    assert refused(meta(limits.MAX_META_KEYS + 1)).code == "invalid_request"
    nested = {"records": [{"data": 1, "meta": {"one": {f"k{key}": 1 for key in range(200)}}}]}
    assert append(nested)


def nested(levels: int, *, opens: bytes = b'{"a":', closes: bytes = b"}") -> bytes:
    return b'{"records":[{"data":1,"meta":{"a":%b1%b}}]}' % (opens * (levels - 1), closes * (levels - 1))


@pytest.mark.parametrize(("opens", "closes"), [(b'{"a":', b"}"), (b"[", b"]")])
def test_the_depth_of_meta(opens: bytes, closes: bytes) -> None:
    """Whoever reads it goes down as deep, from elsewhere in its stack."""

    def deeper(frames: int, batch: Columns) -> list[bytes | None]:
        return deeper(frames - 1, batch) if frames else batch.metas()

    def taken(levels: int) -> Columns | None:
        try:
            return append(nested(levels, opens=opens, closes=closes))[1]
        except ApiError:
            return None

    assert taken(limits.META_DEPTH)
    error = refused(nested(900, opens=opens, closes=closes))
    assert (error.code, error.detail) == ("invalid_request", {"field": "meta", "max": limits.META_DEPTH})
    deepest = [batch for levels in range(limits.META_DEPTH, 900) if (batch := taken(levels)) is not None][-1]
    assert len(deeper(300, deepest)) == 1
    assert append(b'{"records":[{"data":1,"meta":{"a":"%b"}}]}' % (b"[{" * 2_000))


def test_the_bounds_of_a_key() -> None:
    assert append({"records": [{"data": 1}], "idempotency_key": "k" * limits.MAX_KEY_CHARS})
    assert append({"records": [{"data": 1}], "idempotency_key": "é" * limits.MAX_KEY_CHARS})
    for key in ("k" * (limits.MAX_KEY_CHARS + 1), ""):
        assert refused({"records": [{"data": 1}]}, key=key).code == "invalid_request"


# --- the plain way is the ordinary way, only quicker -----------------------------------------------------

VALUES = st.sampled_from([b"1", b"null", b'"x"', b'{"a": [1, 2]}', b"[]", b"1.0", '"é"'.encode(), b'"\x1e"', b"01"])
PLAIN = st.lists(VALUES, max_size=5).map(
    lambda values: b'{"records":[' + b",".join(b'{"data":%b}' % value for value in values) + b"]}"
)
ODD = st.sampled_from(
    [
        b'{"records":[{"data":1}],"node":"n"}',
        b'{"records":[{"data":1,"tag":"x"}]}',
        b'{"records":[{"data":1,"unknown":2}]}',
        b'{"records":[{"data":1}],"unknown":2}',
        b'{"records":[{"data":1}],"records":[{"data":2}]}',
        b'{"records":[{"data":1,"data":2}]}',
        b' {"records" : [ {"data" : 1 } , {"data": 2} ] } ',
        b'{"records":[{"data":1}]}x',
        b"{}",
        b"",
    ]
)


@examples(200)
@given(body=st.one_of(PLAIN, ODD), small=st.booleans())
def test_the_plain_path_never_differs_from_the_ordinary_one(body: bytes, small: bool) -> None:
    settings = SMALL if small else SETTINGS
    plain = schemas.decode_plain(body, settings)
    if plain is None:
        return
    head, batch = schemas.decode_append(body, "t", settings, key=None)
    count, size, joined = plain
    assert (count, size, pack_joined(joined, tags=None, nodes=None, metas=None)) == (head.count, head.size, batch)
    assert (head.create, head.config, head.key) == (None, None, None)


def test_the_plain_path_is_taken() -> None:
    assert schemas.decode_plain(b'{"records":[{"data":1}]}', SETTINGS) is not None
    assert schemas.decode_plain(b'{"records":[{"data":1},{"data":{"a":2}}]}', SETTINGS) is not None


# --- config ------------------------------------------------------------------------------------------


def config(**fields: Any) -> TopicConfig:
    return schemas.decode_config(json.dumps(fields).encode(), "t")[0]


@pytest.mark.parametrize(
    ("given_durability", "given_durable", "resolved"),
    [
        (None, None, "disk"),
        (None, False, "disk"),
        (None, True, "fsync"),
        ("disk", None, "disk"),
        ("disk", True, "disk"),
        ("fsync", False, "fsync"),
        ("fsync", None, "fsync"),
        ("memory", None, "memory"),
        ("memory", True, "memory"),
        ("ephemeral", None, "ephemeral"),
        ("ephemeral", True, "ephemeral"),
    ],
)
def test_the_durability_class(given_durability: str | None, given_durable: bool | None, resolved: str) -> None:
    fields: dict[str, Any] = {}
    if given_durability is not None:
        fields["durability"] = given_durability
    if given_durable is not None:
        fields["durable"] = given_durable
    found = config(**fields)
    assert found.durability == resolved
    assert found.durable == (resolved == "fsync")


def test_defaults() -> None:
    assert schemas.decode_config(b"", "t") == (TopicConfig(), None)
    assert schemas.decode_config(b"{}", "t") == (TopicConfig(), None)


def test_every_field_is_taken_over() -> None:
    fields = {
        "type": "queue",
        "ttl_ms": 1,
        "cap_records": 2,
        "cap_bytes": 3,
        "discard": "reject",
        "durable": True,
        "durability": "fsync",
        "priority": 4,
        "auto_priority": False,
        "auto_create": False,
        "idempotency_window_ms": 5,
        "dedupe_node": False,
        "lease_ms": 600,
        "claim_jitter_ms": 7,
        "max_deliveries": 8,
        "dead_letter": "dlq",
        "leases_durable": True,
    }
    assert set(fields) == set(TopicConfig.__struct_fields__)
    assert config(**fields) == TopicConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["log", "queue"])
def test_a_type_that_was_said_is_told_apart_from_one_that_was_not(kind: str) -> None:
    assert schemas.decode_config(b'{"type":"%b"}' % kind.encode(), "t")[1] == kind


@pytest.mark.parametrize(
    ("field", "given_value", "kept"),
    [
        ("priority", 5_000, 1_000),
        ("priority", -5_000, -1_000),
        ("priority", 1_000, 1_000),
        ("priority", None, None),
        ("lease_ms", 1, 100),
        ("lease_ms", 0, 100),
        ("lease_ms", 10**12, 86_400_000),
        ("claim_jitter_ms", 10**6, 5_000),
        ("ttl_ms", limits.U64_MAX, limits.U64_MAX),
        ("cap_bytes", limits.U64_MAX, limits.U64_MAX),
    ],
)
def test_clamps(field: str, given_value: int | None, kept: int | None) -> None:
    assert getattr(config(**{field: given_value}), field) == kept


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "stream"},
        {"type": None},
        {"ttl_ms": -1},
        {"ttl_ms": limits.U64_MAX + 1},
        {"ttl_ms": "1"},
        {"ttl_ms": 1.5},
        {"ttl_ms": None},
        {"ttl_ms": True},
        {"cap_records": -1},
        {"cap_bytes": -1},
        {"discard": "new"},
        {"durable": 1},
        {"durable": "true"},
        {"durability": "platter"},
        {"durability": None},
        {"priority": "high"},
        {"priority": 1.5},
        {"auto_priority": None},
        {"auto_create": "no"},
        {"idempotency_window_ms": -1},
        {"dedupe_node": 0},
        {"lease_ms": -1},
        {"claim_jitter_ms": -1},
        {"max_deliveries": -1},
        {"dead_letter": "t"},
        {"dead_letter": "not a name"},
        {"dead_letter": ""},
        {"leases_durable": 1},
    ],
    ids=str,
)
def test_configs_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        config(**fields)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"x"', b"{", b"{}x", b"\xff"])
def test_config_bodies_that_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        schemas.decode_config(body, "t")
    assert caught.value.code == "invalid_request"


# --- diff --------------------------------------------------------------------------------------------


def test_diff_defaults() -> None:
    for body in (b"", b"{}"):
        diff = schemas.decode_diff(body, "t", SETTINGS)
        assert (diff.topic, diff.from_seq, diff.limit, diff.nodes) == ("t", 0, 256, None)
        assert (diff.include_tags, diff.include_meta, diff.wait_ms) == (False, True, 0)
        assert diff.max_bytes == limits.DEFAULT_BATCH_BYTES


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"limit": 0}, "limit", 256),
        ({"limit": 1}, "limit", 1),
        ({"limit": 1_000}, "limit", 1_000),
        ({"limit": 1_001}, "limit", 1_000),
        ({"limit": 10**30}, "limit", 1_000),
        ({"wait_ms": 30_001}, "wait_ms", 30_000),
        ({"wait_ms": 10**30}, "wait_ms", 30_000),
        ({"max_batch_bytes": 0}, "max_bytes", limits.MIB),
        ({"max_batch_bytes": 1}, "max_bytes", 1),
        ({"max_batch_bytes": 8 * limits.MIB}, "max_bytes", 8 * limits.MIB),
        ({"max_batch_bytes": 8 * limits.MIB + 1}, "max_bytes", 8 * limits.MIB),
        ({"max_batch_bytes": 10**30}, "max_bytes", 8 * limits.MIB),
        ({"node": "a"}, "nodes", ["a"]),
        ({"node": ["a", "b"]}, "nodes", ["a", "b"]),
        ({"node": None}, "nodes", None),
        ({"from_seq": limits.U64_MAX}, "from_seq", limits.U64_MAX),
        ({"include_tags": True}, "include_tags", True),
        ({"include_meta": False}, "include_meta", False),
        ({"unknown": 1}, "limit", 256),
    ],
    ids=str,
)
def test_diff_fields(fields: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(schemas.decode_diff(json.dumps(fields).encode(), "t", SETTINGS), field) == value


def test_the_limit_is_clamped_to_the_setting() -> None:
    assert schemas.decode_diff(b'{"limit":500}', "t", SMALL).limit == 50
    assert schemas.decode_diff(b"{}", "t", SMALL).limit == 50


@pytest.mark.parametrize(
    "fields",
    [
        {"from_seq": -1},
        {"from_seq": "1"},
        {"from_seq": 1.5},
        {"from_seq": None},
        {"from_seq": limits.U64_MAX + 1},
        {"limit": -1},
        {"limit": "9"},
        {"limit": True},
        {"wait_ms": -1},
        {"wait_ms": "1"},
        {"max_batch_bytes": -1},
        {"max_batch_bytes": "1"},
        {"max_batch_bytes": 1.5},
        {"node": 1},
        {"node": [1]},
        {"node": ["n"] * 1_001},
        {"include_tags": 1},
        {"include_meta": None},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_diffs_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        schemas.decode_diff(json.dumps(fields).encode(), "t", SETTINGS)
    assert caught.value.code == "invalid_request"


# --- delete ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"before_seq": 5}, (5, None, False)),
        ({"before_seq": 0}, (0, None, False)),
        ({"before_seq": limits.U64_MAX}, (limits.U64_MAX, None, False)),
        ({"match": "X"}, (None, "X", False)),
        ({"match": "X*"}, (None, "X*", False)),
        ({"match": ""}, (None, "", False)),
        ({"match": ["tag", "Eq", "X"]}, (None, "X", False)),
        ({"match": ["tag", "Eq", "X*"]}, (None, "X*", False)),
        ({"match": ["tag", "Glob", "X*"]}, (None, "X", True)),
        ({"match": ["tag", "Glob", "*"]}, (None, "", True)),
        ({"match": ["tag", "Eq", "X"], "before_seq": 9}, (9, "X", False)),
        ({"match": None, "before_seq": 9}, (9, None, False)),
    ],
    ids=str,
)
def test_deletes(fields: dict[str, Any], expected: tuple[int | None, str | None, bool]) -> None:
    found = schemas.decode_delete(json.dumps(fields).encode(), "t")
    assert (found.before_seq, found.tag, found.prefix) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"before_seq":null}',
        b'{"before_seq":-1}',
        b'{"before_seq":"1"}',
        b'{"before_seq":1.5}',
        b'{"before_seq":18446744073709551616}',
        b'{"match":1}',
        b'{"match":[]}',
        b'{"match":["tag"]}',
        b'{"match":["tag","Eq"]}',
        b'{"match":["tag","Eq",1]}',
        b'{"match":["node","Eq","x"]}',
        b'{"match":["tag","eq","x"]}',
        b'{"match":["tag","Regex","x"]}',
        b'{"match":["tag","Glob","x"]}',
        b'{"match":["tag","Glob",""]}',
        b'{"match":["tag","Glob","*x"]}',
        b'{"match":["tag","Glob","x**"]}',
        b'{"match":["tag","Glob","x*y*"]}',
        b'{"match":["tag","Eq","x","y"]}',
        b'{"match":{"tag":"x"}}',
        b"[]",
        b"{",
    ],
)
def test_deletes_that_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        schemas.decode_delete(body, "t")
    assert caught.value.code == "invalid_request"
