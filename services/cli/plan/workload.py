"""The traffic that `diptych plan` plans for, from its flags: requests, and the SLO of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diptych.errors import ConfigError
from diptych.slo import Slo, Slos, read_slo
from planner.costs.model import ModelDims
from planner.workload.kv_mix import class_shares
from planner.workload.workload import JobSource, Workload, WorkloadMix, find_workload
from services.cli.plan.options import DEFAULT_WORKLOAD, PlanOptions
from services.cli.plan.request_kinds import (
    WorkloadKind,
    have_own_workloads,
    merged_kinds_note,
    mix_workloads,
    parse_kinds,
)


class PlanWorkload(NamedTuple):
    """`notes` are what the user should know: requests that are left out, kinds that are taken together.

    `kv_shares` is the share of each class of KV in the trace that is drawn from; empty without one.
    """

    source: JobSource
    slos: Slos
    name: str
    notes: tuple[str, ...]
    kv_shares: Mapping[str, float]


def read_workload(options: PlanOptions, dims: ModelDims) -> PlanWorkload:
    """The requests to plan for, and their SLOs. `dims` is the model that serves them.

    Raises ConfigError: an SLO or a kind cannot be read or is for no request, or the workload cannot be used.
    """
    slo = read_slo(options.slo_ttft_ms, options.slo_tpot_ms, options.attainment)
    kinds = parse_kinds(options.kind, options.attainment)
    if not kinds:
        return _single_kind(options, slo, dims)
    own = have_own_workloads(
        kinds,
        workload=options.workload,
        slo_ttft_ms=options.slo_ttft_ms,
        slo_tpot_ms=options.slo_tpot_ms,
    )
    return _kinds_with_workloads(kinds, options, dims) if own else _kinds_of_trace(kinds, slo, options, dims)


def _single_kind(options: PlanOptions, slo: Slo, dims: ModelDims) -> PlanWorkload:
    if not slo.has_limits:
        raise ConfigError(
            "no SLO is given",
            "without one every rate is good",
            "such as --slo-ttft-ms 500 --slo-tpot-ms 50",
        )
    name = options.workload or DEFAULT_WORKLOAD
    whole = find_workload(name)
    held = whole.within(dims.max_len)
    notes = (*_left_out_notes(whole, name, dims), *merged_kinds_note(held.kinds(), name))
    source = held.fitted() if options.fit else held
    return PlanWorkload(source, {"": slo}, name, notes, class_shares(held.jobs))


def _kinds_of_trace(
    kinds: Sequence[WorkloadKind], slo: Slo, options: PlanOptions, dims: ModelDims
) -> PlanWorkload:
    """Each named kind of the trace with its SLO, all other requests with the default `slo`."""
    slos = {kind.name: kind.slo for kind in kinds} | ({"": slo} if slo.has_limits else {})
    name = options.workload or DEFAULT_WORKLOAD
    workload = find_workload(name)
    mix = WorkloadMix.of(workload, slos, dims.max_len)
    source = mix.fitted() if options.fit else mix
    notes = _left_out_notes(workload, name, dims)
    return PlanWorkload(source, mix.slos, name, notes, class_shares(workload.jobs))


def _kinds_with_workloads(
    kinds: Sequence[WorkloadKind], options: PlanOptions, dims: ModelDims
) -> PlanWorkload:
    """Kinds with workloads of their own."""
    mix, whole = mix_workloads(kinds, dims.max_len)
    notes = [
        note
        for name, workload in whole.items()
        for note in (
            *_left_out_notes(workload, name, dims),
            *merged_kinds_note(mix.workloads[name].kinds(), name),
        )
    ]
    shares = class_shares(job for workload in mix.workloads.values() for job in workload.jobs)
    source = mix.fitted() if options.fit else mix
    return PlanWorkload(source, mix.slos, ", ".join(mix.slos), tuple(notes), shares)


def _left_out_notes(workload: Workload, name: str, dims: ModelDims) -> tuple[str, ...]:
    """The notes for the user about requests that exceed the model's context; a server refuses them."""
    found = workload.longer(dims.max_len)
    if not found.longer:
        return ()
    context = f"the context of {dims.name}, {dims.max_len:,} tokens"
    return (f"{name}: {found} are longer than {context}, and are left out",)
