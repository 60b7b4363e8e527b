"""What `diptych simulate` serves: a trace as it was, or samples of workloads, and the SLO of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from diptych.errors import ConfigError
from diptych.slo import DEFAULT_ATTAINMENT, Slo, Slos, read_slo
from planner.sim.exact.deployment import SimDeployment
from planner.types import Job
from planner.workload.kv_mix import class_shares, draw_classes
from planner.workload.traces import read_trace
from planner.workload.workload import (
    JobSource,
    OverlongCount,
    Workload,
    WorkloadMix,
    drop_overlong,
    find_workload,
    rescale_arrivals,
)
from services.cli.plan.kv_mix import choose_kv_mix, class_resolver
from services.cli.plan.request_kinds import (
    WorkloadKind,
    have_own_workloads,
    merged_kinds_note,
    mix_workloads,
    parse_kinds,
)
from services.cli.simulate.deployment import class_profile
from services.cli.simulate.options import SimulateOptions

# Least and greatest rate in requests per second. Beyond them floats cannot represent the arrival times.
MIN_RATE, MAX_RATE = 1e-6, 1e6
# Key of the number of requests that were left out, if kinds have no workloads of their own.
ALL_KINDS = ""


class SimulatedRequests(NamedTuple):
    """What is served, how many requests were left out of each workload (by kind, or of `ALL_KINDS`), whether
    prompts name what they begin with, and notes for the user.
    """

    samples: Iterable[list[Job]]
    left_out: Mapping[str, OverlongCount]
    prefixes: bool
    notes: tuple[str, ...]
    # The share of each class of KV in the trace that is replayed or drawn from.
    kv_shares: Mapping[str, float] = {}


def slo_by_kind(options: SimulateOptions) -> dict[str, Slo]:
    """The SLO of each kind of request. "" is the default; with kinds it exists only if its flags were given.

    Raises ConfigError: a kind cannot be read, or an SLO is not above 0, or infinite.
    """
    found = {kind.name: kind.slo for kind in _parse_kinds(options)}
    common = read_slo(options.slo_ttft_ms, options.slo_tpot_ms)
    if not found or common.has_limits:
        found[""] = common
    return found


def read_requests(options: SimulateOptions, slos: Slos, context: int) -> SimulatedRequests:
    """The requests to simulate, without those of more than `context` tokens, which a server refuses.

    Raises:
        ConfigError: flags contradict each other, a trace or a workload cannot be used, or nothing of it fits, or
            some requests have no SLO where others have one.
    """
    trace, rate, kinds = options.trace, options.rate, _parse_kinds(options)
    own = have_own_workloads(
        kinds,
        workload=options.workload,
        slo_ttft_ms=options.slo_ttft_ms,
        slo_tpot_ms=options.slo_tpot_ms,
        trace=trace,
    )
    if not own and (trace is None) == (options.workload is None):
        why = "requests come from a trace as they were, or are drawn from a workload"
        fix = "--workload FILE --rate 4, with kinds" if kinds else "--workload sharegpt --rate 4"
        raise ConfigError("give --trace or --workload", why, fix)
    if rate is not None and not MIN_RATE <= rate <= MAX_RATE:
        why = f"rates are from {MIN_RATE:.0e} to {MAX_RATE:.0e}"
        raise ConfigError(f"a rate of {rate} requests a second", why, "give another")
    own_slos = slos if kinds else {}
    if trace is not None:
        requests = _replay_trace(trace, options, own_slos, context)
    elif rate is None:
        raise ConfigError("--rate is missing", "a workload says what comes, not how often", "add --rate 4")
    elif own:
        requests = _draw_mix(kinds, options, rate, context)
    else:
        assert options.workload is not None
        requests = _draw_workload(options.workload, options, rate, own_slos, context)
    unused = {"enable_prefix_caching": "--[no-]enable-prefix-caching", "kv_host_bytes": "--kv-host-bytes"}
    for name, flag in unused.items():
        if name in options.given and not requests.prefixes:
            why = "no request says which text it begins with"
            fix = "leave it out, or take a trace that names prefixes (Mooncake's, or a request log)"
            raise ConfigError(f"{flag} has no effect here", why, fix)
    return requests


def _parse_kinds(options: SimulateOptions) -> list[WorkloadKind]:
    return parse_kinds(options.kind, DEFAULT_ATTAINMENT)


def _replay_trace(trace: Path, options: SimulateOptions, slos: Slos, context: int) -> SimulatedRequests:
    """The trace itself, each request with the name of its kind if that has an SLO in `slos`."""
    if unused := sorted({"cv", "requests", "seeds"} & options.given):
        why = "a trace is replayed once, as it was"
        fix = "use --workload FILE to draw from it"
        raise ConfigError(f"--{unused[0]} has no effect with --trace", why, fix)
    every, rate = read_trace(trace), options.rate
    if slos:
        # Raises an error for SLOs of kinds that are not in the trace, and for kinds without an SLO.
        WorkloadMix.of(Workload.of(every), slos, context)
    jobs = drop_overlong(every, context)
    notes = () if slos else merged_kinds_note(Counter(job.kind for job in jobs), str(trace))
    left = OverlongCount(len(every) - len(jobs), len(every), False)
    jobs = [job if job.kind in slos or not job.kind else replace(job, kind="") for job in jobs]
    shares = any(job.prefix for job in jobs)
    return SimulatedRequests(
        [jobs if rate is None else rescale_arrivals(jobs, rate)],
        {ALL_KINDS: left},
        shares,
        notes,
        class_shares(jobs),
    )


def _draw_workload(
    name: str, options: SimulateOptions, rate: float, slos: Slos, context: int
) -> SimulatedRequests:
    """Samples of the workload `name` at `rate` requests per second, by the kinds that have SLOs in `slos`."""
    asked = find_workload(name)
    left = {ALL_KINDS: asked.longer(context)}
    if slos:
        mix = WorkloadMix.of(asked, slos, context)
        samples = _draw_samples(mix, options, rate)
        return SimulatedRequests(samples, left, _shares_prefixes(mix), (), class_shares(asked.jobs))
    held = asked.within(context)
    notes = merged_kinds_note(held.kinds(), name)
    samples = _draw_samples(held, options, rate)
    return SimulatedRequests(samples, left, held.shares, notes, class_shares(held.jobs))


def _draw_mix(
    kinds: list[WorkloadKind], options: SimulateOptions, rate: float, context: int
) -> SimulatedRequests:
    """Samples of the kinds' own workloads, mixed by their shares, at `rate` requests per second."""
    mix, whole = mix_workloads(kinds, context)
    notes = [note for name, one in mix.workloads.items() for note in merged_kinds_note(one.kinds(), name)]
    left = {name: workload.longer(context) for name, workload in whole.items()}
    shares = class_shares(job for workload in mix.workloads.values() for job in workload.jobs)
    samples = _draw_samples(mix, options, rate)
    return SimulatedRequests(samples, left, _shares_prefixes(mix), tuple(notes), shares)


