"""A run is as large as it says, and can be made again from its seed."""

from __future__ import annotations

import pytest

from . import bodies, http1, http2, websocket
from .dials import DEFAULT_CASES, SHARES, dice


def _bytes_of(family: str, number: int) -> bytes:
    lot = dice(family, number)
    match family:
        case "http1":
            return http1.case(lot, number, "wid_x").sent
        case "http2":
            return http2.case(lot, number, "wid_x").sent
        case "websocket":
            return websocket.frames_case(lot, number).sent + websocket.Commands(lot, number).case(number).sent
        case _:
            return repr(bodies.hostile_request(lot)).encode()


@pytest.mark.gate
@pytest.mark.parametrize("family", ["http1", "http2", "websocket", "bodies"])
def test_a_case_is_the_same_bytes_again(family: str) -> None:
    first = [_bytes_of(family, number) for number in range(200)]
    assert [_bytes_of(family, number) for number in range(200)] == first
    assert len(set(first)) > 100, "cases differ from each other"


@pytest.mark.gate
def test_the_usual_run_has_ten_thousand_cases() -> None:
    assert sum(DEFAULT_CASES * share // 100 for share in SHARES.values()) >= 10_000
