"""Engine tests compute as the workers do: with one thread, which on a shared machine is also the fastest."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
