"""The lives of workers that were lost: what is remembered of each, and for how long (pure).

A lost worker may come back. Then it counts how its life ended, and whether it is a life that another one has replaced.
Until then requests may wait for it. But most names come back soon or never: a replanner gives each new worker a new
name. So the workers that were lost last are remembered: `MAX_AWAY` of those that had drained, and of the others as many
as have been members at the same time, since all of these may be lost together.

A life that was forgotten is no danger when it returns. While another worker has its name, it waits like any second
worker of a name; and its messages about requests have an old epoch.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from diptych.messages import Hello

# Number of workers that are away and remembered, in the smallest fleet and of those that had drained.
MAX_AWAY = 8
# Number of replaced lives that are remembered per name.
MAX_REPLACED = 8


@dataclass(slots=True)
class _Name:
    """The last lost life of a name, whether it had drained, and the lives that were replaced before it."""

    hello: Hello
    drained: bool
    replaced: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_REPLACED))


class PreviousLives:
    """The last lost life of each worker, by name. `members` are the workers that are there, by name."""

    def __init__(self, members: Mapping[str, object]) -> None:
        self._members, self._max_members = members, 0
        # The name that was lost last comes last.
        self._names: OrderedDict[str, _Name] = OrderedDict()

    def __contains__(self, worker: str) -> bool:
        return worker in self._names

    def find_hello(self, worker: str) -> Hello | None:
        """The Hello of the last life of a name, as far as it is remembered."""
        name = self._names.get(worker)
        return None if name is None else name.hello

    def hellos_away(self) -> list[Hello]:
        """The last Hello of every worker that is remembered and not there, by name."""
        return [name.hello for worker, name in sorted(self._names.items()) if worker not in self._members]

    def is_replaced(self, hello: Hello) -> bool:
        """Whether another life of its name has begun after this one."""
        name = self._names.get(hello.worker)
        return name is not None and hello.incarnation in name.replaced

    def begin_life(self, hello: Hello) -> None:
        """A life begins: it replaces the one that was lost before it, unless it is the same."""
        name = self._names.get(hello.worker)
        if name is not None and name.hello.incarnation != hello.incarnation:
            name.replaced.append(name.hello.incarnation)

    def mark_seen(self, worker: str) -> None:
        """A worker that is away has sent a message: it is remembered as if it had just been lost."""
        if worker in self._names:
            self._names.move_to_end(worker)

    def end_life(self, hello: Hello, drained: bool) -> list[str]:
        """A worker is lost, and no member any more. Returns the names that are forgotten now."""
        self._max_members = max(self._max_members, 1 + len(self._members))
        name = self._names.setdefault(hello.worker, _Name(hello, drained))
        name.hello, name.drained = hello, drained
        self._names.move_to_end(hello.worker)
        away = [worker for worker in self._names if worker not in self._members]
        drained_away = [worker for worker in away if self._names[worker].drained]
        forgotten = drained_away[: max(0, len(away) - MAX_AWAY)]
        kept = [worker for worker in away if worker not in forgotten]
        forgotten += kept[: max(0, len(kept) - max(MAX_AWAY, self._max_members))]
        for worker in forgotten:
            del self._names[worker]
        return forgotten
