"""A file of API keys: read as a whole, at the start and at every reload, and looked at for who else could read it.

Blank lines and lines that begin with # are left out; the rest is what keys.py reads. Rules: a file that is not right is
no file, the keys that were read before stay; a message never repeats what stands in it.
"""

from __future__ import annotations

import os
import stat

import msgspec

from topics import limits
from topics.errors import SettingsError
from topics.keys import Key, parse_keys

_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class KeyFile(msgspec.Struct, frozen=True):
    path: str
    shown: str  # the path as it was given
    named: str  # which setting named it
    strict: bool = False  # a file that others could read is refused
    kept: bool = False  # by the service manager, in a folder that only this service sees

    def read(self, *, again: bool = False) -> tuple[Key, ...]:
        try:
            # A pipe that nobody writes to must not stop the supervisor, which reads this again while it serves.
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK if again else 0))
            with open(fd, "rb") as source:
                found = os.fstat(fd)
                if again and not stat.S_ISREG(found.st_mode):
                    raise SettingsError(f"{self.named}: {self.shown} is no plain file any more")
                content = source.read(limits.MAX_KEY_FILE_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise SettingsError(f"{self.named}: {self.shown} can't be read: {reason}") from None
        if len(content) > limits.MAX_KEY_FILE_BYTES:
            raise SettingsError(f"{self.named}: {self.shown} has more than {limits.MAX_KEY_FILE_BYTES} bytes")
        if self.strict and (exposure := self._exposure(found)):
            raise SettingsError(f"{exposure}. TOPICS_STRICT_FILES refuses that")
        lines = [line for line in content.splitlines() if not line.lstrip().startswith("#")]
        return parse_keys("\n".join(lines), source=self.shown, attributes=True)

    @property
    def lasting(self) -> bool:
        """It can be read again; a pipe, as a shell makes for <(...), can't."""
        try:
            return stat.S_ISREG(os.stat(self.path).st_mode)
        except OSError:
            return True  # not there at the moment

    def exposure(self) -> str:
        """Who else could read or change it, in words; empty: the owner alone."""
        try:
            return self._exposure(os.stat(self.path))
        except OSError:
            return ""  # reading it says more

    def _exposure(self, found: os.stat_result) -> str:
        if self.kept or not stat.S_ISREG(found.st_mode):
            return ""
        if found.st_uid not in (0, os.geteuid()):
            return f"{self.shown} belongs to another user (uid {found.st_uid}), who can read and change the keys"
        if (mode := stat.S_IMODE(found.st_mode)) & _FOR_OTHERS:
            return f"{self.shown} is open to other users (mode {mode:04o}): chmod go= {self.shown}"
        return ""
