"""The traffic that `diptych plan` plans for, from its flags: what comes, and what each kind of it is promised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diptych.errors import ConfigError
from planner.shape import Shape
from planner.terms import Slo
from planner.workload import Mix, Source, Workload, named
from services.cli.kinds import Kind, bring_their_own, kinds, mixed, together
from services.cli.plan_options import DEFAULT_WORKLOAD


class Traffic(NamedTuple):
    """`notes` are what a reader should know: requests that are left out, kinds that are taken together."""

    source: Source
    slos: Mapping[str, Slo]
    name: str
    notes: tuple[str, ...]


def traffic(options: Mapping[str, Any], shape: Shape) -> Traffic:
    """`options` by the names of their flags; `shape` is the model that takes the requests.

    Raises ConfigError: an objective or a kind cannot be read or is for nothing, or the workload cannot be used.
    """
    found = kinds(options["kind"] or [], options["attainment"])
    if not found:
        return _single(options, shape)
    return (
        _mixed(found, options, shape) if bring_their_own(found, options) else _of_trace(found, options, shape)
    )


def _single(options: Mapping[str, Any], shape: Shape) -> Traffic:
    slo, name = _slo(options), options["workload"] or DEFAULT_WORKLOAD
    whole = named(name)
    held = whole.within(shape.max_len)
    notes = (*_left_out(whole, name, shape), *together(held.kinds(), name))
    return Traffic(held.fitted() if options["fit"] else held, {"": slo}, name, notes)


def _of_trace(found: Sequence[Kind], options: Mapping[str, Any], shape: Shape) -> Traffic:
    """Each named kind of the trace with its objective, all others under the one that is given for all."""
    slos = {kind.name: kind.slo for kind in found}
    if options["slo_ttft_ms"] is not None or options["slo_tpot_ms"] is not None:
        slos[""] = _slo(options)
    name = options["workload"] or DEFAULT_WORKLOAD
    workload = named(name)
    mix = Mix.of(workload, slos, shape.max_len)
    source = mix.fitted() if options["fit"] else mix
    return Traffic(source, mix.slos, name, _left_out(workload, name, shape))


def _mixed(found: Sequence[Kind], options: Mapping[str, Any], shape: Shape) -> Traffic:
    """Kinds with workloads of their own."""
    mix, whole = mixed(found, shape.max_len)
    notes = [
        note
        for name, workload in whole.items()
        for note in (*_left_out(workload, name, shape), *together(mix.workloads[name].kinds(), name))
    ]
    return Traffic(mix.fitted() if options["fit"] else mix, mix.slos, ", ".join(mix.slos), tuple(notes))


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


def _left_out(workload: Workload, name: str, shape: Shape) -> tuple[str, ...]:
    """What is told of requests that are longer than the model's context: a server refuses them."""
    found = workload.longer(shape.max_len)
    if not found.longer:
        return ()
    context = f"the context of {shape.name}, {shape.max_len:,} tokens"
    return (f"{name}: {found} are longer than {context}, and are left out",)
