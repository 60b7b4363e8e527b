"""`diptych version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PARTS = ("torch", "transformers", "ray", "nixl", "numba", "fastapi", "pyzmq")


def installed(name: str) -> str:
    """The installed version of a distribution, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def show() -> None:
    print(f"diptych {installed('diptych')}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in PARTS:
        print(f"{name} {installed(name)}")
