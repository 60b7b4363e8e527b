"""Lets `python benchmarks/NAME.py` work as `python -m benchmarks.NAME` does; every benchmark imports it first.

Python puts the folder of a file that it runs first on its path, where `engine.py` and `planner.py` stand in the way of
the packages of the same names.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

sys.path[:] = [str(FOLDER.parent), *(path for path in sys.path if Path(path or ".").resolve() != FOLDER)]
