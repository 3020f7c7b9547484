"""The router process's file: every rule, replaced as a whole, durably. A crash leaves the old rules or the new."""

from __future__ import annotations

import os

from topics.actors.startup.datadir_lock import file_mode, read_manifest
from topics.router.rules import Rules
from topics.storage.routers import decode_rules, encode_rules, missing_rules, routers_path


class RuleStore:
    def __init__(self, data_dir: str) -> None:
        self._data_dir = data_dir

    def load(self) -> Rules:
        path = routers_path(self._data_dir)
        try:
            with open(path, "rb") as source:
                return Rules(decode_rules(source.read(), path=path))
        except FileNotFoundError:
            manifest = read_manifest(self._data_dir)
            if manifest is not None and manifest.routers:
                raise missing_rules(path) from None
            return Rules()

    def save(self, rules: Rules) -> None:
        path = routers_path(self._data_dir)
        temporary = path + ".tmp"
        data = encode_rules(sorted(rules, key=lambda rule: rule.router))
        mode = file_mode(self._data_dir)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            written = 0
            while written < len(data):
                written += os.write(fd, memoryview(data)[written:])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        folder = os.open(self._data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
