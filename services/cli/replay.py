"""`diptych replay`: decide again what a decision log says was decided, offline, and tell whether the same comes out."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

from diptych.errors import ConfigError
from planner.replan.decide import FleetAction
from planner.replan.journal import JournalHead, read_journal, split_runs
from planner.replan.replanner import ReplayedDecision, replay_decisions

SAME, DIFFERENT = 0, 1


def replay_log(path: Path, as_json: bool) -> int:
    """Print every decision of the log at `path`, or one JSON object; 1 if any comes out differently now.

    A log has the decisions of every deployment that was started with it, each of which is replayed for itself.

    Raises ConfigError: no such file, no such line, no decision log.
    """
    _check_log(path)
    found: list[tuple[JournalHead, list[ReplayedDecision]]] = []
    for life in split_runs(read_journal(path)):
        head = next(life)
        assert isinstance(head, JournalHead)
        found.append((head, list(replay_decisions(chain([head], life)))))
    every = [decision for _, one in found for decision in one]
    different = [decision for decision in every if not decision.same]
    if as_json:
        counts = {"decisions": len(every), "same": len(every) - len(different)}
        evaluator = found[-1][0].evaluator
        rows = {
            "lives": len(found),
            "judge": evaluator,
            **counts,
            "different": [_difference_row(one) for one in different],
        }
        print(json.dumps({"log": str(path), **rows}))
        return DIFFERENT if different else SAME
    for number, (head, one) in enumerate(found, 1):
        about = head.evaluator.get("about") or "an unnamed model"
        which = f", start {number} of {len(found)}" if len(found) > 1 else ""
        print(f"{about}, budget {head.policy.budget}, target {head.policy.target}{which}")
        for decision in one:
            print("\n".join(_decision_lines(decision, head.start_s)))
    print(f"{len(every)} decisions, {len(every) - len(different)} come out as they are written")
    return DIFFERENT if different else SAME


def _check_log(path: Path) -> None:
    first = next(read_journal(path), None)
    if not isinstance(first, JournalHead):
        why = "it is empty" if first is None else "its first line is not a head"
        raise ConfigError(f"{path} is not a decision log", why, "name a file that --replan-journal wrote")


def _decision_lines(decision: ReplayedDecision, start_s: float) -> list[str]:
    written = decision.written
    lines = [f"{written.at_s - start_s:9.0f} s  {written.trigger or 'nothing'}: {written.reason or 'held'}"]
    lines += [f"             {action_text(action)}" for action in written.actions]
    if not decision.same:
        now = ", ".join(map(action_text, decision.now.actions)) or "nothing" if decision.now else decision.why
        lines.append(f"             DIFFERENT now: {now}")
    return lines


def _difference_row(decision: ReplayedDecision) -> dict[str, object]:
    now = [action_text(action) for action in decision.now.actions] if decision.now else None
    written = [action_text(action) for action in decision.written.actions]
    return {"at_s": decision.written.at_s, "written": written, "now": now, "why": decision.why}


def action_text(action: FleetAction) -> str:
    """An action in a few words."""
    fields = {name: getattr(action, name) for name in action.__struct_fields__}
    return " ".join([type(action).__name__.lower(), *map(str, fields.values())])
