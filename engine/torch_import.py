"""Imports torch without the shape rules of its compiler, which are a third of what the import costs.

`import torch` ends with `torch._meta_registrations`: how each operator acts on tensors that have shapes and no memory,
for `torch.compile` and `torch.export`. Diptych uses neither. Whoever needs the rules later imports them as usual. With
another version of torch than the tested one nothing is left out.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

TESTED_VERSION = "2.13"
SHAPE_RULES = "torch._meta_registrations"


def import_torch() -> None:
    """Import torch, if this process has not, before the modules that use it do."""
    if "torch" in sys.modules or not _is_tested():
        return
    sys.modules[SHAPE_RULES] = ModuleType(SHAPE_RULES)
    try:
        torch = importlib.import_module("torch")
    finally:
        del sys.modules[SHAPE_RULES]
    vars(torch).pop(SHAPE_RULES.rpartition(".")[2], None)


def _is_tested() -> bool:
    """Whether the installed torch is of the tested version."""
    try:
        return version("torch").startswith(f"{TESTED_VERSION}.")
    except PackageNotFoundError:
        return False
