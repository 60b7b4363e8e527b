"""Bulk work beside requests in `diptych simulate`: what is asked for, and how much of it was done."""

from __future__ import annotations

import math
from typing import Any

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.sim.exact.bulk import SimBulkSpec, SimBulkUse
from planner.sim.exact.deployment import SimDeployment
from planner.sim.exact.simulate import ExactSimulation
from services.cli.plan.bulk_inputs import read_lengths
from services.cli.simulate.options import SimulateOptions
from services.gateway.batches.feeder import LINES_PER_WORKER


def bulk_beside(options: SimulateOptions, slo: Slo) -> SimBulkSpec | None:
    """The bulk work beside the requests, as `diptych serve` does it; None for none. `slo` is the strictest SLO.

    Raises:
        ConfigError: a flag cannot be read, or has no effect.
    """
    if options.bulk is None:
        if "bulk_slice_ms" in options.given:
            raise ConfigError(
                "--bulk-slice-ms has no effect here", "there is no bulk work", "add --bulk PROMPT:OUTPUT"
            )
        return None
    work, slice_ms = read_lengths(options.bulk), options.bulk_slice_ms
    if not 0 < slice_ms < math.inf:
        why = f"it must be greater than 0 (got {slice_ms:g})"
        raise ConfigError("--bulk-slice-ms cannot be used", why, "for example --bulk-slice-ms 20")
    # As in `services.cli.serve.specs`: beside answers only if both SLOs are set.
    tpot_s = slo.tpot_s if max(slo.ttft_s, slo.tpot_s) < math.inf else None
    return SimBulkSpec(work.prompt_tokens, work.output_tokens, LINES_PER_WORKER, slice_ms / 1000, tpot_s)


class BulkUse:
    """Adds up the bulk work of the runs of one deployment."""

    def __init__(self, deployment: SimDeployment) -> None:
        self._deployment, self._uses, self._seconds, self._workers = deployment, list[SimBulkUse](), 0.0, 0

    def add(self, simulation: ExactSimulation) -> None:
        """Counts a run that has ended."""
        uses = simulation.bulk_uses
        self._uses += uses
        self._workers = len(uses)
        self._seconds += simulation.events.now_s - simulation.begun_s

    def figures(self) -> dict[str, Any] | None:
        """The figures; None without bulk work. Rates are of the whole deployment while requests are served."""
        spec, uses, seconds = self._deployment.bulk, self._uses, self._seconds
        if spec is None:
            return None
        return {
            "line": {"prompt": spec.prompt, "output": spec.output},
            "slice_ms": spec.slice_s * 1e3,
            "beside_answers": spec.tpot_s is not None,
            "workers": self._workers,
            "tokens_per_s": sum(one.tokens for one in uses) / seconds,
            "prompt_tokens_per_s": sum(one.prompt_tokens for one in uses) / seconds,
            "lines": sum(one.lines for one in uses),
            "busy_share": sum(one.seconds for one in uses) / (seconds * self._workers),
            "preemptions": sum(one.preemptions for one in uses),
        }


def format_bulk_use(figures: dict[str, Any]) -> str:
    """The figures as lines for users."""
    line, when = (
        figures["line"],
        "beside answers too" if figures["beside_answers"] else "only without answers",
    )
    return (
        f"bulk work: {figures['tokens_per_s']:,.1f} new tokens/s, {figures['prompt_tokens_per_s']:,.1f} of prompts;"
        f" {figures['busy_share']:.0%} of the time of {figures['workers']} instances\n"
        f"  {figures['lines']:,} lines of {line['prompt']}:{line['output']} tokens ended,"
        f" {figures['preemptions']:,} preemptions; units of {figures['slice_ms']:g} ms, {when}"
    )
