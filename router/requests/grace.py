"""Decides whether queued requests wait for lost workers to come back, or fail, and says why (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from diptych.failure_statuses import RequestFailure
from router.requests.failure_policy import NO_WORKERS, NOT_CONTINUABLE
from router.requests.request_state import RequestKind, RequestState
from router.routing.capabilities import FleetCapabilities
from router.routing.policy import ANY_POOLED
from router.workers.kv_classes import (
    AnswerVersion,
    can_evict,
    describe_classes,
    have_shared_class,
    names_class,
)


class WorkerGrace:
    """Remembers when answers of each version (model, KV class) could last be served. Never: no reason to wait."""

    def __init__(self, patience_s: float, capabilities: FleetCapabilities) -> None:
        self.patience_s, self.capabilities, self.view = patience_s, capabilities, capabilities.view
        self._seen_s: dict[AnswerVersion, float] = {}
        # When a worker that pools could last serve.
        self._pooled_s = float("-inf")

    def note_served(self, versions: Iterable[AnswerVersion], now_s: float) -> None:
        """Answers of these versions can be served at `now_s`."""
        self._seen_s.update(dict.fromkeys(versions, now_s))
        for name in [name for name, seen_s in self._seen_s.items() if now_s - seen_s > self.patience_s]:
            del self._seen_s[name]

    def note_available(self, now_s: float) -> None:
        """Record which versions of answers can be served now."""
        able = self.capabilities
        if able.find_pairs(ANY_POOLED):
            self._pooled_s = now_s
        self.note_served(able.served_versions(), now_s)

    def was_served(self, version: AnswerVersion | None, now_s: float, kv_class: str | None = None) -> bool:
        """Whether a pair was there within the last `patience_s`.

        With a version, only pairs that can continue an answer of that version count; else, with a `kv_class`, only
        pairs that have a class which it names.
        """
        return any(
            now_s - moment_s <= self.patience_s
            for seen, moment_s in self._seen_s.items()
            if version in (None, seen) and (kv_class is None or names_class(kv_class, seen.kv_class))
        )

    def should_wait(self, kind: RequestKind, now_s: float) -> bool:
        """Whether a request of this kind should wait for workers: they are there, or were there lately and may come
        back.

        The workers of an answer's KV class cannot come back if each of them has restarted with another class. Bulk work
        waits for workers until its deadline.
        """
        version, kv_class = kind.version, kind.kv_class
        if kind.pools:
            return kind.bulk or now_s - self._pooled_s <= self.patience_s
        if kind.bulk and not self.view.fleet.known_hellos():
            return True
        if version is None and kv_class is not None and not self.capabilities.is_known(kv_class):
            return False
        if kind.keep_rule and not self.capabilities.can_evict_somewhere(kv_class, kind.keep_rule):
            return False
        if kind.traits and not self.capabilities.can_continue_somewhere(kind.traits):
            return False
        patient = kind.bulk or self.was_served(version, now_s, kv_class)
        return patient and not self.capabilities.is_class_gone(version)

    def unserved_failure(self, state: RequestState) -> RequestFailure:
        """Why a queued request, which should not wait any longer, fails."""
        version, workers = state.version, self.view.fleet.workers
        if state.pools:
            role = "prefill" if self.view.split else "decode"
            why = f"no {role} worker that pools takes requests"
            return state.last_failure.failure(why)
        rule = state.request.keep.needed_rule
        if rule and not self.capabilities.can_evict_somewhere(state.kv_class, rule):
            able = sorted(name for name, one in workers.items() if can_evict(one.hello, None, rule))
            problem = f"no pair of workers can evict KV of the class {state.kv_class} by {rule}, as the request asks"
            return NO_WORKERS.failure(f"{problem}: {' and '.join(able) or 'none'} can")
        if state.kind.traits and not self.capabilities.can_continue_somewhere(state.kind.traits):
            if state.request.output:
                return NOT_CONTINUABLE.failure("no worker that is left can continue the answer exactly")
            names = " and ".join(sorted(state.kind.traits))
            return NO_WORKERS.failure(f"the workers are older than the gateway, and do not know: {names}")
        listed = describe_classes([worker_state.hello for worker_state in workers.values()])
        if version is None and state.kv_class is not None and not self.capabilities.is_known(state.kv_class):
            return NO_WORKERS.failure(f"no worker has KV of the class {state.kv_class}: {listed}")
        if version is None or not self.capabilities.is_class_gone(version):
            return state.last_failure.failure(self.explain_missing())
        return NO_WORKERS.failure(
            f"the answer began with KV of the class {version.kv_class}, and the workers for it have been replaced:"
            f" {listed}; send the request again"
        )

    def explain_missing(self) -> str:
        """Why no pair can serve requests now, for an error message."""
        if self.view.only_pools:
            return "no prefill worker that pools is up"
        roles = ("prefill", "decode") if self.view.split else ("decode",)
        absent = [role for role in roles if not self.view.fleet.workers_of(role)]
        if absent:
            return f"no {' and no '.join(absent)} worker is up"
        hellos = [worker_state.hello for worker_state in self.view.fleet.workers.values()]
        if self.view.split and not have_shared_class(hellos):
            return f"no two workers have the same KV class: {describe_classes(hellos)}"
        return "no two workers are linked" if self.view.split else "no decode worker takes requests"
