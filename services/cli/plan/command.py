"""`diptych plan`: flags to a question, and the answer to lines, JSON, plots and a plan's file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from diptych.chunks import RAW_CLASS
from diptych.errors import ConfigError
from diptych.extras import require_extra
from planner.costs import profile_file as profiles
from planner.costs.kv.classes import kv_class_notes, read_classes, shared_kv_classes
from planner.costs.kv.codec import code_profile, codec_note, with_kv_codec
from planner.costs.kv.eviction import find_keep, keep_notes
from planner.costs.model import ModelDims, find_model
from planner.costs.profile import CostProfile
from planner.hardware import Device
from planner.hardware import find_device as named_device
from planner.kv_links import parse_link_flag
from planner.placement.families import first_answer
from planner.placement.plan_file import save_plan
from planner.placement.problem import NodeGroup, Problem
from planner.placement.solve import Solution, solve_placement
from planner.placement.validate import product_limits
from planner.report.explain import (
    explain_solution,
    list_notes,
    make_plan_file,
    serve_command,
    solution_headline,
    solution_json,
)
from planner.report.whatif import (
    WhatIfAnswer,
    apply_change,
    ask_what_if,
    compare_answers,
    spread_over_nodes,
)
from planner.workload.kv_mix import KvMixedSource
from services.cli.plan.kv_mix import choose_kv_mix
from services.cli.plan.options import PlanOptions
from services.cli.plan.workload import read_workload
from services.host import output_paths
from services.host.exit_codes import OK

AFFINITIES = ("auto", "high", "low")
FAMILIES = ("colocated", "disaggregated", "hybrid")


def run_plan(options: PlanOptions) -> int:
    """Find the best deployment, and print or write it. Returns the exit status.

    Raises:
        ConfigError: a flag or a file cannot be used, or there is no answer: it says what forbids one.
    """
    _check_outputs(options)
    request = read_problem(options)
    for change in options.what_if:
        # This refuses a change that cannot be read before anything takes long.
        apply_change(request, change)
    if not options.as_json:
        _print_first(request)
    try:
        solution = solve_placement(request, _report_progress)
    finally:
        _report_progress("")
    others = [ask_what_if(request, change) for change in options.what_if]
    drawn: list[Path] = []
    if options.plot is not None:
        # Imported only here, since it imports matplotlib, which is slow.
        from planner.report.curves import draw_plots

        drawn = draw_plots(solution, options.plot)
    if options.out is not None:
        _write_plan(options.out, solution, options.model)
    render = _format_json if options.as_json else _format_lines
    print(render(options, solution, others, drawn))
    return OK


def _print_first(problem: Problem) -> None:
    """Print what short runs suggest, before the search. What is wrong with the question is said by the search."""
    _report_progress("looking at short runs; the first plan on a machine compiles for it")
    found = None
    with suppress(ConfigError):
        found = first_answer(problem)
    _report_progress("")
    if found is not None:
        print(f"at first sight: {found.placement}, about {found.expected_rps:.3g} requests/s", flush=True)


def _report_progress(text: str) -> None:
    """Show on a terminal what is being done; no text ends that."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def read_problem(options: PlanOptions) -> Problem:
    """The planner's problem that the flags describe."""
    profile = (
        profiles.load_profile_of(options.profile, options.model) if options.profile is not None else None
    )
    keep = find_keep(profile, options.kv_keep, options.kv_cache_codec)
    bare, codec = profile, RAW_CLASS if read_classes(options.kv_cache_codec) else options.kv_cache_codec
    if profile is not None and codec == options.kv_cache_codec:
        profile = code_profile(profile, codec)
    stocks = _device_stocks(options, profile)
    asked = with_kv_codec(find_model(options.model), codec) if profile is None else profile.model
    found = {stock.device.name: _profile_of(asked, stock.device, profile) for stock in stocks}
    dims = found[stocks[0].device.name].model
    workload = read_workload(options, dims)
    _check_ranges(options)
    classes = shared_kv_classes(found.values(), options.kv_cache_codec)
    mix = choose_kv_mix(options.kv_mix, classes, found[stocks[0].device.name], workload.kv_shares)
    source = KvMixedSource(workload.source, mix) if classes else workload.source
    known = [] if bare is None else [bare]
    coded = kv_class_notes(classes, mix, *known) if classes else codec_note(dims, *known)
    return Problem(
        dims, stocks, found, source, workload.slos, options.rate, workload.name, options.affinity,
        options.family or FAMILIES, options.cv, options.seeds, options.horizon, options.span_s,
        parse_link_flag(options.link, stocks[0].device.node.inter.latency_s),
        profiled_only=options.profiled_only,
        limits=product_limits(list(workload.slos.values()), options.chunk_tokens),
        verified=options.verify, notes=(*workload.notes, *coded, *keep_notes(keep)), kv_classes=classes, kv_mix=mix,
        keep=keep,
    )  # fmt: skip


