"""The basis in which a codec stores keys and values of one KV head: factors per channel, then a random rotation.

    stored key = H · D · B k        stored value = H · D · C v        q · k = (H · D · B⁻¹ q) · (stored key)

B and C are diagonal, from a calibration: they flatten channels that stick out. The two numbers of a rotary pair have
one factor of B, so it commutes with rotation to a position. H · D is the rotation of `tq*` (`kvcache.codecs.hadamard`),
which is orthogonal. Either may be missing. Readers attend in this basis: they take each query into it, and each output
out of it, once, instead of every row.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvcache.codecs.hadamard import rotate_heads, unrotate_heads

Floats = NDArray[np.float32]

MAX_HALF = np.float32(np.finfo(np.float16).max)
ONE = np.float32(1)


class Basis:
    """Rows are [..., head_dim] float32.

    Args:
        key_factors: [head_dim], equal for the two numbers of a rotary pair; None: ones.
        value_factors: [head_dim]; None: ones.
        seed: of the random rotation; None: there is none.
    """

    def __init__(
        self, key_factors: Floats | None = None, value_factors: Floats | None = None, seed: int | None = None
    ) -> None:
        self.key_factors, self.value_factors, self.seed = key_factors, value_factors, seed

    def store_keys(self, keys: Floats) -> Floats:
        """Keys as they are coded, within the range of float16 before the random rotation."""
        return self._store(keys, self.key_factors)

    def store_values(self, values: Floats) -> Floats:
        """Values as they are coded."""
        return self._store(values, self.value_factors)

    def match_queries(self, queries: Floats) -> Floats:
        """Queries whose products with stored keys are those with the keys."""
        return self._rotate(_scale(queries, self.query_factors))

    def restore_keys(self, stored: Floats) -> Floats:
        """The inverse of `store_keys`."""
        return _scale(self._rotate_back(stored), self.query_factors)

    def restore_values(self, stored: Floats) -> Floats:
        """The inverse of `store_values`, for sums of values too."""
        return _scale(self._rotate_back(stored), self.output_factors)

    @property
    def has_factors(self) -> bool:
        """Whether there are factors per channel."""
        return self.key_factors is not None or self.value_factors is not None

    @cached_property
    def query_factors(self) -> Floats | None:
        """1 / `key_factors`."""
        return None if self.key_factors is None else ONE / self.key_factors

    @cached_property
    def output_factors(self) -> Floats | None:
        """1 / `value_factors`."""
        return None if self.value_factors is None else ONE / self.value_factors

    def _store(self, rows: Floats, factors: Floats | None) -> Floats:
        with np.errstate(over="ignore"):  # what gets too large is clamped
            scaled = _scale(rows, factors)
        return self._rotate(np.clip(scaled, -MAX_HALF, MAX_HALF))

    def _rotate(self, rows: Floats) -> Floats:
        return rows if self.seed is None else rotate_heads(rows, self.seed)

    def _rotate_back(self, rows: Floats) -> Floats:
        return rows if self.seed is None else unrotate_heads(rows, self.seed)


def _scale(rows: Floats, factors: Floats | None) -> Floats:
    return rows if factors is None else rows * factors


IDENTITY = Basis()
