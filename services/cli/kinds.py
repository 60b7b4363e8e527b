"""Several kinds of request with a promise each: `--kind` of `diptych plan` and `diptych simulate`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diptych.errors import ConfigError
from planner.terms import Slo
from planner.workload import Mix, Workload, listed, named


class Kind(NamedTuple):
    """What a --kind says; without a workload of its own it is one of the kinds of a trace that another flag names."""

    name: str
    slo: Slo
    workload: str | None = None
    share: float = 1.0


def kinds(texts: Sequence[str], attainment: float) -> list[Kind]:
    """What each --kind says; all have a workload of their own, or none.

    Raises ConfigError: one cannot be read, some have workloads and others have none, or one is named twice.
    """
    found = [_kind(text, attainment) for text in texts]
    own = [kind for kind in found if kind.workload is not None]
    if own and len(own) < len(found):
        raise ConfigError(
            "kinds are given in two ways",
            f"{own[0].name} has a workload of its own, others are kinds of a trace",
            "give a workload and a share for each, or for none",
        )
    names = [kind.name for kind in found]
    if len(set(names)) < len(names):
        raise ConfigError("a kind is named twice", ", ".join(names), "give each --kind once")
    return found


def bring_their_own(found: Sequence[Kind], options: Mapping[str, Any]) -> bool:
    """Whether kinds have workloads of their own.

    Raises ConfigError: they have, and a flag would be for none of them.
    """
    if not found or found[0].workload is None:
        return False
    for name in ("slo_ttft_ms", "slo_tpot_ms", "workload", "trace"):
        if options.get(name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect", "each --kind names its own", "leave out one of them")
    return True


def mixed(found: Sequence[Kind], within: int) -> tuple[Mix, dict[str, Workload]]:
    """Kinds with workloads of their own, without requests of more than `within` tokens; and these workloads, whole.

    Raises ConfigError: a workload cannot be used, or has no other requests.
    """
    whole = {kind.name: named(kind.workload or "") for kind in found}
    parts = [(kind.name, kind.share, whole[kind.name].within(within), kind.slo) for kind in found]
    return Mix(parts), whole


def together(counts: Counter[str], name: str) -> tuple[str, ...]:
    """What is told of a workload `name` of several kinds that are taken as one."""
    if len(counts) < 2:
        return ()
    parted = "--kind NAME=TTFT_MS:TPOT_MS parts those of a trace"
    return (f"{name}: all are taken as one kind, of {listed(counts)}; {parted}",)


def _kind(text: str, attainment: float) -> Kind:
    name, equals, rest = text.partition("=")
    try:
        name.encode()  # no text if it is no Unicode
        *own, ttft_ms, tpot_ms = rest.rsplit(":", 3)
        if len(own) not in (0, 2):
            raise ValueError
        share = float(own[1]) if own else 1.0
        slo = Slo(float(ttft_ms) / 1e3, float(tpot_ms) / 1e3, attainment)
        if not (name and equals and all(0.0 < one < math.inf for one in (share, slo.ttft_s, slo.tpot_s))):
            raise ValueError
    except ValueError:
        readable = text.encode(errors="replace").decode()
        raise ConfigError(
            f"--kind {readable} cannot be read",
            "it is NAME=WORKLOAD:SHARE:TTFT_MS:TPOT_MS, or of a trace's kinds NAME=TTFT_MS:TPOT_MS",
            "chat=sharegpt:0.7:250:100",
        ) from None
    return Kind(name, slo, own[0] if own else None, share)