def _check_ranges(options: PlanOptions) -> None:
    rate, span_s = options.rate, options.span_s
    wrong = [one for one in options.family if one not in FAMILIES]
    faults = [
        (
            options.affinity not in AFFINITIES,
            f"--affinity {options.affinity}",
            f"one of {', '.join(AFFINITIES)}",
        ),
        (bool(wrong), f"--family {' '.join(wrong)}", f"one of {', '.join(FAMILIES)}"),
        (rate is not None and not 0.0 < rate < math.inf, f"--rate {rate}", "requests per second, above 0"),
        (not 0.0 <= span_s < math.inf, f"--span-s {span_s}", "seconds, such as 60"),
    ]
    for wrongly, flag, fix in faults:
        if wrongly:
            raise ConfigError(f"{flag} is not possible", "it is out of its range or unknown", fix)


def _device_stocks(options: PlanOptions, profile: CostProfile | None) -> tuple[NodeGroup, ...]:
    if options.device is None and profile is None:
        raise ConfigError(
            "the hardware is not named", "neither --device nor --profile is given", "such as --device H100"
        )
    own: tuple[Device, ...] = () if profile is None else (profile.device,)
    device = named_device(options.device, *own) if options.device else own[0]
    per_node = options.gpus_per_node or device.node.devices_per_node
    gpus, nodes = options.gpus, options.nodes
    slots = 0 if nodes or options.gpus_per_node else device.slots
    if gpus is not None and nodes is not None and gpus != nodes * per_node:
        raise ConfigError(
            f"--gpus {gpus} and --nodes {nodes} do not agree",
            f"nodes have {per_node} devices",
            "leave out one of them",
        )
    stock = NodeGroup(device, nodes or 1, per_node, slots)
    if gpus is not None and nodes is None:
        try:
            stock = spread_over_nodes(stock, gpus)
        except ValueError as error:
            raise ConfigError(
                f"--gpus {gpus} is not possible", str(error), "give --nodes and --gpus-per-node"
            ) from error
    more = tuple(_parse_also(text, own) for text in options.also)
    names = [one.device.name for one in (stock, *more)]
    if len(set(names)) < len(names):
        raise ConfigError("a device is named twice", ", ".join(names), "give each kind of device once")
    if profile is not None and profile.device.name not in names:
        raise ConfigError(
            f"the profile is of {profile.device.name}, and the plan for {', '.join(names)}",
            "it would have no effect",
            f"--device {profile.device.name}, or leave out --profile",
        )
    return (stock, *more)


def _parse_also(text: str, own_devices: Sequence[Device]) -> NodeGroup:
    name, _, size = text.rpartition(":")
    nodes, _, per_node = size.partition("x")
    if not (name and nodes.isdigit() and per_node.isdigit() and int(nodes) and int(per_node)):
        raise ConfigError(
            f"--also {text} cannot be read", "it is a device, nodes and devices a node", "such as H200:1x8"
        )
    return NodeGroup(named_device(name, *own_devices), int(nodes), int(per_node))


def _profile_of(dims: ModelDims, device: Device, profile: CostProfile | None) -> CostProfile:
    """The measured profile, if it is of this device; else the built-in profile."""
    if profile is None or profile.device.name != device.name:
        return profiles.built_in_profile(dims, device)
    return profile


def _format_lines(
    options: PlanOptions, solution: Solution, others: list[WhatIfAnswer], drawn: list[Path]
) -> str:
    lines = solution_headline(solution)
    lines += (
        explain_solution(solution) if options.explain else [f"note: {note}" for note in list_notes(solution)]
    )
    for other in others:
        lines += ["", *compare_answers(solution, other)]
    if options.out is not None:
        command = serve_command(solution, options.out)
        lines += ["", f"written: {options.out}" + (f"; deploy it with: {command}" if command else "")]
    return "\n".join(lines + [f"drawn: {path}" for path in drawn])


def _format_json(
    options: PlanOptions, solution: Solution, others: list[WhatIfAnswer], drawn: list[Path]
) -> str:
    changes = [
        {
            "change": one.change,
            "why_not": one.why_not,
            "answer": solution_json(one.solution) if one.solution else None,
        }
        for one in others
    ]
    more = {"explanation": explain_solution(solution)} if options.explain else {}
    return json.dumps(
        {**solution_json(solution), **more, "what_if": changes, "plots": list(map(str, drawn))}, indent=2
    )


def _check_outputs(options: PlanOptions) -> None:
    """Raises ConfigError where the answer could not be written, before it is looked for."""
    if options.out is not None:
        output_paths.require_writable(options.out, "--out")
    if options.plot is not None:
        require_extra("plan", "--plot", ", or leave out --plot")
        output_paths.make_output_folder(options.plot, "--plot")


def _write_plan(path: Path, solution: Solution, model: str) -> None:
    try:
        save_plan(path, make_plan_file(solution, model))
    except OSError as error:
        raise ConfigError(
            f"the plan cannot be written to {path}", error.strerror or str(error), "name another file"
        ) from error
