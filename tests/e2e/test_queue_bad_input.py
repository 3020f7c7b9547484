"""What claim, ack, nack and extend refuse, in both lanes: the exact error, no lease touched, nothing created.

The fuzz at the end sends bodies of every kind: which of them are good is said there once more, in a few lines that know
nothing of the server's.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from .client import LANES, Client, unique
from .queues import ENDPOINTS, Queue, check, leases_of, make_queue, seqs_of
from .routing import topic_names
from .server import Server

pytestmark = pytest.mark.e2e

U64_MAX = 2**64 - 1
GOOD: dict[str, dict[str, object]] = {
    "claim": {"node": "w", "max": 2, "lease_ms": 30_000},
    "ack": {"node": "w", "seqs": [1], "lease_ids": ["x"]},
    "nack": {"node": "w", "seqs": [1], "delay_ms": 0, "lease_ids": ["x"]},
    "extend": {"node": "w", "seqs": [1], "lease_ms": 30_000, "lease_ids": ["x"]},
}
MISSING = object()

BAD_NODES = [MISSING, None, "", 0, 7, 1.5, True, [], ["w"], {}, "x" * 129, "é" * 65, "😀" * 33]
BAD_NUMBERS = ["1", "", True, False, 1.5, -1, [], [1], {}]
BAD_SEQS = [
    MISSING,
    None,
    [],
    {},
    "1",
    1,
    True,
    ["1"],
    [1, "2"],
    [None],
    [1.5],
    [True],
    [[1]],
    [{}],
    [-1],
    [1, -1],
    [U64_MAX + 1],
]
BAD_LEASES = [[], ["x", "y"], "x", 1, True, {}, [1], [None], [["x"]], [True]]


def _variants() -> Iterator[tuple[str, str, object]]:
    for endpoint in ENDPOINTS:
        for node in BAD_NODES:
            yield endpoint, "node", node
    for value in (0, *BAD_NUMBERS):
        yield "claim", "max", value
    for value in BAD_NUMBERS:
        yield "claim", "lease_ms", value
        yield "nack", "delay_ms", value
    for value in (MISSING, None, *BAD_NUMBERS):
        yield "extend", "lease_ms", value
    for endpoint in ("ack", "nack", "extend"):
        for value in BAD_SEQS:
            yield endpoint, "seqs", value
        for value in BAD_LEASES:
            yield endpoint, "lease_ids", value


def _shown(value: object) -> str:
    return "missing" if value is MISSING else f"{value!s:.20}-{type(value).__name__}"


VARIANTS = list(_variants())


def _half_leased(api: Client) -> Queue:
    """One job is leased to w, one is fresh."""
    queue = make_queue(api)
    queue.produce(1, 2)
    queue.take(lease_ms=86_400_000)
    return queue


@pytest.fixture(scope="module")
def queues(clients: dict[str, Client]) -> dict[str, Queue]:
    return {lane: _half_leased(client) for lane, client in clients.items()}


@pytest.fixture
def queue(queues: dict[str, Queue], lane: str) -> Queue:
    """The same for all tests, by one lane and by the other: none of them changes it."""
    return queues[lane]


@pytest.fixture
def own_queue(api: Client) -> Queue:
    """For tests that do."""
    return _half_leased(api)


def _unchanged(queue: Queue) -> None:
    queue.assert_counters(1, 1)
    assert queue.left() == [1, 2]


# --- fields ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("endpoint", "field", "value"), VARIANTS, ids=[f"{e}-{f}-{_shown(v)}" for e, f, v in VARIANTS])
def test_a_field_that_is_missing_or_wrong(queue: Queue, endpoint: str, field: str, value: object) -> None:
    body = dict(GOOD[endpoint])
    if field == "seqs":
        body.pop("lease_ids")
    if value is MISSING:
        del body[field]
    else:
        body[field] = value
    assert queue.post(endpoint, body).refusal == (400, "invalid_request")
    _unchanged(queue)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_empty_object(queue: Queue, endpoint: str) -> None:
    assert queue.post(endpoint, {}).refusal == (400, "invalid_request")
    _unchanged(queue)


@pytest.mark.parametrize("endpoint", ["ack", "nack", "extend"])
@pytest.mark.parametrize(("seqs", "tokens"), [([1, 2], ["x"]), ([1], ["x", "y"]), ([1, 2], []), ([1, 2, 3], ["x"] * 2)])
def test_as_many_tokens_as_seqs(queue: Queue, endpoint: str, seqs: list[int], tokens: list[str]) -> None:
    body = GOOD[endpoint] | {"seqs": seqs, "lease_ids": tokens}
    assert queue.post(endpoint, body).refusal == (400, "invalid_request")
    _unchanged(queue)


@pytest.mark.parametrize("endpoint", ["ack", "nack", "extend"])
@pytest.mark.parametrize("tokens", [False, True], ids=["without tokens", "with tokens"])
def test_a_thousand_seqs_and_no_more(own_queue: Queue, endpoint: str, tokens: bool) -> None:
    body = {name: value for name, value in GOOD[endpoint].items() if name != "lease_ids"}
    for count in (1_001, 1_002, 5_000):
        more = {"lease_ids": ["x"] * count} if tokens else {}
        answer = own_queue.post(endpoint, body | {"seqs": list(range(1, count + 1))} | more)
        assert answer.refusal == (400, "batch_too_large")
        _unchanged(own_queue)
    more = {"lease_ids": ["x"] * 1_000} if tokens else {}
    answer = own_queue.post(endpoint, body | {"seqs": list(range(1, 1_001))} | more)
    check(answer, endpoint, own_queue.name)
    assert answer["skipped"] == list(range(1 if tokens else 2, 1_001))


# --- bodies ------------------------------------------------------------------------------------------

NO_OBJECTS = [b"", b" ", b"null", b"[]", b'"x"', b"7", b"true", b"{", b"{}x", b"\xff", b'{"node":"w"', b"{'node':'w'}"]
MALFORMED = [
    b'{"node":"w","seqs":[1,],"lease_ms":1}',
    b'{"node":"w","seqs":[01],"lease_ms":1}',
    b'{"node":"w","seqs":[NaN],"lease_ms":1}',
    b'{"node":"w","seqs":[1],"lease_ms":Infinity}',
    b'{"node":"\xff","seqs":[1],"lease_ms":1}',
    b'{"node":"\xed\xa0\x80","seqs":[1],"lease_ms":1}',
    rb'{"node":"\x77","seqs":[1],"lease_ms":1}',
    rb'{"node":"\ud800","seqs":[1],"lease_ms":1}',
    b'{"node":"w","seqs":[1],"lease_ms":1}{}',
    b'{"node":"w","seqs":' + b"[" * 100_000 + b"]" * 100_000 + b',"lease_ms":1}',
    b'{"node":"w","seqs":[1],"lease_ms":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'\xef\xbb\xbf{"node":"w","seqs":[1],"lease_ms":1}',
]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("content", NO_OBJECTS + MALFORMED, ids=lambda content: f"{content[:30]!r}")
def test_a_body_that_is_no_good_json_object(queue: Queue, endpoint: str, content: bytes) -> None:
    answer = queue.api.send("POST", f"/v0/topics/{queue.name}/{endpoint}", content=content)
    assert answer.refusal == (400, "invalid_request")
    _unchanged(queue)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_body_at_all(queue: Queue, endpoint: str) -> None:
    assert queue.api.send("POST", f"/v0/topics/{queue.name}/{endpoint}").refusal == (400, "invalid_request")
    _unchanged(queue)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_another_content_type(queue: Queue, endpoint: str, content_type: str) -> None:
    body = json.dumps(GOOD[endpoint]).encode()
    headers = {"Content-Type": content_type}
    answer = queue.api.send("POST", f"/v0/topics/{queue.name}/{endpoint}", content=body, headers=headers)
    assert answer.refusal == (415, "unsupported_media_type")
    _unchanged(queue)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_bad_gzip(queue: Queue, endpoint: str) -> None:
    body = gzip.compress(json.dumps(GOOD[endpoint]).encode())[:-3]
    headers = {"Content-Encoding": "gzip"}
    answer = queue.api.send("POST", f"/v0/topics/{queue.name}/{endpoint}", content=body, headers=headers)
    assert answer.refusal == (400, "invalid_request")
    _unchanged(queue)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_body_that_is_too_large(small: Client, endpoint: str) -> None:
    queue = make_queue(small)
    queue.produce(1)
    answer = queue.post(endpoint, GOOD[endpoint] | {"x": "y" * 20_000})
    assert answer.refusal == (413, "payload_too_large")
    queue.assert_counters(1, 0)


# --- numbers of every size ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, U64_MAX, 2**64, 10**30, -(2**63) - 1, -(10**30)])
@pytest.mark.parametrize(
    ("endpoint", "field"), [("claim", "max"), ("claim", "lease_ms"), ("nack", "delay_ms"), ("extend", "lease_ms")]
)
def test_numbers_of_any_size_are_clamped_or_refused(own_queue: Queue, endpoint: str, field: str, number: int) -> None:
    answer = own_queue.post(endpoint, GOOD[endpoint] | {field: number})
    if number < 0:
        assert answer.refusal == (400, "invalid_request")
    elif number <= U64_MAX:
        check(answer, endpoint, own_queue.name)
    else:
        assert answer.status in (200, 400)


# --- topics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_topic_that_does_not_exist_is_not_made(api: Client, topic: str, endpoint: str) -> None:
    queue = Queue(api, topic)
    for _ in range(2):
        answer = queue.post(endpoint, GOOD[endpoint])
        assert answer.refusal == (404, "topic_not_found")
        assert answer.detail["topic"] == topic
    assert api.state(topic).status == 404
    assert topic_names(api, topic) == []


@pytest.mark.parametrize("durability", ["ephemeral", "disk"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_log_is_not_a_queue(api: Client, topic: str, endpoint: str, durability: str) -> None:
    api.put(topic, durability=durability)
    api.append(topic, 1)
    assert Queue(api, topic).post(endpoint, GOOD[endpoint]).refusal == (409, "not_a_queue")
    state = api.state(topic)
    assert (state["count"], state["type"]) == (1, "log")
    assert "queue" not in state.json


def test_a_log_with_the_settings_of_a_queue_is_a_log(api: Client, topic: str) -> None:
    api.put(topic, lease_ms=1_000, max_deliveries=3, dead_letter=f"{topic}.dlq", claim_jitter_ms=100)
    api.append(topic, 1)
    for endpoint in ENDPOINTS:
        assert Queue(api, topic).post(endpoint, GOOD[endpoint]).refusal == (409, "not_a_queue")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", ["-x", "a%20b", "a%2Fb", "%C3%A9", "a*", "x" * 256, "a%00", "q%23leases", "%FF"])
def test_names_that_are_refused(api: Client, endpoint: str, name: str) -> None:
    assert api.send("POST", f"/v0/topics/{name}/{endpoint}", GOOD[endpoint]).refusal == (400, "invalid_request")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_not_allowed(queue: Queue, endpoint: str, method: str) -> None:
    answer = queue.api.send(method, f"/v0/topics/{queue.name}/{endpoint}", GOOD[endpoint])
    assert answer.refusal == (405, "method_not_allowed")
    assert answer.detail["allow"] == ["POST"]
    _unchanged(queue)


@pytest.mark.parametrize("path", ["claims", "claim/", "claim/1", "Claim", "release", "leases"])
def test_paths_beside_them_do_not_exist(queue: Queue, path: str) -> None:
    assert queue.post(path, GOOD["claim"]).refusal == (404, "not_found")
    _unchanged(queue)


def test_the_leases_log_can_not_be_reached(queue: Queue) -> None:
    api, name = queue.api, f"{queue.name}%23leases"
    for answer in (
        api.state(name),
        api.put(name),
        api.append(name, 1),
        api.diff(name),
        api.delete(name, before_seq=9),
        api.drop(name),
    ):
        assert answer.refusal == (400, "invalid_request")
    assert not [shown for shown in topic_names(api, queue.name) if "#" in shown]
    _unchanged(queue)


@pytest.mark.parametrize("dead_letter", ["", "a b", "-x", "x" * 256, "q#leases", 7, [], True])
def test_a_dead_letter_topic_has_a_topics_name(api: Client, topic: str, dead_letter: object) -> None:
    answer = api.put(topic, type="queue", max_deliveries=1, dead_letter=dead_letter)
    assert answer.refusal == (400, "invalid_request")
    assert api.state(topic).status == 404


def test_a_queue_is_not_its_own_dead_letter_topic(api: Client, topic: str) -> None:
    assert api.put(topic, type="queue", max_deliveries=1, dead_letter=topic).refusal == (400, "invalid_request")


# --- limits of the environment -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the limits of queues within reach."""
    folder = tmp_path_factory.mktemp("narrow")
    server = Server(
        folder / "data",
        log=folder / "server.log",
        TOPICS_MAX_CLAIM=3,
        TOPICS_MAX_NODE_BYTES=8,
        TOPICS_MAX_TOPICS=4,
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(params=LANES)
def narrow_queue(narrow: Server, request: pytest.FixtureRequest) -> Iterator[Queue]:
    with narrow.client(request.param) as client:
        queue = make_queue(client, unique("narrow"))
        yield queue
        client.drop(queue.name)


def test_max_claim_is_a_setting(narrow_queue: Queue) -> None:
    narrow_queue.produce(*range(10))
    assert seqs_of(narrow_queue.claim(10)) == [1, 2, 3]
    assert seqs_of(narrow_queue.claim(2)) == [4, 5]
    for endpoint in ("ack", "nack", "extend"):
        body = {"node": "w", "seqs": [1, 2, 3, 4], "lease_ms": 1_000}
        assert narrow_queue.post(endpoint, body).refusal == (400, "batch_too_large")
    assert narrow_queue.ack([1, 2, 3])["acked"] == 3


def test_max_node_bytes_is_a_setting(narrow_queue: Queue) -> None:
    narrow_queue.produce(1)
    for node in ("x" * 9, "é" * 5):
        for endpoint in ENDPOINTS:
            assert narrow_queue.post(endpoint, GOOD[endpoint] | {"node": node}).refusal == (400, "invalid_request")
    assert narrow_queue.ack(seqs_of(narrow_queue.take(node="é" * 4)), node="é" * 4)["acked"] == 1


def test_a_queue_counts_as_one_topic(narrow_queue: Queue) -> None:
    """Its leases log counts for nothing."""
    api = narrow_queue.api
    queues = [narrow_queue, *(make_queue(api, unique("narrow")) for _ in range(3))]
    for queue in queues:
        queue.produce(1, 2)
        queue.take(2)
        queue.nack([1])
    assert api.put(unique("narrow")).refusal == (429, "throttled")
    assert api.get("/v0/ready")["topics"] == 4
    assert len(topic_names(api, "")) == 4
    for queue in queues[1:]:
        api.drop(queue.name)
    assert len(topic_names(api, "")) == 1
    assert make_queue(api, unique("narrow")).claim()["count"] == 0
    for name in topic_names(api, ""):
        if name != narrow_queue.name:
            api.drop(name)


def test_so_many_leases_and_no_more(start_server: Callable[..., Server]) -> None:
    """What comes back may be claimed again; nothing fresh is until something has ended."""
    most = 250_000
    with start_server().client() as api:
        queue = make_queue(api)
        for _ in range(26):
            queue.produce(*range(10_000))
        for _ in range(most // 1_000 - 1):
            assert queue.claim(1_000, lease_ms=86_400_000)["count"] == 1_000
        queue.take(999, lease_ms=86_400_000)
        assert queue.claim(1_000, lease_ms=86_400_000)["count"] == 1, "what is left of the bound"
        for _ in range(2):
            answer = queue.post("claim", {"node": "w"})
            assert answer.refusal == (429, "throttled")
            assert answer.detail["limit"] == "max_leases"
        queue.assert_counters(10_000, most)
        queue.nack([7, 8])
        assert seqs_of(queue.claim(10)) == [7, 8]
        assert queue.post("claim", {"node": "w"}).status == 429
        queue.ack([1, 2, 3])
        assert seqs_of(queue.claim(10)) == [most + 1, most + 2, most + 3]
        queue.nack([9], delay_ms=60_000)
        assert queue.post("claim", {"node": "w"}).status == 429, "what is delayed counts too"
        assert make_queue(api).claim()["count"] == 0, "another queue has its own"


# --- any body at all ---------------------------------------------------------------------------------


def _is_number(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= U64_MAX


def _is_good(endpoint: str, body: object) -> bool:
    if not isinstance(body, dict):
        return False
    node = body.get("node")
    if not isinstance(node, str) or not 1 <= len(node.encode()) <= 128:
        return False

    def optional(name: str, least: int) -> bool:
        return body.get(name) is None or _is_number(body[name], least)

    if endpoint == "claim":
        return optional("max", 1) and optional("lease_ms", 0)
    seqs, tokens = body.get("seqs"), body.get("lease_ids")
    if not isinstance(seqs, list) or not 1 <= len(seqs) <= 1_000 or not all(_is_number(seq, 0) for seq in seqs):
        return False
    if tokens is not None:
        if not isinstance(tokens, list) or len(tokens) != len(seqs):
            return False
        if not all(isinstance(token, str) for token in tokens):
            return False
    if endpoint == "nack":
        return optional("delay_ms", 0)
    return endpoint == "ack" or _is_number(body.get("lease_ms"), 0)


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=140)
_numbers = st.one_of(
    st.integers(-2, 60),
    st.sampled_from([0, 1, 99, 1_000, 86_400_001, 2**31, 2**32, 2**53 + 1, 2**63, U64_MAX, -(2**63)]),
    st.integers(-(2**63), U64_MAX),
)
# Whole numbers written with a point are left out: whether 1.0 is an integer is nobody's promise.
_fractions = st.floats(allow_nan=False, allow_infinity=False).filter(lambda value: not value.is_integer())
_anything = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, _fractions, _text),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_text, inner, max_size=4)),
    max_leaves=8,
)
_tokens = st.one_of(_text, st.integers(0, 2**40).map(lambda number: f"lease_{number:x}"))
_seqs = st.one_of(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.lists(_anything, max_size=5), _anything)
_known = {
    "node": st.one_of(st.sampled_from(["a", "b"]), _text, _anything),
    "max": st.one_of(_numbers, _anything),
    "lease_ms": st.one_of(_numbers, _anything),
    "delay_ms": st.one_of(_numbers, _anything),
    "seqs": _seqs,
    "lease_ids": st.one_of(st.none(), st.lists(_tokens, max_size=5), _anything),
}
_others = {name: values for name, values in _known.items() if name != "node"}
_bodies = st.one_of(
    st.fixed_dictionaries({"node": st.sampled_from(["a", "b"])}, optional=_others),
    st.fixed_dictionaries(
        {"node": st.sampled_from(["a", "b"]), "seqs": _known["seqs"], "lease_ms": st.integers(0, 60_000)},
        optional={"lease_ids": _known["lease_ids"], "delay_ms": _known["delay_ms"], "max": _known["max"]},
    ),
    st.fixed_dictionaries({}, optional=_known),
    _anything,
)


