"""What the fleet serves at present: which pairs of workers, KV classes and lengths (pure)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from diptych.chunks import AUTO_CLASS
from diptych.messages import Hello
from router.routing.auto_class import AutoClasses, eligible_classes
from router.routing.pairs import Pair, PairList
from router.routing.policy import ANY_REQUEST, RoutingNeed, RoutingView, find_pairs
from router.workers.fleet import ROLES
from router.workers.kv_classes import (
    AnswerVersion,
    ServedClasses,
    can_evict,
    class_is_gone,
    classes_of,
    holds_class,
    keep_classes_of_pair,
    versions_of_pair,
)

# Most kinds of needs whose pairs are remembered.
MAX_REMEMBERED_KINDS = 256


@dataclass(slots=True)
class _FoundPairs:
    """What was found out about one version of the fleet: pairs by what they are for, and the versions of answers."""

    version: int = -1
    pairs: dict[tuple[object, ...], PairList] = field(default_factory=dict)
    answers: frozenset[AnswerVersion] | None = None


@dataclass(frozen=True, slots=True)
class FleetCapabilities:
    """What requests can ask of the workers that `view` shows. `auto` has the budget of the classes to choose among.

    What depends on nothing but the fleet is found once for each of its versions.
    """

    view: RoutingView
    auto: AutoClasses
    _found: _FoundPairs = field(default_factory=_FoundPairs, repr=False, compare=False)

    def find_pairs(self, need: RoutingNeed = ANY_REQUEST) -> PairList:
        """All pairs that could serve `need` now, whether or not they have room."""
        found = self._found_now()
        # All that `find_pairs` asks of a need.
        keeps = need.evicts, need.keep_rule
        kind = need.pools, need.bulk, need.kv_class, need.fingerprint, keeps, need.traits
        if (pairs := found.pairs.get(kind)) is None:
            if len(found.pairs) >= MAX_REMEMBERED_KINDS:
                found.pairs.clear()
            pairs = found.pairs[kind] = find_pairs(need, self.view)
        return pairs

    def served_versions(self) -> frozenset[AnswerVersion]:
        """The versions of answers that can be served now."""
        found = self._found_now()
        if found.answers is None:
            # Most workers are alike: one pair of each kind tells what all of them can.
            alike = {self._serving_kind(pair): pair for pair in self.find_pairs()}
            found.answers = frozenset(one for pair in alike.values() for one in self.versions_of(pair))
        return found.answers

    def _serving_kind(self, pair: Pair) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What the versions of a pair's answers depend on."""
        hellos = [self.view.fleet.workers[name].hello for name in pair if name is not None]
        return tuple((hello.fingerprint, tuple(classes_of(hello))) for hello in hellos)

    def _found_now(self) -> _FoundPairs:
        """What is remembered of the fleet as it is; empty if it has changed."""
        if self._found.version != self.view.fleet.version:
            self._found.version, self._found.answers = self.view.fleet.version, None
            self._found.pairs.clear()
        return self._found

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt plus answer, in tokens, that every serving worker can take.

        A worker that cannot serve yet (no link) does not lower the limit. While no worker serves, the longest that any
        fitting worker can take; None if there is none.
        """
        workers = self.view.fleet.workers
        serving: Set[str] = self.find_pairs().workers
        lengths = {name: worker_state.hello.max_model_len for name, worker_state in workers.items()}
        serving = serving or lengths.keys() - self.view.fleet.find_mismatches().keys()
        return min((lengths[name] for name in serving), default=max(lengths.values(), default=None))

    def versions_of(self, pair: Pair, kv_class: str | None = None) -> list[AnswerVersion]:
        """The versions of answers that a pair of members can generate; with a `kv_class`, in a class it names."""
        workers, (source, target) = self.view.fleet.workers, pair
        first = None if source is None else workers[source].hello
        return versions_of_pair(first, workers[target].hello, kv_class)

    def classes_of_pair(self, pair: Pair) -> list[str]:
        """The KV classes of answers that a pair can generate; a request that asks for none gets the first one."""
        return [version.kv_class for version in self.versions_of(pair)]

    @property
    def kv_classes(self) -> list[str]:
        """The KV classes that requests can be served with; while no pair can serve, those of all known workers."""
        served = {version.kv_class for version in self.served_versions()}
        known = {name for hello in self.view.fleet.known_hellos() for name in classes_of(hello)}
        return sorted(served or known)

    @property
    def served_classes(self) -> ServedClasses:
        """The KV classes that requests may ask for, those among which the router may choose, and those in which KV can
        be evicted.
        """
        return ServedClasses(
            self.kv_classes, self.auto_classes, self.keep_classes, self._default_class, self.keep_rules
        )

    @property
    def keep_classes(self) -> list[str]:
        """The KV classes in which pairs that can serve can evict; while no pair can serve, those of all known
        workers.
        """
        found = (keep_classes_of_pair(*pair) for pair in self._hellos_of_pairs())
        return sorted(set[str]().union(*found))

    @property
    def keep_rules(self) -> list[str]:
        """The rules by which all workers can evict that evict at all; while no pair can serve, of all known workers."""
        hellos = [one for pair in self._hellos_of_pairs() for one in pair if one is not None]
        rules = [one.keep_rules for one in hellos if one.keep_classes and one.keep_rules]
        return [rule for rule in rules[0] if all(rule in others for others in rules)] if rules else []

    @property
    def _default_class(self) -> str | None:
        """The class of a request that asks for none: an id, or `AUTO_CLASS`; None if workers differ."""
        found = {
            AUTO_CLASS if target.kv_auto else version.kv_class
            for source, target in self._hellos_of_pairs()
            for version in versions_of_pair(source, target)[:1]
        }
        return next(iter(found)) if len(found) == 1 else None

    def _hellos_of_pairs(self) -> list[tuple[Hello | None, Hello]]:
        """The hellos of all pairs that can serve; while none can, of all known workers, each by itself."""
        workers = self.view.fleet.workers
        return [
            (None if source is None else workers[source].hello, workers[target].hello)
            for source, target in self.find_pairs()
        ] or [(None, hello) for hello in self.view.fleet.known_hellos()]

    @property
    def auto_classes(self) -> list[str]:
        """The KV classes that the router may choose: those within the budget on a pair that can serve; while no pair
        can, those of all known workers.
        """
        found = (
            eligible_classes(source, target, self.auto.budget_pct)
            for source, target in self._hellos_of_pairs()
        )
        return sorted(set[str]().union(*found))

    def is_known(self, kv_class: str) -> bool:
        """Whether any worker has the class, or had it when it was lost."""
        if kv_class == AUTO_CLASS:
            return bool(self.auto_classes)
        return any(holds_class(hello, kv_class) for hello in self.view.fleet.known_hellos())

    def can_evict_somewhere(self, kv_class: str | None, rule: str) -> bool:
        """Whether workers of all roles that are needed can evict in the class by this rule, or could when they were
        lost.
        """
        able = {hello.role for hello in self.view.fleet.known_hellos() if can_evict(hello, kv_class, rule)}
        return able.issuperset(self.needed_roles)

    def can_continue_somewhere(self, traits: frozenset[str]) -> bool:
        """Whether workers of all roles that are needed have these traits, or had them when they were lost; or none that
        is known lacks them.
        """
        hellos = self.view.fleet.known_hellos()
        able = [hello.role for hello in hellos if traits.issubset(hello.traits)]
        return len(able) == len(hellos) or set(able).issuperset(self.needed_roles)

    @property
    def can_pool(self) -> bool:
        """Whether a worker that gets prompts to pool can do so, or could when it was lost; or none is known."""
        role = "prefill" if self.view.split else "decode"
        able = [hello.pools for hello in self.view.fleet.known_hellos() if hello.role == role]
        return not able or any(able)

    @property
    def needed_roles(self) -> tuple[str, ...]:
        """The roles without which no request can be served."""
        if self.view.only_pools:
            return ("prefill",)
        return ROLES if self.view.split and not self.view.allow_local_prefill else ("decode",)

    def is_class_gone(self, version: AnswerVersion | None) -> bool:
        """Whether no worker can come back that continues an answer of `version`, since its KV class was replaced."""
        return version is not None and class_is_gone(
            version, self.view.fleet.known_hellos(), self.needed_roles
        )
