"""Exit codes: one table for all verbs. `topics --help` and docs/CLI.md show it; a verb that uses 3 says so in its
--help.
"""

from __future__ import annotations

EXIT_INTERRUPTED = 130
EXIT_CODES: dict[int, str] = {
    0: "done, and nothing wrong was found",
    1: "it could not be done, or something wrong was found; stderr says what",
    2: "not understood, or refused to begin; stderr says why, and nothing was changed",
    3: "report: a threshold was breached",
    EXIT_INTERRUPTED: "Ctrl-C",
}
