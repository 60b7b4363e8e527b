"""GPU tests run where there is a GPU (`make gpu`) and say so where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    return torch.device("cuda")
