"""Every benchmark can be run both ways: `python -m benchmarks.NAME`, and `python benchmarks/NAME.py` as a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILES = [
    file
    for file in sorted((ROOT / "benchmarks").glob("*.py"))
    if '__name__ == "__main__"' in file.read_text()
]

# One process for all of them, since torch and numba take seconds to import: between two runs it forgets what is ours.
RUNS = """
import contextlib, io, json, runpy, sys
results, ours = {}, set(json.loads(sys.argv[1]))
path = list(sys.path)
for file in json.loads(sys.argv[2]):
    folder, name = file.rsplit("/", 1)
    for way in ("file", "module"):
        for module in [module for module in sys.modules if module.split(".")[0] in ours]:
            del sys.modules[module]
        root = folder.rsplit("/", 1)[0]
        sys.path[:] = [folder if way == "file" else root, *(entry for entry in path if entry not in ("", root)), root]
        sys.argv = [file, "--help"]
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                if way == "file":
                    runpy.run_path(file, run_name="__main__")
                else:
                    runpy.run_module("benchmarks." + name.removesuffix(".py"), run_name="__main__")
            results[file + " " + way] = "no exit"
        except SystemExit as ended:
            results[file + " " + way] = "" if not ended.code and "usage: " in out.getvalue() else f"exit {ended.code}"
        except BaseException as error:
            results[file + " " + way] = f"{type(error).__name__}: {error}"
print(json.dumps(results))
"""


def test_every_benchmark_shows_its_help_as_a_file_and_as_a_module() -> None:
    ours = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    ours += [file.stem for file in (ROOT / "benchmarks").glob("*.py")]
    environ = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")
    }
    environ["TRITON_INTERPRET"] = (
        "1"  # before torch imports triton, whichever benchmark it is that comes first
    )
    shown = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps(ours), json.dumps(list(map(str, FILES)))],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(shown.stdout.splitlines()[-1])
    assert len(results) == 2 * len(FILES) > 30
    assert {name: wrong for name, wrong in results.items() if wrong} == {}


def test_a_benchmark_that_has_the_name_of_a_package_runs_as_a_file() -> None:
    """As a user types it, in a process of its own and from another folder."""
    file = ROOT / "benchmarks" / "engine.py"
    shown = subprocess.run([sys.executable, str(file), "--help"], cwd="/", capture_output=True, text=True)
    assert shown.returncode == 0 and "usage: engine.py" in shown.stdout, shown.stderr
