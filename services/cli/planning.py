"""`diptych plan`: flags to a question, and the answer to lines, JSON, plots and a plan's file."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.errors import ConfigError
from planner import profile as profiles
from planner.explain import explain, headline, plan_file, told
from planner.hardware import Device
from planner.hardware import device as named_device
from planner.placement import Answer, place
from planner.plan_file import save
from planner.profile import Profile
from planner.request import Request, Stock
from planner.shape import Shape, known
from planner.terms import Slo
from planner.verify import limits
from planner.whatif import Changed, ask, changed, compare, link, spread
from planner.workload import Mix, Source, Workload, named
from services.cli import outputs
from services.cli.stop import OK

AFFINITIES = ("auto", "high", "low")
FAMILIES = ("colocated", "disaggregated", "hybrid")
DEFAULT_WORKLOAD = "sharegpt"


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
    print(_json(answer, others, drawn) if options["as_json"] else _lines(options, answer, others, drawn))
    return OK


def question(options: Mapping[str, Any]) -> Request:
    """The flags as a question to the planner."""
    measured = profiles.load(options["profile"], options["model"]) if options["profile"] else None
    shape = known(options["model"])
    stocks = _stocks(options, measured)
    source, slos, notes = _traffic(options, shape)
    _check(options)
    between = None
    if options["link"]:
        try:
            between = link(options["link"], stocks[0].device.node.inter.latency_s)
        except ValueError as error:
            raise ConfigError(
                f"--link {options['link']} cannot be read", str(error), "write 25Gbps or 50GB/s"
            ) from error
    return Request(
        shape, stocks, {stock.device.name: _profile(shape, stock.device, measured) for stock in stocks}, source, slos,
        options["rate"], ", ".join(slos) if options["kind"] else options["workload"], options["affinity"],
        tuple(options["family"] or FAMILIES), options["cv"], options["seeds"], options["horizon"], options["span_s"],
        between,
        profiled_only=options["profiled_only"], limits=limits(list(slos.values()), options["chunk_tokens"]),
        verified=options["verify"], notes=notes,
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
    device = named_device(options["device"]) if options["device"] else _device_of(measured)
    per_node = options["gpus_per_node"] or device.node.devices_per_node
    gpus, nodes = options["gpus"], options["nodes"]
    if gpus is not None and nodes is not None and gpus != nodes * per_node:
        raise ConfigError(
            f"--gpus {gpus} and --nodes {nodes} do not agree",
            f"nodes have {per_node} devices",
            "leave out one of them",
        )
    stock = Stock(device, nodes or 1, per_node)
    if gpus is not None and nodes is None:
        try:
            stock = spread(stock, gpus)
        except ValueError as error:
            raise ConfigError(
                f"--gpus {gpus} is not possible", str(error), "give --nodes and --gpus-per-node"
            ) from error
    more = tuple(map(_also, options["also"] or []))
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


def _device_of(measured: Profile | None) -> Device:
    assert measured is not None
    return measured.device


def _also(text: str) -> Stock:
    name, _, size = text.rpartition(":")
    nodes, _, per_node = size.partition("x")
    if not (name and nodes.isdigit() and per_node.isdigit() and int(nodes) and int(per_node)):
        raise ConfigError(
            f"--also {text} cannot be read", "it is a device, nodes and devices a node", "such as H200:1x8"
        )
    return Stock(named_device(name), int(nodes), int(per_node))


def _profile(shape: Shape, device: Device, measured: Profile | None) -> Profile:
    """What was measured, if it is of this model and device; else what comes with us."""
    if measured is None or measured.device.name != device.name:
        return profiles.built_in(shape, device)
    if (measured.model.layers, measured.model.hidden) != (shape.layers, shape.hidden):
        raise ConfigError(
            f"the profile is of {measured.model.name}, and the plan for {shape.name}",
            "their layers and widths differ", "measure that model, or leave out --profile",
        )  # fmt: skip
    return measured


def _traffic(options: Mapping[str, Any], shape: Shape) -> tuple[Source, Mapping[str, Slo], tuple[str, ...]]:
    """What comes, what is promised, and a note for each workload with requests that the model's context cannot take."""
    if options["kind"]:
        kinds = [_kind(text, options["attainment"]) for text in options["kind"]]
        fitted = [_fitted(workload, name, shape) for name, _, workload, _ in kinds]
        mix = Mix(
            [(name, share, one, slo) for (name, share, _, slo), (one, _) in zip(kinds, fitted, strict=True)]
        )
        single = [name for name in ("slo_ttft_ms", "slo_tpot_ms") if options[name] is not None]
        single += ["workload"] if options["workload"] != DEFAULT_WORKLOAD else []
        if single:
            raise ConfigError(
                f"--{single[0].replace('_', '-')} has no effect",
                "each --kind names its own",
                "leave out one of them",
            )
        return mix, mix.slos, tuple(note for _, notes in fitted for note in notes)
    for flag in ("slo_ttft_ms", "slo_tpot_ms"):
        if options[flag] is not None and not 0.0 < options[flag] < math.inf:
            raise ConfigError(
                f"--{flag.replace('_', '-')} {options[flag]:g} is not possible", "it is a time", "above 0"
            )
    if options["slo_ttft_ms"] is None and options["slo_tpot_ms"] is None:
        raise ConfigError(
            "no objective is given",
            "without one every rate is good",
            "such as --slo-ttft-ms 500 --slo-tpot-ms 50",
        )
    ttft_s, tpot_s = (
        math.inf if options[flag] is None else options[flag] / 1e3 for flag in ("slo_ttft_ms", "slo_tpot_ms")
    )
    workload, notes = _fitted(named(options["workload"]), options["workload"], shape)
    return workload, {"": Slo(ttft_s, tpot_s, options["attainment"])}, notes


