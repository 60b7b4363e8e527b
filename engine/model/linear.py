"""Matrix products whose every row is the same to the last bit however many rows are computed together.

BLAS libraries choose kernels by the number of rows: MKL sums in another order for one to three rows than for four and
more, oneDNN (with weights packed once at load) for a single row of a wide product. From `MIN_ROWS` up both give each
row the same bits at any size and place, so callers pad short batches up to it; at two rows the padding costs nothing,
since the weights are read once either way. `tests/engine/test_decoder_exact.py` holds this to account on the machine.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as nnf

log = logging.getLogger(__name__)

PACK_ROWS = 16  # rows the packed order is chosen for; with 1, oneDNN picks a matrix-vector order


def _can_pack() -> bool:
    """Whether this torch has oneDNN's packed product; 1.5 to 2.5 times faster than MKL's for 2 to 16 rows."""
    try:
        operators: Any = torch.ops.mkldnn
        packed = operators._reorder_linear_weight(torch.ones(32, 32), PACK_ROWS)
        with torch.no_grad():
            operators._linear_pointwise(torch.ones(2, 32), packed, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        log.warning(
            "packed matrix products are not available, falling back to plain ones: %s", str(error)[:200]
        )
        return False
    return True


PACKED = _can_pack()
MIN_ROWS = 2 if PACKED else 4


class Linear:
    """x @ weight.T + bias for float32. The weight is repacked, so the one given can be dropped."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        operators: Any = torch.ops.mkldnn
        self.weight = operators._reorder_linear_weight(weight, PACK_ROWS) if PACKED else weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] to [rows, outputs]; at least `MIN_ROWS` rows."""
        assert x.shape[0] >= MIN_ROWS, f"{x.shape[0]} rows would be summed in another order than {MIN_ROWS}"
        if not PACKED:
            return nnf.linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product
