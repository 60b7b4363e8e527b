"""`diptych version`: prints the versions of Diptych, Python and the most important packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

SHOWN_PACKAGES = ("torch", "transformers", "ray", "nixl", "numba", "fastapi", "pyzmq")


def installed_version(name: str) -> str:
    """The installed version of a distribution, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def print_versions() -> None:
    """Print the versions of Diptych, Python and the most important packages."""
    print(f"diptych {installed_version('diptych')}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in SHOWN_PACKAGES:
        print(f"{name} {installed_version(name)}")
