"""The exit statuses of the command `diptych`."""

from __future__ import annotations

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
