"""Raises the limit of open files and sockets of this process."""

from __future__ import annotations

import resource


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files (`RLIMIT_NOFILE`) to the hard limit; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