def with_kv_classes(
    requests: SimulatedRequests, options: SimulateOptions, deployment: SimDeployment
) -> tuple[SimulatedRequests, dict[str, float]]:
    """The requests with the class of KV of each, and the share of each class. Without several classes none is named.

    A trace that is replayed keeps its classes, unless --kv-mix says otherwise.

    Raises:
        ConfigError: as `services.cli.plan.kv_mix.choose_kv_mix`.
    """
    classes, profile = deployment.kv_classes, class_profile(options)
    mix = choose_kv_mix(options.kv_mix, classes, profile, requests.kv_shares)
    if not classes:
        named = sorted(name for name in requests.kv_shares if name)
        note = f"the trace names KV of the classes {' and '.join(named)}; here all KV is {options.kv_cache_codec}"
        return requests._replace(notes=(*requests.notes, *([note] if len(named) > 1 else []))), mix
    resolve = class_resolver(classes, profile, "the trace")

    def classed(seed: int, jobs: list[Job]) -> list[Job]:
        if options.trace is not None and options.kv_mix is None:
            return [replace(job, kv_class=resolve(job.kv_class)) for job in jobs]
        return list(draw_classes(jobs, mix, seed))

    samples = (classed(seed, jobs) for seed, jobs in enumerate(requests.samples))
    return requests._replace(samples=samples), mix


def _draw_samples(source: JobSource, options: SimulateOptions, rate: float) -> Iterator[list[Job]]:
    return (source.sample(options.requests, rate, seed, options.cv) for seed in range(options.seeds))


def _shares_prefixes(mix: WorkloadMix) -> bool:
    """Whether prompts of any kind name their prefixes."""
    return any(workload.shares for workload in mix.workloads.values())
