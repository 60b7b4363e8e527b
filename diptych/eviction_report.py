"""What a worker reports about the KV that it dropped for one sequence (eviction by attention head)."""

from __future__ import annotations

import msgspec


class KeptReport(msgspec.Struct, frozen=True, array_like=True):
    """The state of a sequence's KV behind its boundary, after the latest decision about what is kept.

    A row is one token's KV in one head of one layer. `kept_rows` of `all_rows` are kept. `policies` counts the heads,
    over all layers, by the name of their policy. `freed_slabs` is how many slabs fewer the sequence takes than with all
    of its rows.
    """

    kept_rows: int
    all_rows: int
    policies: dict[str, int]
    freed_slabs: int = 0

    @property
    def pruned_rows(self) -> int:
        """Rows that were dropped."""
        return self.all_rows - self.kept_rows

    @property
    def kept_share(self) -> float:
        """The share of the rows that is kept; 1 if there are none."""
        return self.kept_rows / self.all_rows if self.all_rows else 1.0
