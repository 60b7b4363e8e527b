"""What a run came to, for people: a table of cells, and the figures, evidence and troubles of each scenario."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.faults.fault_rounds import PHASE_ORDER

if TYPE_CHECKING:
    from tests.faults.run import ScenarioResult


def scenario_line(result: ScenarioResult) -> str:
    """A scenario in one line."""
    figures = ", ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
    if result.skipped:
        return f"  SKIPPED: {result.skipped}"
    state = "ok" if not result.broken else f"BROKEN {len(result.broken)}"
    return f"  {state} in {result.seconds:.0f} s: {figures}"


def report_page(results: Iterable[ScenarioResult]) -> str:
    """The report, as Markdown."""
    results = list(results)
    parts = ["# Faults", *_cell_table(results)]
    for result in results:
        parts += _scenario_section(result)
    return "\n".join(parts) + "\n"


def _cell_table(results: list[ScenarioResult]) -> list[str]:
    """Faults by phase: requests, of them at the worker that was hit, client-visible failures, invariants broken."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    counts = {"cells": 0, "requests": 0, "hit": 0, "failures": 0, "broken": 0}
    for cell in (cell for result in results for cell in result.cells):
        text = f"{cell.requests}/{cell.hit}"
        text += f" **{cell.failures} failed**" if cell.failures else ""
        text += f" **{cell.broken} BROKEN**" if cell.broken else ""
        rows.setdefault((cell.fault, cell.target), {})[cell.phase] = text
        counts["cells"] += 1
        for name in ("requests", "hit", "failures", "broken"):
            counts[name] += getattr(cell, name)
    if not rows:
        return []
    lines = ["", "Requests held in each phase / of them at the very worker or link that was hit.", ""]
    lines += ["| fault | target | " + " | ".join(PHASE_ORDER) + " |", "|---" * (2 + len(PHASE_ORDER)) + "|"]
    lines += [
        f"| {kind} | {target} | " + " | ".join(row.get(phase, "–") for phase in PHASE_ORDER) + " |"
        for (kind, target), row in sorted(rows.items())
    ]
    return [*lines, "", "Together: " + ", ".join(f"{count} {name}" for name, count in counts.items()) + "."]


def _scenario_section(result: ScenarioResult) -> list[str]:
    scenario, summary = result.scenario, result.summary
    lines = [
        "",
        f"## {scenario.name}",
        "",
        scenario.about,
        "",
        f"Seed {scenario.seed}, {result.seconds:.0f} s.",
    ]
    if result.skipped:
        lines.append(f"- SKIPPED: {result.skipped}")
    lines += [f"- {name}: {value:.4g}" for name, value in result.figures.items()]
    if summary.failed:
        lines.append("- client-visible failures by code: " + _format_counts(summary.failed))
    if result.missed:
        lines.append(f"- phases not reached: {'; '.join(sorted(set(result.missed)))}")
    lines += [f"- BROKEN: {what}" for what in result.broken[:40]]
    lines += ["", f"Faults proven: {len(result.evidence)}.", ""]
    return [*lines, *(f"    {what}" for what in result.evidence[:12])]


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
