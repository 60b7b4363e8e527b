"""The product's packages, and their source files, parsed."""

from __future__ import annotations

import ast
import gc
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# What is installed, from the bottom: a package imports none that comes after it.
WHEEL_PACKAGES: tuple[str, ...] = tuple(_PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
# All of them but the embedded model, whose programs no package imports.
PACKAGES = tuple(name for name in WHEEL_PACKAGES if name != "models")


@cache
def trees() -> Mapping[Path, ast.Module]:
    """Every source file of the product, parsed; paths are relative to the repository."""
    gc.disable()  # which would look through what is kept anyway, again and again
    try:
        return dict(parsed_files(*PACKAGES))
    finally:
        gc.freeze()
        gc.enable()


@cache
def product_nodes() -> Mapping[Path, list[ast.AST]]:
    """All nodes of every source file of the product, as `ast.walk` gives them, which takes long."""
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}


def parsed_files(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """Every source file below these folders, parsed one by one; paths are relative to the repository."""
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        yield file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    """The name under which a file is imported."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def called_name(call: ast.Call) -> str:
    """The last name of what is called: `b` of `a.b()`; empty if it has none."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
