"""The engine on a CUDA device. Without one, its kernels run in Triton's interpreter, slowly, for tests."""

import os

import torch

# Triton reads this variable whenever a kernel is declared, its own kernels included: set before anything imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
