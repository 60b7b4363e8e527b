"""Workers import torch without the shape rules of its compiler, which are there for whoever asks for them later."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine import torch_import

IMPORT = """
import sys
from engine.torch_import import SHAPE_RULES, import_torch
import_torch()
import torch
lean = not {"torch._prims", SHAPE_RULES} & sys.modules.keys() and not hasattr(torch, "_meta_registrations")
"""
# `cdist` has a rule that is written in Python.
LATER = """
def cdist_shape():
    try:
        return tuple(torch.cdist(torch.empty(3, 4, device="meta"), torch.empty(5, 4, device="meta")).shape)
    except NotImplementedError:
        return None
before = cdist_shape()
import torch._meta_registrations
print(lean, before, cdist_shape())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_rules_are_left_out_and_come_when_they_are_asked_for() -> None:
    assert run(IMPORT + LATER) == "True None (3, 5)"


def test_another_version_of_torch_is_imported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_import._is_tested(), (
        "constraints.txt has another torch: see whether it still may be left out"
    )
    monkeypatch.setattr(torch_import, "version", lambda _: "2.130.0")
    assert not torch_import._is_tested()
