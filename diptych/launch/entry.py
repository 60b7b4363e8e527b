"""The command `diptych`, as an installer makes it: it checks the import path, and runs the command line."""

from __future__ import annotations

import importlib
import os
import sys

from diptych.errors import DiptychError
from diptych.launch.own_packages import (
    ROOT,
    check_installed_packages,
    drop_working_folder,
    prefer_own_packages,
)


def main() -> None:
    """The entry point of the console script."""
    try:
        drop_working_folder(sys.path, os.environ.get("PYTHONPATH", ""))
        prefer_own_packages()
        check_installed_packages(ROOT)
    except DiptychError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        sys.exit(1)
    # By name: `diptych` may not import the packages above it, and they must not be imported before the checks.
    importlib.import_module("services.cli.main").main()
