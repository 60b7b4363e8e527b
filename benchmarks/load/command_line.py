"""What the command lines of benchmarks have in common: their help, `--json`, and how figures are printed."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any


def figure_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the text of a program, with `--json`, and with the load average before it began."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.set_defaults(load_before=round(os.getloadavg()[0], 2))
    return parser


def print_figures(figures: dict[str, Any], options: argparse.Namespace, *names: str) -> None:
    """Print figures, with the load before, and with the options of these names."""
    shown = figures | {name: getattr(options, name) for name in ("load_before", *names)}
    print(json.dumps(shown, indent=None if options.json else 2))
