"""The bounds of `planner.placement.bounds` for samples of many requests, computed on arrays: the same numbers, sooner.

They need one class of KV, no eviction, and costs that the compiled fast simulator knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from diptych.slo import Slo
from planner.sim.fast.compiled import Array, JobTable, cost_row, step_seconds
from planner.types import CostModel, LinkSpec


class BoundArrays:
    """The counted requests of a trial as arrays, and what they cost alone, by cost."""

    def __init__(self, tables: list[JobTable], firsts: list[int]) -> None:
        import numpy as np

        def joined(name: str) -> Array:
            parts = zip(tables, firsts, strict=True)
            return np.concatenate([getattr(table, name)[first:] for table, first in parts])

        self.kinds = tuple(sorted({kind for table in tables for kind in table.kinds}))
        self.prompt, self.output = joined("prompt").astype(float), joined("output").astype(float)
        numbers = [np.array([self.kinds.index(kind) for kind in table.kinds]) for table in tables]
        self.kind = np.concatenate(
            [number[table.kind[first:]] for number, table, first in zip(numbers, tables, firsts, strict=True)]
        )
        self.num_samples = len(tables)
        self.span_s = sum(float(table.at_s[-1]) for table in tables)
        self._known: dict[tuple[Any, ...], Array] = {}

    def seconds(self, cost: CostModel, of: str) -> Array:
        """Seconds of steps of one request each: "ttft" and "tpot" of all stages, "stage" of its prompt in one stage."""
        import numpy as np

        key = (*(cost_row(cost) or ()), of)
        if key not in self._known:
            batches = np.zeros((len(self.prompt), 4))
            if of == "tpot":
                batches[:, 2], batches[:, 3] = 1.0, self.prompt
            else:
                batches[:, 0], batches[:, 1] = self.prompt, self.prompt * self.prompt
            took_s = step_seconds(cost, batches, of != "stage")
            assert took_s is not None, "the cost is known"
            self._known[key] = np.where(self.output > 1, took_s, 0.0) if of == "tpot" else took_s
        return self._known[key]


@dataclass(frozen=True)
class ArrayDemand:
    """What `planner.placement.bounds.LeastDemand` holds, for one placement. `needs` and `slos` are by kind."""

    arrays: BoundArrays
    slos: list[Slo]
    needs: list[int]
    prefill: CostModel
    decode: CostModel
    link: LinkSpec | None
    token_bytes: float
    room: float

    @cached_property
    def _moved_s(self) -> Array:
        if self.link is None:
            return self.arrays.prompt * 0.0
        return self.arrays.prompt * self.token_bytes / self.link.bytes_per_s

    @cached_property
    def _met(self) -> dict[str, Array]:
        """Which requests meet each limit when nothing else runs."""
        import numpy as np

        arrays = self.arrays
        tpot_s = arrays.seconds(self.decode, "tpot")
        if self.link is not None:
            more_s = (self.link.latency_s + self._moved_s) / arrays.output
            tpot_s = tpot_s + np.where(arrays.output > 1, more_s, 0.0)
        limits = np.array([(slo.ttft_s, slo.tpot_s) for slo in self.slos])[arrays.kind]
        ttft = arrays.seconds(self.prefill, "ttft") <= limits[:, 0]
        tpot = tpot_s <= limits[:, 1]
        return {
            "ttft": ttft,
            "tpot": tpot,
            "slo": ttft & tpot,
            "memory": arrays.prompt + arrays.output <= self.room,
        }

    def alone(self) -> dict[str, float]:
        """0 for each limit that too few requests meet when nothing else runs, else infinity."""
        import numpy as np

        found = {}
        for name, good in self._met.items():
            counts = np.bincount(self.arrays.kind[good], minlength=len(self.needs))
            enough = all(count >= need for count, need in zip(counts, self.needs, strict=True))
            found[name] = inf if enough else 0.0
        return found

    def after_s(self) -> tuple[float, float]:
        """The latest seconds after its arrival at which a first and a last token count, of all that can meet SLOs."""
        first_s = late_s = 0.0
        for number, slo in enumerate(self.slos):
            outputs = self.arrays.output[self._met["slo"] & (self.arrays.kind == number)]
            if len(outputs):
                most = float(outputs.max())
                first_s = max(first_s, slo.ttft_s)
                late_s = max(late_s, slo.ttft_s + (most * slo.tpot_s if most > 1 else 0.0))
        return first_s, late_s

    def _least(self, values: Array) -> float:
        """Sum of the smallest values of as many requests of each kind as must meet their SLOs."""
        import numpy as np

        total = 0.0
        for number, need in enumerate(self.needs):
            smallest = np.sort(values[self._met["slo"] & (self.arrays.kind == number)])[:need]
            # A running sum adds one after the other, as Python does.
            total += float(np.cumsum(smallest)[-1]) if len(smallest) else 0.0
        return total

    def prefill_s(self, constant_s: float) -> float:
        """Least seconds of prefill in the slowest stage, without the constant of a step."""
        return self._least(self.arrays.seconds(self.prefill, "stage") - constant_s)

    def decoded(self) -> tuple[float, float]:
        """Least rows of all decode steps, and tokens of context."""
        arrays = self.arrays
        context = (arrays.output - 1) * (arrays.prompt + arrays.output / 2.0 - 1.0)
        return self._least(arrays.output - 1), self._least(context)

    def held(self) -> float:
        """Least seconds for which tokens of KV are held."""
        arrays = self.arrays
        return self._least(arrays.prompt * (arrays.output - 1) * arrays.seconds(self.decode, "tpot"))

    def moved_s(self) -> float:
        """Least seconds on the link."""
        import numpy as np

        return self._least(np.where(self.arrays.output > 1, self._moved_s, 0.0))
