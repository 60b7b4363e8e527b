"""`diptych plan`: flags to a question, and the answer to lines, JSON, plots and a plan's file."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.errors import ConfigError
from planner import profile as profiles
from planner.explain import explain, headline, plan_file, told
from planner.hardware import Device
from planner.hardware import device as named_device
from planner.links import wanted
from planner.placement import Answer, place
from planner.plan_file import save
from planner.profile import Profile
from planner.request import Request, Stock
from planner.shape import Shape, known
from planner.verify import limits
from planner.whatif import Changed, ask, changed, compare, spread
from services.cli import outputs
from services.cli.stop import OK
from services.cli.traffic import traffic

AFFINITIES = ("auto", "high", "low")
FAMILIES = ("colocated", "disaggregated", "hybrid")


def plan(options: Mapping[str, Any]) -> int:
    """`options` by the names of their flags. Returns the exit status.

    Raises:
        ConfigError: a flag or a file cannot be used, or there is no answer: it says what forbids one.
    """
    _writable(options)
    request = question(options)
    for change in options["what_if"] or []:
        changed(request, change)  # a change that cannot be read is told before anything takes long
    answer = place(request)
    others = [ask(request, change) for change in options["what_if"] or []]
    drawn: list[Path] = []
    if options["plot"] is not None:
        drawn = importlib.import_module("planner.curves").plots(answer, options["plot"])
    if options["out"] is not None:
        _write(options["out"], answer, options["model"])
    tell = _json if options["as_json"] else _lines
    print(tell(options, answer, others, drawn))
    return OK


def question(options: Mapping[str, Any]) -> Request:
    """The flags as a question to the planner."""
    measured = profiles.load_of(options["profile"], options["model"]) if options["profile"] else None
    stocks = _stocks(options, measured)
    asked = known(options["model"]) if measured is None else measured.model
    found = {stock.device.name: _profile(asked, stock.device, measured) for stock in stocks}
    shape = found[stocks[0].device.name].model
    comes = traffic(options, shape)
    _check(options)
    return Request(
        shape, stocks, found, comes.source, comes.slos, options["rate"], comes.name, options["affinity"],
        tuple(options["family"] or FAMILIES), options["cv"], options["seeds"], options["horizon"], options["span_s"],
        wanted(options["link"], stocks[0].device.node.inter.latency_s),
        profiled_only=options["profiled_only"], limits=limits(list(comes.slos.values()), options["chunk_tokens"]),
        verified=options["verify"], notes=comes.notes,
    )  # fmt: skip


def _check(options: Mapping[str, Any]) -> None:
    rate, share, span_s = (options[name] for name in ("rate", "attainment", "span_s"))
    wrong = [one for one in options["family"] or () if one not in FAMILIES]
    faults = [
        (
            options["affinity"] not in AFFINITIES,
            f"--affinity {options['affinity']}",
            f"one of {', '.join(AFFINITIES)}",
        ),
        (bool(wrong), f"--family {' '.join(wrong)}", f"one of {', '.join(FAMILIES)}"),
        (rate is not None and not 0.0 < rate < math.inf, f"--rate {rate}", "requests per second, above 0"),
        (not 0.0 < share <= 1.0, f"--attainment {share}", "a share above 0 and at most 1, such as 0.9"),
        (not 0.0 <= span_s < math.inf, f"--span-s {span_s}", "seconds, such as 60"),
    ]
    for wrongly, flag, fix in faults:
        if wrongly:
            raise ConfigError(f"{flag} is not possible", "it is out of its range or unknown", fix)


def _stocks(options: Mapping[str, Any], measured: Profile | None) -> tuple[Stock, ...]:
    if options["device"] is None and measured is None:
        raise ConfigError(
            "the hardware is not named", "neither --device nor --profile is given", "such as --device H100"
        )
    own: tuple[Device, ...] = () if measured is None else (measured.device,)
    device = named_device(options["device"], *own) if options["device"] else own[0]
    per_node = options["gpus_per_node"] or device.node.devices_per_node
    gpus, nodes = options["gpus"], options["nodes"]
    slots = 0 if nodes or options["gpus_per_node"] else device.slots
    if gpus is not None and nodes is not None and gpus != nodes * per_node:
        raise ConfigError(
            f"--gpus {gpus} and --nodes {nodes} do not agree",
            f"nodes have {per_node} devices",
            "leave out one of them",
        )
    stock = Stock(device, nodes or 1, per_node, slots)
    if gpus is not None and nodes is None:
        try:
            stock = spread(stock, gpus)
        except ValueError as error:
            raise ConfigError(
                f"--gpus {gpus} is not possible", str(error), "give --nodes and --gpus-per-node"
            ) from error
    more = tuple(_also(text, own) for text in options["also"] or [])
    names = [one.device.name for one in (stock, *more)]
    if len(set(names)) < len(names):
        raise ConfigError("a device is named twice", ", ".join(names), "give each kind of device once")
    if measured is not None and measured.device.name not in names:
        raise ConfigError(
            f"the profile is of {measured.device.name}, and the plan for {', '.join(names)}",
            "it would have no effect",
            f"--device {measured.device.name}, or leave out --profile",
        )
    return (stock, *more)


def _also(text: str, own: Sequence[Device]) -> Stock:
    name, _, size = text.rpartition(":")
    nodes, _, per_node = size.partition("x")
    if not (name and nodes.isdigit() and per_node.isdigit() and int(nodes) and int(per_node)):
        raise ConfigError(
            f"--also {text} cannot be read", "it is a device, nodes and devices a node", "such as H200:1x8"
        )
    return Stock(named_device(name, *own), int(nodes), int(per_node))


def _profile(shape: Shape, device: Device, measured: Profile | None) -> Profile:
    """What was measured, if it is of this device; else what comes with us."""
    if measured is None or measured.device.name != device.name:
        return profiles.built_in(shape, device)
    return measured


def _lines(options: Mapping[str, Any], answer: Answer, others: list[Changed], drawn: list[Path]) -> str:
    lines = headline(answer)
    lines += explain(answer) if options["explain"] else [f"note: {note}" for note in answer.notes]
    for other in others:
        lines += ["", *compare(answer, other)]
    if options["out"] is not None:
        lines += ["", f"written: {options['out']}; deploy it with: diptych serve --plan {options['out']}"]
    return "\n".join(lines + [f"drawn: {path}" for path in drawn])


def _json(options: Mapping[str, Any], answer: Answer, others: list[Changed], drawn: list[Path]) -> str:
    changes = [
        {"change": one.change, "why_not": one.why_not, "answer": told(one.answer) if one.answer else None}
        for one in others
    ]
    more = {"explanation": explain(answer)} if options["explain"] else {}
    return json.dumps({**told(answer), **more, "what_if": changes, "plots": list(map(str, drawn))}, indent=2)


def _writable(options: Mapping[str, Any]) -> None:
    """Raises ConfigError where the answer could not be written, before it is looked for."""
    if options["out"] is not None:
        outputs.writable(options["out"], "--out")
    if options["plot"] is not None:
        outputs.folder(options["plot"], "--plot")


def _write(path: Path, answer: Answer, model: str) -> None:
    try:
        save(path, plan_file(answer, model))
    except OSError as error:
        raise ConfigError(
            f"the plan cannot be written to {path}", error.strerror or str(error), "name another file"
        ) from error
