"""`--kv-mix` of `diptych plan` and `diptych simulate`: which share of the requests asks for which class of KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from diptych.errors import ConfigError
from planner.costs.kv.classes import find_class
from planner.costs.profile import CostProfile
from planner.types import KvClass

# How far shares may be from 1 in all.
ROUNDING = 1e-3
EXAMPLE = "--kv-mix raw=0.7,nuq4-1%=0.3"


def choose_kv_mix(
    text: str | None, classes: Sequence[KvClass], profile: CostProfile, traced: Mapping[str, float]
) -> dict[str, float]:
    """The share of the requests for each of `classes`; empty if there are none, since all KV is then of one class.

    Args:
        text: the value of the flag; None: not given. Then the shares are those of the trace.
        traced: the share of each class in a trace, by any name of its codec; "" asks for none and gets the first one.

    Raises:
        ConfigError: the flag cannot be read or has no effect, or it or the trace names a class that there is not.
    """
    if not classes:
        if text is not None:
            why = "all requests get the one class that there is"
            raise ConfigError(
                "--kv-mix has no effect here", why, "name several: --kv-cache-codec raw:0.25,nuq4-1%"
            )
        return {}
    asked = traced if text is None else _parse_shares(text)
    where = "the trace" if text is None else "--kv-mix"
    mix = dict.fromkeys((one.name for one in classes), 0.0)
    for name, share in asked.items():
        mix[resolve_class(name, classes, profile, where)] += share
    if not sum(mix.values()):
        mix[classes[0].name] = 1.0
    return {name: share for name, share in mix.items() if share}


def resolve_class(name: str, classes: Sequence[KvClass], profile: CostProfile, where: str) -> str:
    """The one of `classes` that a name means; "" is the first. `where` the name stands is for the error.

    Raises:
        ConfigError: there is no such class.
    """
    found = find_class(profile, classes, name) if name else classes[0].name
    if found is None:
        known = " and ".join(one.name for one in classes)
        raise ConfigError(
            f"{where} names the KV class {name}",
            f"--kv-cache-codec has {known}",
            f"name it there too, or say which shares the classes have: {EXAMPLE}",
        )
    return found


def class_resolver(classes: Sequence[KvClass], profile: CostProfile, where: str) -> Callable[[str], str]:
    """`resolve_class` for the many requests of a trace."""

    @cache
    def resolve(name: str) -> str:
        return resolve_class(name, classes, profile, where)

    return resolve


def _parse_shares(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().rpartition("=")
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not name or not 0.0 <= value <= 1.0 or name in shares:
            why = f"{part.strip()!r} is not a class with a share from 0 to 1, or names a class twice"
            raise ConfigError(f"--kv-mix {text} cannot be read", why, f"such as {EXAMPLE}")
        shares[name] = value
    if abs(sum(shares.values()) - 1.0) > ROUNDING:
        why = f"its shares add up to {sum(shares.values()):g}"
        raise ConfigError(
            f"--kv-mix {text} cannot be read", why, "give every class its share of all requests"
        )
    return shares