@pytest.fixture(scope="module")
def fuzzed(clients: dict[str, Client]) -> dict[str, Queue]:
    """A queue with jobs in every state, by each lane."""
    made = {}
    for lane, client in clients.items():
        queue = made[lane] = make_queue(client)
        queue.produce(*range(40))
        queue.take(10, node="a")
        queue.take(10, node="b", lease_ms=100)
        queue.nack([1, 2], node="a")
        queue.nack([3, 4], node="a", delay_ms=1_000)
    return made


@settings(max_examples=300, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@example(endpoint="claim", body={"node": "a", "max": 1.0})
@example(endpoint="ack", body={"node": "a", "seqs": [1e300]})
@example(endpoint="extend", body={"node": "a", "seqs": [10**400], "lease_ms": 10**400})
@example(endpoint="nack", body={"node": "a", "seqs": [1], "delay_ms": -0.0})
@given(endpoint=st.sampled_from(ENDPOINTS), body=_bodies)
def test_no_body_is_more_than_refused(lane: str, fuzzed: dict[str, Queue], endpoint: str, body: Any) -> None:
    queue = fuzzed[lane]
    answer = (
        queue.post(endpoint, body)
        if body is not None
        else queue.api.send("POST", f"/v0/topics/{queue.name}/{endpoint}", content=b"null")
    )
    assert answer.status in (200, 400), answer
    if answer.status == 200:
        check(answer, endpoint, queue.name)
        assert isinstance(body, dict)
    if "." not in json.dumps(body) and "e+" not in json.dumps(body):
        huge = any(type(value) is int and abs(value) > U64_MAX for value in _leaves(body))
        assert huge or (answer.status == 200) == _is_good(endpoint, body), answer
    state = queue.state()
    counters = queue.counters()
    assert counters.ready + counters.in_flight <= state["count"]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def test_after_all_that_the_queues_work(fuzzed: dict[str, Queue]) -> None:
    for queue in fuzzed.values():
        (seq,) = queue.produce("last")
        found: list[int] = []
        while seq not in found:
            jobs = queue.take(1, node="z") if queue.counters().ready else []
            assert jobs, "the last job is not claimable"
            found += seqs_of(jobs)
            assert queue.ack(seqs_of(jobs), node="z", lease_ids=leases_of(jobs))["acked"] == 1
