"""What a disk may hold after a tape of calls, when the process was killed or the power went.

What was synced is there: the bytes of a file by a sync of it, a name by a sync of its folder. Of the rest:

    killed       all of it, in the same boot
    half         the same, and a part of the write that was under way
    lost         none of it
    kept         all of it
    torn         the writes of each file up to one that is there in part
    reordered    each sector by a throw of dice
    zeroed       the same; sectors that are not there and had not been written before are zeros, within the new size
    garbled      the same; they hold whatever was there in an earlier life of the disk
    names        all bytes; of the names in each folder those up to one

Sectors that held something before keep the old bytes or get the new ones, as disks promise. The names of a folder
change in order, as journals keep them; folders know nothing of each other. In all kinds from `torn` to `garbled` names
are lost as well, half of the time.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .tape import Call

Damage = Literal["killed", "half", "lost", "kept", "torn", "reordered", "zeroed", "garbled", "names"]
KILLS: tuple[Damage, ...] = ("killed", "half")
POWER: tuple[Damage, ...] = ("lost", "kept", "torn", "reordered", "zeroed", "garbled", "names")
SECTOR = 512
FOLDER = -1  # an entry that is one

Image = dict[str, bytes | None]  # by path; None: a folder


@dataclass(slots=True)
class _File:
    stable: bytes = b""
    now: bytearray = field(default_factory=bytearray)
    pending: list[Call] = field(default_factory=list)

    def sync(self) -> None:
        self.stable = bytes(self.now)
        self.pending.clear()


@dataclass(slots=True)
class _Folder:
    stable: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int]] = field(default_factory=list)  # the entries after each change


def _apply(content: bytearray, call: Call) -> None:
    if call.kind == "write":
        end = call.offset + len(call.data)
        if len(content) < call.offset:
            content.extend(bytes(call.offset - len(content)))
        content[call.offset : end] = call.data
    elif call.kind == "truncate":
        del content[call.size :]
        content.extend(bytes(call.size - len(content)))
    elif call.size > len(content):
        content.extend(bytes(call.size - len(content)))


def _sectors(call: Call) -> list[Call]:
    """A write, cut where sectors begin."""
    pieces = []
    end = call.offset + len(call.data)
    at = call.offset
    while at < end:
        to = min(at - at % SECTOR + SECTOR, end)
        data = call.data[at - call.offset : to - call.offset]
        pieces.append(Call("write", file=call.file, offset=at, data=data))
        at = to
    return pieces


def read_image(base: Path) -> Image:
    return {path.relative_to(base).as_posix(): None if path.is_dir() else path.read_bytes() for path in base.rglob("*")}


def write_image(image: Image, base: Path) -> None:
    for path, content in sorted(image.items()):
        if content is None:
            os.mkdir(base / path)
        else:
            fd = os.open(base / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, content)
            finally:
                os.close(fd)


class Platter:
    def __init__(self, image: Image | None = None) -> None:
        """image: what was there, and durable, before the first call."""
        self._files: dict[int, _File] = {}
        self._folders: dict[str, _Folder] = {".": _Folder()}
        for number, (path, content) in enumerate(sorted((image or {}).items())):
            if content is None:
                self.do(Call("make_dir", path=path))
            else:
                self.do(Call("create", path=path, file=-2 - number))
                self.do(Call("write", file=-2 - number, data=content))
                self.do(Call("sync", file=-2 - number))
        for path in list(self._folders):
            self.do(Call("sync_dir", path=path))

    # --- the calls ---

    def do(self, call: Call) -> None:
        match call.kind:
            case "write" | "truncate" | "allocate":
                file = self._files[call.file]
                _apply(file.now, call)
                file.pending.append(call)
            case "sync":
                self._files[call.file].sync()
            case "sync_dir":
                folder = self._folders[call.path]
                folder.stable = dict(folder.now)
                folder.pending.clear()
            case "create":
                self._files[call.file] = _File()
                self._enter(call.path, call.file)
            case "make_dir":
                self._folders[call.path] = _Folder()
                self._enter(call.path, FOLDER)
            case "unlink" | "remove_dir":
                self._enter(call.path, None)
            case "rename":
                folder, name = self._place(call.path)
                source, old = self._place(call.old_path)
                assert source is folder, "a rename from one folder to another is two changes, which nobody makes"
                folder.now[name] = folder.now.pop(old)
                folder.pending.append(dict(folder.now))

    def _place(self, path: str) -> tuple[_Folder, str]:
        parent, name = os.path.split(path)
        return self._folders[parent or "."], name

    def _enter(self, path: str, entry: int | None) -> None:
        folder, name = self._place(path)
        if entry is None:
            del folder.now[name]
        else:
            folder.now[name] = entry
        folder.pending.append(dict(folder.now))

    @property
    def unsynced(self) -> bool:
        """Whether a power cut could take anything."""
        return any(file.pending for file in self._files.values()) or any(f.pending for f in self._folders.values())

    # --- what is found ---

    def image(self, damage: Damage, dice: random.Random, *, under_way: Call | None = None) -> Image:
        """under_way: the call that was not finished."""
        found: Image = {}
        keeps_names = damage in ("killed", "half", "kept") or (
            damage in ("torn", "reordered", "zeroed", "garbled") and dice.random() < 0.5
        )
        half: Call | None = None
        if damage == "half" and under_way is not None and under_way.kind == "write":
            half = Call(
                "write",
                file=under_way.file,
                offset=under_way.offset,
                data=under_way.data[: dice.randrange(len(under_way.data) + 1)],
            )
        self._walk(".", found, damage, dice, keeps_names=keeps_names, half=half)
        return found

    def _walk(
        self, path: str, found: Image, damage: Damage, dice: random.Random, *, keeps_names: bool, half: Call | None
    ) -> None:
        for name, entry in sorted(self._entries(path, damage, dice, keeps_names=keeps_names).items()):
            child = name if path == "." else f"{path}/{name}"
            if entry == FOLDER:
                found[child] = None
                self._walk(child, found, damage, dice, keeps_names=keeps_names, half=half)
                continue
            content = self._content(self._files[entry], damage, dice)
            if half is not None and half.file == entry:
                grown = bytearray(content)
                _apply(grown, half)
                content = bytes(grown)
            found[child] = content

    def _entries(self, path: str, damage: Damage, dice: random.Random, *, keeps_names: bool) -> dict[str, int]:
        folder = self._folders[path]
        if keeps_names:
            return folder.now
        if damage == "lost" or not folder.pending:
            return folder.stable
        kept = dice.randrange(len(folder.pending) + 1)
        return folder.pending[kept - 1] if kept else folder.stable

    @staticmethod
    def _content(file: _File, damage: Damage, dice: random.Random) -> bytes:
        if damage in ("killed", "half", "kept", "names") or not file.pending:
            return bytes(file.now)
        content = bytearray(file.stable)
        if damage == "lost":
            return bytes(content)
        if damage == "torn":
            kept = dice.randrange(len(file.pending) + 1)
            for call in file.pending[:kept]:
                _apply(content, call)
            if kept < len(file.pending) and file.pending[kept].kind == "write":
                call = file.pending[kept]
                part = call.data[: dice.randrange(len(call.data) + 1)]
                _apply(content, Call("write", file=call.file, offset=call.offset, data=part))
            return bytes(content)
        for call in file.pending:
            if call.kind != "write":
                if dice.random() < 0.5 or damage == "zeroed":
                    _apply(content, call)
                continue
            for piece in _sectors(call):
                there = content[piece.offset : piece.offset + len(piece.data)]
                if dice.random() < 0.5:
                    _apply(content, piece)
                elif damage == "zeroed" and not any(there):
                    _apply(content, Call("write", file=piece.file, offset=piece.offset, data=bytes(len(piece.data))))
                elif damage == "garbled" and not any(there):
                    rubbish = dice.randbytes(len(piece.data))
                    _apply(content, Call("write", file=piece.file, offset=piece.offset, data=rubbish))
        return bytes(content)
