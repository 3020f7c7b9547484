"""The on-disk format: magic numbers, rulers, versions. The other modules here encode and decode with these.

    WAL file header, 64 bytes
    0        8         12      16       24        32     36   40        56       64
    | magic  | version | shard | layout | file no | salt | 0  | boot id | xxh3   |
    | 8s     | u32     | u32   | u64    | u64     | u32  | u32| 16s     | u64    |

    frame, 8-byte aligned; also a block of a segment, whose delete flags follow its checksum
    0      4          8      9       10        12      16         24          32      40    48       56
    | salt | body len | type | flags | key len | count | topic id | first seq | ts ms | lsn | synced | ...
    | u32  | u32      | u8   | u8    | u16     | u32   | u64      | u64       | u64   | u64 | u64    |
    ... key, body, zeros to a multiple of 8, xxh3-64 of all before it (u64)
    ... and in a segment: one delete flag per record, zeros to a multiple of 8

`salt` is drawn per file: bytes left from an earlier life of the disk do not pass for a frame of this file.
`lsn` counts the frames of a shard. `synced` is the lsn that was known to be on the platter when the frame was
written: it is what tells corruption from a tail that never got there (recovery.py).
In a block `lsn` holds the last record's ts and `synced` the accounted bytes of its records.

    segment header, 64 bytes
    0       8         12     16         24          32           40     44   48        56       64
    | magic | version | 0    | topic id | first seq | created ms | salt | 0  | 0       | xxh3   |

    index header, 64 bytes; then the block table, the tag directory, the tag pages
    0       8         12  16         24          32         40          48            56       64
    | magic | version | 0 | topic id | first seq | last seq | table len | directory len | xxh3   |
      xxh3 covers the header before it, the table and the directory; each page ends with its own

To change the format: raise FORMAT_VERSION, teach the decoder the old and the new version, add a folder written by
the old version to tests/golden, and describe the difference in docs/FORMAT.md.
"""

from __future__ import annotations

import enum
import struct

from topics.errors import FormatError

FORMAT_VERSION = 1

WAL_MAGIC = b"TOPICWAL"
SEGMENT_MAGIC = b"TOPICSEG"
INDEX_MAGIC = b"TOPICIDX"
SNAPSHOT_MAGIC = b"TOPICSNP"

FILE_HEADER_BYTES = 64
WAL_HEADER = struct.Struct("<8sIIQQII16s")
SEGMENT_HEADER = struct.Struct("<8sIIQQQIIQ")
INDEX_HEADER = struct.Struct("<8sIIQQQQQ")
SNAPSHOT_HEADER = struct.Struct("<8sIIQQ")  # magic, version, 0, payload bytes, xxh3 of the payload
FRAME_HEADER = struct.Struct("<IIBBHIQQQQQ")
CHECKSUM = struct.Struct("<Q")

DELETED = 0xD5  # a delete flag of any other value means live
RECORD_SEPARATOR = b"\x1e"  # between the data values of a batch: JSON can't contain it
RECORD_OVERHEAD = 32  # what a record counts for in `bytes` beside its data and meta


class FrameType(enum.IntEnum):
    APPEND = 1
    DELETE = 2
    TOPIC = 3  # a topic was created or configured
    DROP = 4
    HEAD = 5  # seqs below first_seq are spoken for, whether or not their records survive
    BLOCK = 16


def check_version(version: int, *, path: str) -> None:
    if version > FORMAT_VERSION:
        raise FormatError(f"{path}: format {version} is newer than this program's {FORMAT_VERSION}; upgrade topics")
    if version < 1:
        raise FormatError(f"{path}: format {version} never existed; the header is damaged")


def aligned(size: int) -> int:
    return (size + 7) & -8


def frame_bytes(*, key_len: int, body_len: int) -> int:
    """Length of a whole frame, its checksum included."""
    return aligned(FRAME_HEADER.size + key_len + body_len) + CHECKSUM.size


def block_bytes(*, body_len: int, count: int) -> int:
    return frame_bytes(key_len=0, body_len=body_len) + aligned(count)