def _fitted(workload: Workload, name: str, shape: Shape) -> tuple[Workload, tuple[str, ...]]:
    """The requests that the model's context takes, and what is told of others: a server refuses them."""
    found = workload.longer(shape.max_len)
    if not found.longer:
        return workload, ()
    told = f"{name}: {found} are longer than the context of {shape.name}, {shape.max_len:,} tokens, and are left out"
    return workload.within(shape.max_len), (told,)


def _kind(text: str, attainment: float) -> tuple[str, float, Any, Slo]:
    name, equals, rest = text.partition("=")
    parts = rest.rsplit(":", 3)
    try:
        workload, share, ttft_ms, tpot_ms = parts[0], *map(float, parts[1:])
        if not (name and equals and all(0.0 < one < math.inf for one in (share, ttft_ms, tpot_ms))):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--kind {text} cannot be read",
            "it is NAME=WORKLOAD:SHARE:TTFT_MS:TPOT_MS",
            "chat=sharegpt:0.7:250:100",
        ) from None
    return name, share, named(workload), Slo(ttft_ms / 1e3, tpot_ms / 1e3, attainment)


def _lines(options: Mapping[str, Any], answer: Answer, others: list[Changed], drawn: list[Path]) -> str:
    lines = headline(answer)
    lines += explain(answer) if options["explain"] else [f"note: {note}" for note in answer.notes]
    for other in others:
        lines += ["", *compare(answer, other)]
    if options["out"] is not None:
        lines += ["", f"written: {options['out']}; deploy it with: diptych serve --plan {options['out']}"]
    return "\n".join(lines + [f"drawn: {path}" for path in drawn])


def _json(answer: Answer, others: list[Changed], drawn: list[Path]) -> str:
    changes = [
        {"change": one.change, "why_not": one.why_not, "answer": told(one.answer) if one.answer else None}
        for one in others
    ]
    return json.dumps({**told(answer), "what_if": changes, "plots": list(map(str, drawn))}, indent=2)


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
