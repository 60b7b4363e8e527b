"""Where there is no GPU, Triton's interpreter runs what a benchmark would run there."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Before anything imports triton, which reads it when a kernel is declared.
    os.environ.setdefault("TRITON_INTERPRET", "1")
