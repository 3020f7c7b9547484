"""What can be done to any bytes, whatever they mean."""

from __future__ import annotations

from random import Random

# Pieces that mean something to some reader; put where they don't belong.
TOKENS = (
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\r",
    b"\0",
    b"\xff",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b" ",
    b"\t",
    b":",
    b";",
    b",",
    b"=",
    b"%00",
    b"%ff",
    b"%",
    b"%u0041",
    b"../",
    b"?",
    b"#",
    b"&",
    b"0",
    b"-1",
    b"18446744073709551616",
    b"1e9",
    b"null",
    b"{}",
    b"[]",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"chunked",
    b"gzip",
    b"HTTP/1.1",
    b"HEAD ",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"0\r\n\r\n",
    b"\x1f\x8b\x08\x00",
)


def flip_bits(dice: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def truncate(dice: Random, data: bytes) -> bytes:
    return data[: dice.randrange(len(data))]


def cut_out(dice: Random, data: bytes) -> bytes:
    start = dice.randrange(len(data))
    return data[:start] + data[start + dice.choice((1, 1, 2, 8, 64)) :]


def repeat(dice: Random, data: bytes) -> bytes:
    start = dice.randrange(len(data))
    end = start + dice.choice((1, 2, 8, 32, 128))
    return data[:end] + data[start:end] * dice.choice((1, 1, 2, 10)) + data[end:]


def insert_token(dice: Random, data: bytes) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(TOKENS) + data[at:]


def overwrite(dice: Random, data: bytes) -> bytes:
    at = dice.randrange(len(data))
    garbage = dice.randbytes(dice.choice((1, 2, 4, 16)))
    return data[:at] + garbage + data[at + len(garbage) :]


def bare_lines(dice: Random, data: bytes) -> bytes:
    """One CR LF, or all, become something else."""
    other = dice.choice((b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n ", b"\r\n\t", b""))
    if dice.random() < 0.3:
        return data.replace(b"\r\n", other)
    places = data.count(b"\r\n")
    if places == 0:
        return data + other
    parts = data.split(b"\r\n")
    at = dice.randrange(places)
    return b"\r\n".join(parts[: at + 1]) + other + b"\r\n".join(parts[at + 1 :])


def swap(dice: Random, data: bytes) -> bytes:
    first, second, third = sorted(dice.randrange(len(data) + 1) for _ in range(3))
    return data[:first] + data[second:third] + data[first:second] + data[third:]


ALL = (flip_bits, flip_bits, truncate, cut_out, repeat, insert_token, insert_token, overwrite, bare_lines, swap)


def mutate(dice: Random, data: bytes, *, times: int | None = None) -> bytes:
    for _ in range(times or dice.choice((1, 1, 1, 2, 3, 6))):
        if not data:
            break
        data = dice.choice(ALL)(dice, data)
    return data


def splice(dice: Random, one: bytes, other: bytes) -> bytes:
    return one[: dice.randrange(len(one) + 1)] + other[dice.randrange(len(other) + 1) :]


def in_pieces(dice: Random, data: bytes) -> list[bytes]:
    """Mostly whole; otherwise cut at a few places."""
    if len(data) < 2 or dice.random() < 0.6:
        return [data]
    cuts = sorted({dice.randrange(1, len(data)) for _ in range(dice.choice((1, 2, 5)))})
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
