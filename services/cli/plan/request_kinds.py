"""Several kinds of request with an SLO each: `--kind` of `diptych plan` and `diptych simulate`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.workload.workload import Workload, WorkloadMix, describe_kinds, find_workload


class WorkloadKind(NamedTuple):
    """What a --kind says; without a workload of its own it is one of the kinds of a trace that another flag names."""

    name: str
    slo: Slo
    workload: str | None = None
    share: float = 1.0


def parse_kinds(texts: Sequence[str], attainment: float) -> list[WorkloadKind]:
    """What each --kind says; all have a workload of their own, or none.

    Raises ConfigError: one cannot be read, some have workloads and others have none, or one is named twice.
    """
    kinds = [_parse_kind(text, attainment) for text in texts]
    own = [kind for kind in kinds if kind.workload is not None]
    if own and len(own) < len(kinds):
        raise ConfigError(
            "kinds are given in two ways",
            f"{own[0].name} has a workload of its own, others are kinds of a trace",
            "give a workload and a share for each, or for none",
        )
    names = [kind.name for kind in kinds]
    if len(set(names)) < len(names):
        raise ConfigError("a kind is named twice", ", ".join(names), "give each --kind once")
    return kinds


def have_own_workloads(
    kinds: Sequence[WorkloadKind],
    *,
    workload: str | None,
    slo_ttft_ms: float | None,
    slo_tpot_ms: float | None,
    trace: Path | None = None,
) -> bool:
    """Whether kinds have workloads of their own. The other arguments are the values of the flags of these names.

    Raises ConfigError: they have, and one of these flags, which would then have no effect, was given too.
    """
    if not kinds or kinds[0].workload is None:
        return False
    unused = {
        "--slo-ttft-ms": slo_ttft_ms,
        "--slo-tpot-ms": slo_tpot_ms,
        "--workload": workload,
        "--trace": trace,
    }
    for flag, value in unused.items():
        if value is not None:
            raise ConfigError(f"{flag} has no effect", "each --kind names its own", "leave out one of them")
    return True


def mix_workloads(kinds: Sequence[WorkloadKind], within: int) -> tuple[WorkloadMix, dict[str, Workload]]:
    """Kinds with workloads of their own, without requests of more than `within` tokens; and these workloads, whole.

    Raises ConfigError: a workload cannot be used, or has no other requests.
    """
    whole = {kind.name: find_workload(kind.workload or "") for kind in kinds}
    parts = [(kind.name, kind.share, whole[kind.name].within(within), kind.slo) for kind in kinds]
    return WorkloadMix(parts), whole


def merged_kinds_note(counts: Counter[str], name: str) -> tuple[str, ...]:
    """The note for the user about a workload `name` whose several kinds are treated as one."""
    if len(counts) < 2:
        return ()
    parted = "--kind NAME=TTFT_MS:TPOT_MS parts those of a trace"
    return (f"{name}: all are taken as one kind, of {describe_kinds(counts)}; {parted}",)


def _parse_kind(text: str, attainment: float) -> WorkloadKind:
    name, equals, rest = text.partition("=")
    try:
        # Raises ValueError if the name is not valid Unicode.
        name.encode()
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
    return WorkloadKind(name, slo, own[0] if own else None, share)
