"""Engine tests compute as the workers do: with one thread, which on a shared machine is also the fastest."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Before anything imports triton, which reads it when a kernel is declared.
    os.environ.setdefault("TRITON_INTERPRET", "1")
