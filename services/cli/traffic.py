"""The traffic that `diptych plan` plans for, from its flags: what comes, and what each kind of it is promised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diptych.errors import ConfigError
from planner.shape import Shape
from planner.terms import Slo
from planner.workload import Mix, Source, Workload, listed, named
from services.cli.plan_options import DEFAULT_WORKLOAD


class Traffic(NamedTuple):
    """`notes` are what a reader should know: requests that are left out, kinds that are taken together."""

    source: Source
    slos: Mapping[str, Slo]
    name: str
    notes: tuple[str, ...]


class Kind(NamedTuple):
    """What a --kind says; without a workload of its own it is one of the kinds of --workload's trace."""

    name: str
    slo: Slo
    workload: str | None = None
    share: float = 1.0


def traffic(options: Mapping[str, Any], shape: Shape) -> Traffic:
    """`options` by the names of their flags; `shape` is the model that takes the requests.

    Raises ConfigError: an objective or a kind cannot be read or is for nothing, or the workload cannot be used.
    """
    kinds = [_kind(text, options["attainment"]) for text in options["kind"] or []]
    own = [kind for kind in kinds if kind.workload is not None]
    if own and len(own) < len(kinds):
        raise ConfigError(
            "kinds are given in two ways",
            f"{own[0].name} has a workload of its own, others are kinds of --workload's trace",
            "give a workload and a share for each, or for none",
        )
    if own:
        return _mixed(own, options, shape)
    return _of_trace(kinds, options, shape) if kinds else _single(options, shape)


def _single(options: Mapping[str, Any], shape: Shape) -> Traffic:
    slo, name = _slo(options), options["workload"] or DEFAULT_WORKLOAD
    workload, notes = _as_one(named(name), name, shape)
    return Traffic(workload.fitted() if options["fit"] else workload, {"": slo}, name, notes)


def _of_trace(kinds: Sequence[Kind], options: Mapping[str, Any], shape: Shape) -> Traffic:
    """Each named kind of the trace with its objective, all others under the one that is given for all."""
    slos = {kind.name: kind.slo for kind in kinds}
    if len(slos) < len(kinds):
        raise ConfigError(
            "a kind is named twice", ", ".join(kind.name for kind in kinds), "give each --kind once"
        )
    if options["slo_ttft_ms"] is not None or options["slo_tpot_ms"] is not None:
        slos[""] = _slo(options)
    name = options["workload"] or DEFAULT_WORKLOAD
    workload = named(name)
    mix = Mix.of(workload, slos, shape.max_len)
    source = mix.fitted() if options["fit"] else mix
    return Traffic(source, mix.slos, name, _left_out(workload, name, shape))


def _mixed(kinds: Sequence[Kind], options: Mapping[str, Any], shape: Shape) -> Traffic:
    """Kinds with workloads of their own."""
    useless = [name for name in ("slo_ttft_ms", "slo_tpot_ms", "workload") if options[name] is not None]
    if useless:
        raise ConfigError(
            f"--{useless[0].replace('_', '-')} has no effect",
            "each --kind names its own",
            "leave out one of them",
        )
    held = [_as_one(named(kind.workload or ""), kind.name, shape) for kind in kinds]
    mix = Mix([(kind.name, kind.share, one, kind.slo) for kind, (one, _) in zip(kinds, held, strict=True)])
    notes = tuple(note for _, told in held for note in told)
    return Traffic(mix.fitted() if options["fit"] else mix, mix.slos, ", ".join(mix.slos), notes)


def _slo(options: Mapping[str, Any]) -> Slo:
    """The objective of all that have none of their own."""
    given = {name: options[name] for name in ("slo_ttft_ms", "slo_tpot_ms")}
    for name, value_ms in given.items():
        if value_ms is not None and not 0.0 < value_ms < math.inf:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value_ms:g} is not possible", "it is a time", "above 0"
            )
    if all(value_ms is None for value_ms in given.values()):
        raise ConfigError(
            "no objective is given",
            "without one every rate is good",
            "such as --slo-ttft-ms 500 --slo-tpot-ms 50",
        )
    ttft_s, tpot_s = (math.inf if value_ms is None else value_ms / 1e3 for value_ms in given.values())
    return Slo(ttft_s, tpot_s, options["attainment"])


def _as_one(workload: Workload, name: str, shape: Shape) -> tuple[Workload, tuple[str, ...]]:
    """The requests that the model's context takes, as one kind, and what is told of that.

    Raises ConfigError: the context takes none.
    """
    held, notes = workload.within(shape.max_len), _left_out(workload, name, shape)
    kinds = held.kinds()
    if len(kinds) > 1:
        parted = "--kind NAME=TTFT_MS:TPOT_MS parts those of --workload"
        notes = (*notes, f"{name}: all are planned for as one kind, of {listed(kinds)}; {parted}")
    return held, notes


def _left_out(workload: Workload, name: str, shape: Shape) -> tuple[str, ...]:
    """What is told of requests that are longer than the model's context: a server refuses them."""
    found = workload.longer(shape.max_len)
    if not found.longer:
        return ()
    context = f"the context of {shape.name}, {shape.max_len:,} tokens"
    return (f"{name}: {found} are longer than {context}, and are left out",)


def _kind(text: str, attainment: float) -> Kind:
    name, equals, rest = text.partition("=")
    try:
        *own, ttft_ms, tpot_ms = rest.rsplit(":", 3)
        if len(own) not in (0, 2):
            raise ValueError
        share = float(own[1]) if own else 1.0
        slo = Slo(float(ttft_ms) / 1e3, float(tpot_ms) / 1e3, attainment)
        if not (name and equals and all(0.0 < one < math.inf for one in (share, slo.ttft_s, slo.tpot_s))):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--kind {text} cannot be read",
            "it is NAME=WORKLOAD:SHARE:TTFT_MS:TPOT_MS, or of --workload's trace NAME=TTFT_MS:TPOT_MS",
            "chat=sharegpt:0.7:250:100",
        ) from None
    return Kind(name, slo, own[0] if own else None, share)
