"""The short form of a benchmark: other defaults, with which it ends within five minutes on two cores.

The figures are the same, with wider intervals. Options that are given as well count.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_short_form(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add `--short`, which sets these defaults. The options must have been added before."""
    shown = ", ".join(f"--{name.replace('_', '-')} {_shown(value)}" for name, value in defaults.items())
    parser.add_argument("--short", action="store_true", help=f"within five minutes: {shown}")
    known = {action.dest for action in parser._actions}
    assert known >= defaults.keys(), f"not options: {defaults.keys() - known}"
    if "--short" in sys.argv[1:]:
        parser.set_defaults(**defaults)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
