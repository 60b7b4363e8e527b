"""Rounds in which a benchmark measures several deployments one after the other, on the same prompts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

from benchmarks.load.deployment import ServedDeployment

Result = TypeVar("Result")
Measure = Callable[[ServedDeployment], Awaitable[Result]]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects now, and not again until the end: a collection by the client would delay the stamps of its events."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def measure_rounds(
    deployments: Mapping[str, ServedDeployment], rounds: int, prepare_round: Callable[[], Measure[Result]]
) -> dict[str, list[Result]]:
    """The results of each deployment, one for each round.

    A round measures one deployment while the others are idle. The order rotates by one from round to round. One round
    more comes first, as a warm-up that does not count.

    Args:
        deployments: by name.
        rounds: how many count.
        prepare_round: chooses the prompts of a round; what it returns measures one deployment with them.
    """
    results: dict[str, list[Result]] = {name: [] for name in deployments}
    names = list(deployments)
    for number in range(rounds + 1):
        measure = prepare_round()
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with no_garbage_collection():
                result = await measure(deployments[name])
            deployments[name].rest()
            if number:
                results[name].append(result)
    return results
