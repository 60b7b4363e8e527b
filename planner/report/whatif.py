"""What-if questions: repeats the plan with one thing changed, and compares the answers.

A change is NAME=VALUE. `ttft` and `tpot` are in seconds; `gpus` and `nodes` are a number, or what to add (+8, -2);
`link` between nodes is in Gbps or GB/s; `rate` is in requests/s; `attainment` is a share; `cv` is that of the
arrivals; `device` is a name. Numbers may be multiples: rate=x2, ttft=x0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diptych.errors import ConfigError
from diptych.slo import Slo, strictest_slo
from planner.costs.profile_file import built_in_profile
from planner.hardware import find_device as named_device
from planner.kv_links import parse_link
from planner.placement.problem import NodeGroup, Problem
from planner.placement.solve import Solution, solve_placement


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """An answer to a changed question; `why_not` instead where there is none."""

    change: str
    solution: Solution | None
    why_not: str = ""


def ask_what_if(problem: Problem, change: str) -> WhatIfAnswer:
    """The changed question, answered. Raises ConfigError where the change itself cannot be read."""
    question = apply_change(problem, change)
    try:
        return WhatIfAnswer(change, solve_placement(question))
    except ConfigError as error:
        return WhatIfAnswer(
            change, None, " ".join(part for part in (error.what, error.why, error.fix) if part)
        )


def apply_change(problem: Problem, change: str) -> Problem:
    """Returns `problem` with one thing changed, given as NAME=VALUE.

    Raises:
        ConfigError: if the name is unknown or the value cannot be read.
    """
    name, equals, value = (part.strip() for part in change.partition("="))
    apply = CHANGES.get(name.lower())
    if not equals or apply is None or not value:
        raise ConfigError(
            f"--what-if {change!r} is no change",
            f"known: {', '.join(CHANGES)}",
            'write for example "ttft=0.3", "gpus=-2"',
        )
    try:
        return apply(problem, value)
    except ValueError as error:
        raise ConfigError(
            f"--what-if {change!r} cannot be read",
            str(error),
            'write for example "ttft=0.3", "link=25Gbps", "rate=x2"',
        ) from error


def compare_answers(solution: Solution, other: WhatIfAnswer) -> list[str]:
    """What changes, in lines."""
    if other.solution is None:
        return [f"what if {other.change}: nothing is possible. {other.why_not}"]
    was, now = solution.best_candidate, other.solution.best_candidate
    same = str(was.placement) == str(now.placement) and was.placement.affinity == now.placement.affinity
    lines = [f"what if {other.change}: {'the same placement' if same else now.placement}"]
    if other.solution.problem.rate is None:
        lines.append(
            f"  goodput {now.goodput_rps:.3g} requests/s ({now.goodput_rps / was.goodput_rps - 1:+.0%}),"
            f" per device {now.per_device_rps / was.per_device_rps - 1:+.0%}"
        )
    else:
        lines.append(
            f"  {now.placement.devices} devices ({now.placement.devices - was.placement.devices:+d})"
        )
    lines.append(
        f"  {now.cost_per_million / was.cost_per_million - 1:+.0%} per million good tokens; limited by"
        f" {other.solution.binding.resource}"
    )
    if other.solution.problem.node_link != solution.problem.node_link and other.solution.problem.one_node:
        lines.append("  there is one node, so that nothing goes over the link between nodes")
    return lines


def _parse_number(text: str, now: float | None, above: float = 0.0) -> float:
    """A number, or a multiple of what it is now. Raises ValueError."""
    times = text.lower().startswith("x")
    value = float(text[1:] if times else text)
    if times:
        if now is None:
            raise ValueError("there is nothing to multiply: none was given")
        value *= now
    if not above < value < float("inf"):
        raise ValueError(f"{text} gives {value:g}, which must be above {above:g}")
    return value


def with_slos(problem: Problem, change: Callable[[Slo], Slo]) -> Problem:
    """`problem` with other SLOs. Where steps are bounded by the TPOT SLO, they are bounded by the new one."""
    slos, limits = {kind: change(slo) for kind, slo in problem.slos.items()}, problem.limits
    if limits.step_s == strictest_slo(problem.slos.values()).tpot_s:
        limits = replace(limits, step_s=strictest_slo(slos.values()).tpot_s)
    return replace(problem, slos=slos, limits=limits)


def _change_ttft(problem: Problem, text: str) -> Problem:
    return with_slos(problem, lambda slo: replace(slo, ttft_s=_parse_number(text, slo.ttft_s)))


def _change_tpot(problem: Problem, text: str) -> Problem:
    return with_slos(problem, lambda slo: replace(slo, tpot_s=_parse_number(text, slo.tpot_s)))


def _change_attainment(problem: Problem, text: str) -> Problem:
    if not 0.0 < float(text) <= 1.0:
        raise ValueError("an attainment is above 0 and at most 1")
    return with_slos(problem, lambda slo: replace(slo, attainment=float(text)))


def _parse_count(text: str, now: int) -> int:
    count = now + int(text) if text[0] in "+-" else int(_parse_number(text, now))
    if count < 1:
        raise ValueError(f"{text} leaves {count}")
    return count


def _change_gpus(problem: Problem, text: str) -> Problem:
    first, *rest = problem.groups
    return replace(problem, groups=(spread_over_nodes(first, _parse_count(text, first.devices)), *rest))


def _change_nodes(problem: Problem, text: str) -> Problem:
    first, *rest = problem.groups
    return replace(problem, groups=(replace(first, nodes=_parse_count(text, first.nodes)), *rest))


def _change_link(problem: Problem, text: str) -> Problem:
    return replace(problem, node_link=parse_link(text, problem.groups[0].device.node.inter.latency_s))


def _change_rate(problem: Problem, text: str) -> Problem:
    return replace(problem, rate=_parse_number(text, problem.rate))


def _change_cv(problem: Problem, text: str) -> Problem:
    return replace(problem, cv=_parse_number(text, problem.cv, -1e-9))


def _change_device(problem: Problem, text: str) -> Problem:
    found = named_device(text, *(group.device for group in problem.groups))
    if any(stock.device.name == found.name for stock in problem.groups[1:]):
        raise ValueError(f"{found.name} is on offer already")
    if found.name == problem.groups[0].device.name:
        return problem
    profile = built_in_profile(problem.model, found)
    groups = (replace(problem.groups[0], device=found, slots=0), *problem.groups[1:])
    profiles = {**problem.profiles, found.name: profile}
    return replace(problem, model=profile.model, groups=groups, profiles=profiles)


CHANGES: dict[str, Callable[[Problem, str], Problem]] = {
    "ttft": _change_ttft, "tpot": _change_tpot, "attainment": _change_attainment,
    "gpus": _change_gpus, "nodes": _change_nodes, "link": _change_link,
    "rate": _change_rate, "cv": _change_cv, "device": _change_device,
}  # fmt: skip


def spread_over_nodes(group: NodeGroup, devices: int) -> NodeGroup:
    """So many devices on equal nodes, none larger than `group`'s, and as few as may be.

    Raises ValueError where that takes twice as many nodes as the devices would fill.
    """
    slots = max(group.slots, group.devices_per_node)
    least = -(-devices // slots)
    for nodes in range(least, 2 * least + 1):
        if devices % nodes == 0:
            return replace(group, nodes=nodes, devices_per_node=devices // nodes, slots=slots)
    raise ValueError(f"{devices} devices do not make equal nodes of at most {slots}")
