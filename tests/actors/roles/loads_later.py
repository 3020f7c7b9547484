"""Can be imported, and imports something while it serves that can't."""

from roles import echo

LATER = ("roles.broken",)
run = echo.run
