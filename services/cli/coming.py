"""What `diptych simulate` serves: a trace as it was, or samples of workloads, and what each kind of it is promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from diptych.errors import ConfigError
from planner.terms import Job, Slo
from planner.traces import read_trace
from planner.workload import Long, Mix, Source, Workload, named, scaled, short_enough
from services.cli.kinds import Kind, bring_their_own, kinds, mixed, together
from services.cli.simulated import seconds

LEAST_RATE, MOST_RATE = 1e-6, 1e6  # requests a second: with fewer, or more, times fit no float
ALL = ""  # whose requests were left out, if kinds have no workloads of their own


class Coming(NamedTuple):
    """What is served, how many requests were left out of each workload (by kind, or of `ALL`), whether prompts name
    what they begin with, and what a reader should know besides.
    """

    samples: Iterable[list[Job]]
    left_out: Mapping[str, Long]
    prefixes: bool
    notes: tuple[str, ...]


def promises(options: Mapping[str, Any]) -> dict[str, Slo]:
    """By kind, with "" for all that are not named; where kinds are, there is that only if it was said.

    Raises ConfigError: a kind cannot be read, or an objective is no time.
    """
    found = {kind.name: kind.slo for kind in _kinds(options)}
    given = [options[name] for name in ("slo_ttft_ms", "slo_tpot_ms")]
    if not found or any(value is not None for value in given):
        found[""] = Slo(*map(seconds, given))
    return found


def coming(
    options: Mapping[str, Any], given: Collection[str], slos: Mapping[str, Slo], context: int
) -> Coming:
    """What is served, without requests of more than `context` tokens: a server refuses them.

    Raises:
        ConfigError: flags contradict each other, a trace or a workload cannot be used, or nothing of it fits, or
            requests are of no kind that has a promise where others have one.
    """
    trace, rate, found = options["trace"], options["rate"], _kinds(options)
    own = bring_their_own(found, options)
    if not own and (trace is None) == (options["workload"] is None):
        why = "requests come from a trace as they were, or are drawn from a workload"
        fix = "--workload FILE --rate 4, with kinds" if found else "--workload sharegpt --rate 4"
        raise ConfigError("give --trace or --workload", why, fix)
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
        why = f"rates are from {LEAST_RATE:.0e} to {MOST_RATE:.0e}"
        raise ConfigError(f"a rate of {rate} requests a second", why, "give another")
    promised = slos if found else {}
    if trace is not None:
        comes = _replayed(options, given, promised, context)
    elif rate is None:
        raise ConfigError("--rate is missing", "a workload says what comes, not how often", "add --rate 4")
    else:
        comes = _mixed(options, found, context) if own else _drawn(options, promised, context)
    if "enable_prefix_caching" in given and not comes.prefixes:
        why = "no request says which text it begins with"
        fix = "leave it out, or take a trace that names prefixes (Mooncake's, or a request log)"
        raise ConfigError("--[no-]enable-prefix-caching has no effect here", why, fix)
    return comes


def _kinds(options: Mapping[str, Any]) -> list[Kind]:
    return kinds(options["kind"] or [], Slo().attainment)


def _replayed(
    options: Mapping[str, Any], given: Collection[str], slos: Mapping[str, Slo], context: int
) -> Coming:
    """The trace itself, each request with the name of its kind if that has a promise in `slos`."""
    if unused := sorted({"cv", "requests", "seeds"} & set(given)):
        why = "a trace is replayed once, as it was"
        fix = "use --workload FILE to draw from it"
        raise ConfigError(f"--{unused[0]} has no effect with --trace", why, fix)
    every, rate = read_trace(options["trace"]), options["rate"]
    if slos:
        Mix.of(Workload.of(every), slos, context)  # refuses kinds that are not there, or under no promise
    jobs = short_enough(every, context)
    notes = () if slos else together(Counter(job.kind for job in jobs), str(options["trace"]))
    left = Long(len(every) - len(jobs), len(every), False)
    jobs = [job if job.kind in slos or not job.kind else replace(job, kind="") for job in jobs]
    shares = any(job.prefix for job in jobs)
    return Coming([jobs if rate is None else scaled(jobs, rate)], {ALL: left}, shares, notes)


def _drawn(options: Mapping[str, Any], slos: Mapping[str, Slo], context: int) -> Coming:
    """One workload, by the kinds that have promises in `slos`."""
    asked = named(options["workload"])
    left = {ALL: asked.longer(context)}
    if slos:
        mix = Mix.of(asked, slos, context)
        return Coming(_samples(mix, options), left, _share(mix), ())
    held = asked.within(context)
    notes = together(held.kinds(), options["workload"])
    return Coming(_samples(held, options), left, held.shares, notes)


def _mixed(options: Mapping[str, Any], found: list[Kind], context: int) -> Coming:
    """Workloads of several kinds."""
    mix, whole = mixed(found, context)
    notes = [note for name, one in mix.workloads.items() for note in together(one.kinds(), name)]
    left = {name: workload.longer(context) for name, workload in whole.items()}
    return Coming(_samples(mix, options), left, _share(mix), tuple(notes))


def _samples(source: Source, options: Mapping[str, Any]) -> Iterator[list[Job]]:
    count, pace, cv = options["requests"], float(options["rate"]), options["cv"]
    return (source.sample(count, pace, seed, cv) for seed in range(options["seeds"]))


def _share(mix: Mix) -> bool:
    """Whether prompts of any kind name what they begin with."""
    return any(workload.shares for workload in mix.workloads.values())
