"""Whose packages Python finds under the names of Diptych's: checked before any of them but this one is imported.

Diptych's packages have common names (`engine`, `models`, `worker`, ...). Another package of the same name may be
installed beside them, or be found before them. Then parts of two programs would run as one. So:

- An entry of `PYTHONPATH` that means the working folder (an empty one, or `.`) is dropped: nothing in the folder that
  somebody happens to work in is imported.
- A folder of `PYTHONPATH` that has packages of these names comes after Diptych's own.
- If another distribution has put files into an installed package of Diptych, or has replaced some, the start ends with
  an error that names it.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from diptych.errors import StartError

# The folder that holds the packages: `site-packages`, or the checkout.
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "decode_worker", "diptych", "engine", "kvcache", "kvtransfer", "models", "planner", "prefill_worker", "router",
    "services", "vllm_worker", "worker",
)  # fmt: skip
FIX = "install Diptych into a virtual environment of its own, where no other package has these names"


def drop_working_folder(paths: list[str], python_path: str) -> None:
    """Remove the working folder from the import path `paths` if it is there only because `PYTHONPATH` is written so.

    Python takes an empty entry, as in `PYTHONPATH=$PYTHONPATH:/extra` where the variable was not set, for the working
    folder. A `PYTHONPATH` that names the folder by its absolute path is left as it is, and so is the checkout. Where
    the working folder no longer exists, nothing can be imported from it, and nothing is removed.
    """
    if not python_path or not any(
        os.path.normpath(entry or ".") == os.curdir for entry in python_path.split(os.pathsep)
    ):
        return
    try:
        working = os.getcwd()
    except OSError:
        return
    # The folder may also be there for a reason of its own, for example that of the standard library.
    needed = (str(ROOT), str(Path(os.__file__).parent))
    if working in paths and working not in needed:
        paths.remove(working)


def prefer_own_packages() -> None:
    """Search Diptych's own folder first, if one of its packages would be found elsewhere.

    Raises:
        StartError: it would be found elsewhere even so.
    """
    if any(_misplaced_packages()):
        sys.path.insert(0, str(ROOT))
        importlib.invalidate_caches()
    for name, found in _misplaced_packages():
        raise StartError(
            f"the package `{name}` is not Diptych's",
            f"Python finds it in {found}, and Diptych's packages are in {ROOT}",
            f"unset PYTHONPATH, or {FIX}",
        )


def _misplaced_packages() -> Iterator[tuple[str, str]]:
    """Name and place of each package that Python finds elsewhere than in `ROOT`."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec and spec.origin else ""
        if not origin or Path(origin).resolve() != ROOT / name / "__init__.py":
            yield name, origin or "no folder"


def check_installed_packages(root: Path) -> None:
    """Check that the packages in `root` hold the files that were installed, and no modules of other packages.

    Does nothing for a checkout, where no installer has written what belongs to whom. Sizes are compared, not contents.

    Raises:
        StartError: another distribution has added modules or replaced files, or a file is missing.
    """
    records = list(root.glob("diptych-*.dist-info/RECORD"))
    if len(records) != 1:
        return
    sizes = _recorded_sizes(records[0])
    for name in PACKAGES:
        for module in _modules_in(root / name):
            if (path := str(module.relative_to(root))) not in sizes:
                raise _shared_name(root, name, f"{path} is not Diptych's", path)
    for path, size in sizes.items():
        try:
            same = (root / path).stat().st_size == size
        except OSError:
            same = False
        if not same:
            raise _shared_name(root, path.partition("/")[0], f"{path} is not what was installed", path)


def _recorded_sizes(record: Path) -> Mapping[str, int]:
    """Size in bytes by path of the files in Diptych's packages, from what the installer has recorded."""
    with record.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if len(row) == 3 and row[2]]
    return {path: int(size) for path, _, size in rows if path.partition("/")[0] in PACKAGES}


def _modules_in(package: Path) -> Iterator[Path]:
    """The file of each module and package that is directly in `package`."""
    for entry in package.iterdir():
        file = entry / "__init__.py" if entry.is_dir() else entry
        if file.suffix == ".py" and file.is_file():
            yield file


def _shared_name(root: Path, name: str, why: str, path: str) -> StartError:
    """The error for a package whose name another distribution uses, which is named if it can be found."""
    others = [
        record.parent.name.removesuffix(".dist-info")
        for record in root.glob("*.dist-info/RECORD")
        if not record.parent.name.startswith("diptych-")
        and f"\n{path}," in "\n" + record.read_text(encoding="utf-8", errors="replace")
    ]
    owner = f"; it belongs to {', '.join(sorted(others))}" if others else ""
    return StartError(
        f"Diptych's package `{name}` is mixed with another package of that name", f"{why}{owner}", FIX
    )
