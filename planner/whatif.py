"""What if: the same question with one thing changed, and how the answer changes.

A change is NAME=VALUE. `ttft` and `tpot` in seconds; `gpus` and `nodes` as a number, or what to add (+8, -2); `link`
between nodes in Gbps or GB/s; `rate` in requests/s; `attainment` as a share; `cv` of the arrivals; `device` by name.
Numbers may be multiples: rate=x2, ttft=x0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diptych.errors import ConfigError
from planner.hardware import device as named_device
from planner.links import link
from planner.placement import Answer, place
from planner.profile import built_in
from planner.request import Request, Stock
from planner.terms import Slo


@dataclass(frozen=True, slots=True)
class Changed:
    """An answer to a changed question; `why_not` instead where there is none."""

    change: str
    answer: Answer | None
    why_not: str = ""


def ask(request: Request, change: str) -> Changed:
    """The changed question, answered. Raises ConfigError where the change itself cannot be read."""
    question = changed(request, change)
    try:
        return Changed(change, place(question))
    except ConfigError as error:
        return Changed(change, None, " ".join(part for part in (error.what, error.why, error.fix) if part))


def changed(request: Request, change: str) -> Request:
    """`request` with one thing changed."""
    name, equals, value = (part.strip() for part in change.partition("="))
    apply = CHANGES.get(name.lower())
    if not equals or apply is None or not value:
        raise ConfigError(
            f"--what-if {change!r} is no change",
            f"known: {', '.join(CHANGES)}",
            'write for example "ttft=0.3", "gpus=-2"',
        )
    try:
        return apply(request, value)
    except ValueError as error:
        raise ConfigError(
            f"--what-if {change!r} cannot be read",
            str(error),
            'write for example "ttft=0.3", "link=25Gbps", "rate=x2"',
        ) from error


def compare(base: Answer, other: Changed) -> list[str]:
    """What changes, in lines."""
    if other.answer is None:
        return [f"what if {other.change}: nothing is possible. {other.why_not}"]
    was, now = base.best, other.answer.best
    same = str(was.placement) == str(now.placement) and was.placement.affinity == now.placement.affinity
    lines = [f"what if {other.change}: {'the same placement' if same else now.placement}"]
    if other.answer.request.rate is None:
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
        f" {other.answer.binding.resource}"
    )
    if other.answer.request.between != base.request.between and other.answer.request.one_node:
        lines.append("  there is one node, so that nothing goes over the link between nodes")
    return lines


def _number(text: str, now: float | None, above: float = 0.0) -> float:
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


def promising(request: Request, change: Callable[[Slo], Slo]) -> Request:
    """`request` with other objectives. Instances that keep their steps within the TPOT keep them within the new one."""
    slos, limits = {kind: change(slo) for kind, slo in request.slos.items()}, request.limits
    if limits.step_s == min(slo.tpot_s for slo in request.slos.values()):
        limits = replace(limits, step_s=min(slo.tpot_s for slo in slos.values()))
    return replace(request, slos=slos, limits=limits)


def _ttft(request: Request, text: str) -> Request:
    return promising(request, lambda slo: replace(slo, ttft_s=_number(text, slo.ttft_s)))


def _tpot(request: Request, text: str) -> Request:
    return promising(request, lambda slo: replace(slo, tpot_s=_number(text, slo.tpot_s)))


def _attainment(request: Request, text: str) -> Request:
    if not 0.0 < float(text) <= 1.0:
        raise ValueError("an attainment is above 0 and at most 1")
    return promising(request, lambda slo: replace(slo, attainment=float(text)))


def _count(text: str, now: int) -> int:
    count = now + int(text) if text[0] in "+-" else int(_number(text, now))
    if count < 1:
        raise ValueError(f"{text} leaves {count}")
    return count


def _gpus(request: Request, text: str) -> Request:
    first, *rest = request.stocks
    return replace(request, stocks=(spread(first, _count(text, first.devices)), *rest))


def _nodes(request: Request, text: str) -> Request:
    first, *rest = request.stocks
    return replace(request, stocks=(replace(first, nodes=_count(text, first.nodes)), *rest))


def _link(request: Request, text: str) -> Request:
    return replace(request, between=link(text, request.stocks[0].device.node.inter.latency_s))


def _rate(request: Request, text: str) -> Request:
    return replace(request, rate=_number(text, request.rate))


def _cv(request: Request, text: str) -> Request:
    return replace(request, cv=_number(text, request.cv, -1e-9))


def _device(request: Request, text: str) -> Request:
    found = named_device(text, *(stock.device for stock in request.stocks))
    if any(stock.device.name == found.name for stock in request.stocks[1:]):
        raise ValueError(f"{found.name} is on offer already")
    if found.name == request.stocks[0].device.name:
        return request
    profile = built_in(request.model, found)
    stocks = (replace(request.stocks[0], device=found, slots=0), *request.stocks[1:])
    profiles = {**request.profiles, found.name: profile}
    return replace(request, model=profile.model, stocks=stocks, profiles=profiles)


CHANGES: dict[str, Callable[[Request, str], Request]] = {
    "ttft": _ttft, "tpot": _tpot, "attainment": _attainment, "gpus": _gpus, "nodes": _nodes, "link": _link,
    "rate": _rate, "cv": _cv, "device": _device,
}  # fmt: skip


def spread(stock: Stock, devices: int) -> Stock:
    """So many devices on equal nodes, none larger than `stock`'s, and as few as may be.

    Raises ValueError where that takes twice as many nodes as the devices would fill.
    """
    slots = max(stock.slots, stock.devices_per_node)
    least = -(-devices // slots)
    for nodes in range(least, 2 * least + 1):
        if devices % nodes == 0:
            return replace(stock, nodes=nodes, devices_per_node=devices // nodes, slots=slots)
    raise ValueError(f"{devices} devices do not make equal nodes of at most {slots}")
