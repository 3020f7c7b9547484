"""Hostile JSON: for every body of the API all its fields, and values that none of them expects.

Bodies are put together as text, because much of what is hostile can't be said by a JSON writer: numbers that no type
holds, NaN, half a surrogate pair, a key twice, bytes that are not UTF-8, nesting without end.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from random import Random
from urllib.parse import quote

from .mutations import mutate

Fields = list[tuple[bytes, bytes]]


@dataclass(slots=True, frozen=True)
class Endpoint:
    method: str
    path: str
    fields: tuple[tuple[str, object], ...]
    query: tuple[str, ...] = ()  # parameters it knows


_CONFIG: dict[str, object] = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 20,
    "cap_bytes": 0,
    "discard": "old",
    "durable": False,
    "durability": "disk",
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 1_000,
    "dedupe_node": True,
    "lease_ms": 100,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "leases_durable": False,
}
_RECORD = {"data": {"n": 1}, "tag": "a:1", "node": "n1", "meta": {"k": "v"}}
ENDPOINTS = (
    Endpoint(
        "POST",
        "/v0/topics/{t}",
        (
            ("records", [_RECORD, {"data": 2}]),
            ("node", "n2"),
            ("idempotency_key", "k-1"),
            ("create", True),
            ("config", {"cap_records": 20}),
            ("disable_backpressure", False),
        ),
        ("return_seqs",),
    ),
    Endpoint(
        "POST",
        "/v0/topics/log/diff",
        (
            ("from_seq", 0),
            ("limit", 5),
            ("node", ["n1", "n2"]),
            ("include_tags", True),
            ("include_meta", True),
            ("wait_ms", 0),
            ("max_batch_bytes", 1_000),
        ),
    ),
    Endpoint("POST", "/v0/topics/{t}/diff", (("from_seq", 0), ("limit", 5), ("node", "n1"), ("include_tags", True))),
    Endpoint("POST", "/v0/topics/{t}/delete", (("before_seq", 1), ("match", ["tag", "Glob", "a:*"]))),
    Endpoint("POST", "/v0/topics/jobs/claim", (("node", "w"), ("max", 2), ("lease_ms", 100))),
    Endpoint("POST", "/v0/topics/jobs/claim", (("node", "w"), ("max", 50), ("lease_ms", 100))),
    Endpoint("POST", "/v0/topics/jobs/ack", (("node", "w"), ("seqs", [1, 2]), ("lease_ids", ["lease_1", "lease_2"]))),
    Endpoint(
        "POST", "/v0/topics/jobs/nack", (("node", "w"), ("seqs", [1]), ("lease_ids", ["lease_1"]), ("delay_ms", 0))
    ),
    Endpoint(
        "POST", "/v0/topics/jobs/extend", (("node", "w"), ("seqs", [1]), ("lease_ids", ["lease_1"]), ("lease_ms", 100))
    ),
    Endpoint("PUT", "/v0/topics/{p}", tuple(_CONFIG.items())),
    Endpoint(
        "PUT",
        "/v0/routers/{r}",
        (
            ("source", "log"),
            ("dest", "copy-1"),
            ("preserve_node", True),
            ("preserve_tag", True),
            ("create_dest", True),
            ("filter", ["tag", "Eq", "a:1"]),
            ("allow_cycle", False),
            ("guarantee", "at_least_once"),
        ),
    ),
    Endpoint(
        "POST",
        "/v0/watch",
        (
            ("topics", {"log": {"from_seq": 0, "tail": False}}),
            ("node", "n1"),
            ("limit", 5),
            ("max_batch_bytes", 1_000),
            ("heartbeat_ms", 1_000),
            ("include_meta", True),
            ("include_tags", True),
            ("include_data", True),
            ("consistency", "eventual"),
            ("cursor", "eyJsb2ciOjF9"),
        ),
        ("lenient",),
    ),
    Endpoint("GET", "/v0/topics", (), ("prefix", "page_size", "cursor")),
    Endpoint("GET", "/v0/routers", (), ("prefix", "source", "dest", "page_size", "cursor")),
    Endpoint("GET", "/v0/metrics", (), ("topic",)),
    Endpoint("GET", "/v0/topics/{t}", (), ("x",)),
    Endpoint("DELETE", "/v0/topics/{p}", (), ("x", "if_empty", "force")),
    Endpoint("DELETE", "/v0/routers/{r}", (), ("x",)),
)


# --- values ------------------------------------------------------------------------------------------


def _deep(depth: int, kind: bytes) -> bytes:
    return b"[" * depth + b"]" * depth if kind == b"[" else b'{"a":' * depth + b"1" + b"}" * depth


NUMBERS = (
    b"0",
    b"-0",
    b"-1",
    b"1",
    b"1.0",
    b"1.5",
    b"-1.5",
    b"1e3",
    b"1E+2",
    b"1e400",
    b"-1e400",
    b"1e-400",
    b"0.1e1",
    b"255",
    b"1000001",
    b"9007199254740993",
    b"9223372036854775807",
    b"9223372036854775808",
    b"-9223372036854775808",
    b"-9223372036854775809",
    b"18446744073709551614",
    b"18446744073709551615",
    b"18446744073709551616",
    b"1" + b"0" * 30,
    b"-1" + b"0" * 30,
    b"9" * 5_000,
    b"0." + b"3" * 2_000,
    b"1e99999999999",
)
NOT_JSON = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"-",
    b"+1",
    b".5",
    b"1.",
    b"01",
    b"0x10",
    b"1_000",
    b"tru",
    b"True",
    b"None",
    b"undefined",
    b"'x'",
    b'"x',
    b'"\\x41"',
    b'"\\u12"',
    b'"\t"',
    b'"\n"',
    b'"\0"',
    b"[1,]",
    b"[,1]",
    b"[1 2]",
    b'{"a":1,}',
    b"{a:1}",
    b'{"a"}',
    b"/* */1",
    b"",
    b"[",
    b"{",
    b"]",
    b"\xef\xbb\xbf1",
    b'"\xff"',
    b'"\xc3\x28"',
    b'"\xed\xa0\x80"',
    b'"\xf5\x80\x80\x80"',
)
STRINGS = (
    b'""',
    b'" "',
    b'"a"',
    b'"log"',
    b'"jobs"',
    b'"queue"',
    b'"fsync"',
    b'"\\u0000"',
    b'"a\\u0000b"',
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"x\\ud83d"',
    b'"\\ud83d\\ude00"',
    '"é"'.encode(),
    '"😀"'.encode(),
    '"\u202e\u200b"'.encode(),
    '"İstanbul"'.encode(),
    b'"\\/\\b\\f"',
    b'"../../x"',
    b'"a/b"',
    b'"-x"',
    b'"x*"',
    b'"lease_ffffffffffffffff"',
    b'"lease_-1"',
    b'"' + b"a" * 129 + b'"',
    b'"' + b"a" * 256 + b'"',
    b'"' + b"a" * 257 + b'"',
    b'"' + "é".encode() * 200 + b'"',
    b'"' + b"\\u00e9" * 200 + b'"',
    b'"' + b"x" * 20_000 + b'"',
    b'"' + b"\\n" * 20_000 + b'"',
    b'"eyJsb2ciOi0xfQ"',
    b'"eyJsb2ciOjFlNDAwfQ"',
    b'"eyJsb2ciOjE4NDQ2NzQ0MDczNzA5NTUxNjE2fQ"',
    b'"W10"',
    b'"%00"',
)
ARRAYS = (
    b"[]",
    b"[[]]",
    b"[null]",
    b"[1,2,3]",
    b'["a","b"]',
    b'["tag","Eq","x"]',
    b'["tag","Glob","x"]',
    b'["tag","Glob","*"]',
    b'["tag","Glob","a**"]',
    b'["tag","Glob","\\ud800*"]',
    b'["tag","Eq","' + b"t" * 300 + b'"]',
    b'["node","Eq","x"]',
    b'["tag","Regex",".*"]',
    b'["tag","Eq",1]',
    b'["tag","Eq"]',
    b"[-1]",
    b"[1.5]",
    b"[18446744073709551615]",
    b"[18446744073709551616]",
    b"[1,1,1,1]",
    b"[" + b",".join(b"%d" % n for n in range(1_001)) + b"]",
    b"[" + b",".join(b'"%d"' % n for n in range(1_001)) + b"]",
    b'[{"data":1},{"data":NaN}]',
    b'[{"data":1,"data":2}]',
    b'[{"tag":"x"}]',
    b'[{"data":1,"tag":1}]',
    b'[{"data":1,"tag":"\\ud800"}]',
    b'[{"data":1,"node":"\\ud800"}]',
    b'[{"data":1,"tag":"\\u0000","node":"\\u0000"}]',
    b'[{"data":"\\ud800"}]',
    b'[{"data":1,"meta":null}]',
    b'[{"data":1,"meta":[]}]',
    b'[{"data":1,"meta":{"a":1,"a":2}}]',
    b'[{"data":1,"meta":{"\\ud800":1}}]',
    b'[{"data":1,"meta":{' + b",".join(b'"k%d":1' % n for n in range(65)) + b"}}]",
    b'[{"data":1,"meta":{' + b",".join(b'"\\ud8%02d":1' % (n % 100) for n in range(70)) + b"}}]",
    b'[{"data":1,"meta":{"a":"' + b":" * 100 + b'","\\ud800":1}}]',
    b'[{"data":1,"meta":{"_topics_router":{"x":1}}}]',
    b'[{"data":1,"meta":{"_topics_router":"x"}}]',
    b'[{"data":' + b"1" * 10_000 + b"}]",
    b'[{"data":1e400}]',
    b'[{"data":-0.0}]',
    b'[{"data": 1 , "tag" : "x" }]',
    b'[{"data":' + _deep(200, b"[") + b"}]",
    b'[{"data":' + _deep(900, b"{") + b"}]",
    b'[{"data":1,"meta":' + _deep(300, b"{") + b"}]",
)
OBJECTS = (
    b"{}",
    b'{"a":1}',
    b'{"":{}}',
    b'{"log":{"from_seq":-1}}',
    b'{"log":{"from_seq":18446744073709551615}}',
    b'{"log":{"from_seq":18446744073709551616}}',
    b'{"log":{"tail":1}}',
    b'{"log":null}',
    b'{"log":[]}',
    b'{"log":{},"log":{"tail":true}}',
    b'{"\\ud800":{}}',
    b'{"a\\u0000":{}}',
    b'{"absent":{}}',
    '{"é":{}}'.encode(),
    b"{" + b",".join(b'"t%d":{}' % n for n in range(257)) + b"}",
    b'{"cap_records":-1}',
    b'{"type":"queue","dead_letter":"log","max_deliveries":18446744073709551615}',
    b'{"ttl_ms":18446744073709551615}',
    b'{"cap_bytes":1}',
    b'{"durability":"fsync","durable":false}',
)
DEEP = (_deep(500, b"["), _deep(500, b"{"), _deep(5_000, b"["), _deep(50_000, b"["), _deep(5_000, b"{"), b"[" * 100_000)
_LITERALS = (b"null", b"true", b"false")
_KINDS = (NUMBERS, NUMBERS, STRINGS, STRINGS, ARRAYS, ARRAYS, OBJECTS, NOT_JSON, _LITERALS)


def hostile_value(dice: Random) -> bytes:
    roll = dice.random()
    if roll < 0.02:
        return dice.choice(DEEP)
    value = dice.choice(dice.choice(_KINDS))
    return mutate(dice, value, times=1) if roll < 0.08 and len(value) < 1_000 else value


def render(fields: Fields, *, between: bytes = b",", colon: bytes = b":") -> bytes:
    return b"{" + between.join(name + colon + value for name, value in fields) + b"}"


# --- bodies ------------------------------------------------------------------------------------------

_OTHER_NAMES = (
    b'"x"',
    b'""',
    b'"\\ud800"',
    b'"Records"',
    b'"$seq"',
    b'"__proto__"',
    b'"\\u0000"',
    b'"' + b"n" * 5_000 + b'"',
)
_WHOLE: tuple[bytes, ...] = (
    b"",
    b"null",
    b"[]",
    b"1",
    b'"x"',
    b"{}",
    b"{}{}",
    b"{} x",
    b" {} ",
    b"\0",
    b"\xef\xbb\xbf{}",
    b"{",
    b'{"a":1',
)
_WHOLE += (
    "{}".encode("utf-16"),
    "{}".encode("utf-32"),
    b"\xff",
    b"[" * 100_000,
    b" " * 50_000,
    b'{"":' * 2_000,
    b"nul",
)


def hostile_body(dice: Random, endpoint: Endpoint) -> bytes:
    roll = dice.random()
    if roll < 0.05:
        return dice.choice(_WHOLE)
    fields = [(json.dumps(name).encode(), json.dumps(value).encode()) for name, value in endpoint.fields]
    kept = [field for field in fields if dice.random() < 0.7] or fields
    at = dice.randrange(len(kept))
    if roll < 0.65:
        kept[at] = (kept[at][0], hostile_value(dice))
    elif roll < 0.75:
        for index in range(len(kept)):
            kept[index] = (kept[index][0], hostile_value(dice))
    elif roll < 0.83:
        kept.insert(dice.randrange(len(kept) + 1), (kept[at][0], hostile_value(dice)))
    elif roll < 0.90:
        kept.insert(at, (dice.choice(_OTHER_NAMES), hostile_value(dice)))
    elif roll < 0.95:
        return mutate(dice, render(kept))
    else:
        dice.shuffle(kept)
        return render(
            kept, between=dice.choice((b" , ", b"\n,\t", b",,", b"")), colon=dice.choice((b" : ", b"::", b""))
        )
    return render(kept)


_QUERY_VALUES = (
    "",
    "0",
    "-1",
    "1",
    "2",
    "1001",
    "1e3",
    "1.5",
    "true",
    "TRUE",
    "yes",
    "\0",
    "é",
    "٣",
    "\ud800",
    "x" * 300,
    "9" * 4_300,
    "9" * 30,
    " 1",
    "+1",
    "1_0",
    "log",
    "../",
    "a&b=c",
    "%",
)


def _cursor(dice: Random) -> str:
    inner = dice.choice(
        (
            b"",
            b"x",
            b"{}",
            b"[]",
            b"1",
            b'{"after":1}',
            b'{"after":"log"}',
            b'{"after":"\\ud800"}',
            b"[" * 3_000,
            b"\xff",
        )
    )
    text = base64.b64encode(inner if dice.random() < 0.7 else mutate(dice, inner or b"x")).decode()
    return dice.choice((text, text.rstrip("="), text + "=", text[:-1], text + "!", text.replace("+", "-")))


def hostile_query(dice: Random, endpoint: Endpoint) -> str:
    pairs = []
    for name in endpoint.query:
        if dice.random() < 0.6:
            value = _cursor(dice) if name == "cursor" and dice.random() < 0.7 else dice.choice(_QUERY_VALUES)
            pairs.append(
                f"{name}={quote(value.encode('utf-8', 'surrogatepass'), safe='+=' if dice.random() < 0.3 else '')}"
            )
    if dice.random() < 0.1:
        pairs.append(dice.choice(("x", "=", "&&", "a=1;b=2", "%zz=%", "prefix", "%ff=%fe", "page_size=1&page_size=x")))
    text = f"?{'&'.join(pairs)}" if pairs else ""
    return text if len(text) < 8_000 else ""  # a longer target ends the connection, which is tried elsewhere


_NAMES = ("log", "log", "jobs", "jobs", "absent", "body-1", "body-2", "put-1", "put-2")


def hostile_request(dice: Random) -> tuple[str, str, bytes | None]:
    """Method, target and body; the HTTP around it is always right."""
    endpoint = dice.choice(ENDPOINTS)
    path = endpoint.path.replace("{t}", dice.choice(_NAMES))
    path = path.replace("{p}", dice.choice(("put-1", "put-2", "put-3", "put-4"))).replace(
        "{r}", f"r-{dice.randrange(4)}"
    )
    if dice.random() < 0.04:
        odd = dice.choice(("é", "😀", "a b", "a\0", "..", "-", ">", "a" * 255, "a" * 256, "%", "A.b_c:d-e"))
        parts = path.split("/")
        if len(parts) > 3:
            parts[3] = quote(odd, safe="")
            path = "/".join(parts)
    body = hostile_body(dice, endpoint) if endpoint.fields else None
    return endpoint.method, path + (hostile_query(dice, endpoint) if endpoint.query else ""), body
