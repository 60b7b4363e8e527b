"""Builds the body of `/status` for operators and `diptych status`: readiness, queue, pools, workers and links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from diptych.messages import Hello, WorkerStats
from diptych.specs import BulkPlan
from services.gateway.access_files import AccessFiles
from services.gateway.batches.batch_report import report_batches
from services.gateway.batches.feeder import BatchFeeder
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.metrics.workers import WorkerSnapshot
from services.gateway.openai.schemas.response_schema import Readiness
from services.gateway.ops.readiness import CanaryProber, CanaryRoute, WorkerPair
from services.gateway.ops.replan_endpoint import ReplanRoute
from services.gateway.service import GatewayService

NO_FILES = AccessFiles()


def sum_stats(stats: Iterable[WorkerStats]) -> WorkerStats:
    """The sum of several workers' statistics. Numbers are added; dictionaries key by key, lists place by place.

    Tiers are left out, since the workers of a host share them.
    """
    totals: dict[str, Any] = msgspec.structs.asdict(WorkerStats())
    for one in stats:
        for name, value in msgspec.structs.asdict(one).items():
            if name == "tiers":
                continue
            if isinstance(value, dict):
                totals[name] = {
                    key: totals[name].get(key, 0) + value.get(key, 0) for key in totals[name] | value
                }
            elif isinstance(value, list):
                totals[name] = [sum(pair) for pair in zip_longest(totals[name], value, fillvalue=0)]
            else:
                totals[name] += value
    return WorkerStats(**totals)


def _classes_ready(states: Mapping[CanaryRoute, bool]) -> dict[str, bool]:
    """Whether any pair of workers is ready for each KV class."""
    ready: dict[str, bool] = {}
    for route, state in states.items():
        ready[route.kv_class] = ready.get(route.kv_class, False) or state
    return ready


class LiveHealthProbes:
    """The probes of a gateway with workers."""

    def __init__(
        self,
        service: GatewayService,
        backend: RelayBackend,
        prober: CanaryProber,
        replan_route: ReplanRoute | None = None,
        plan_note: str = "",
        feeder: BatchFeeder | None = None,
        bulk_plan: BulkPlan | None = None,
        batches_off: str = "",
        named_batches: bool = True,
        access_files: AccessFiles = NO_FILES,
    ) -> None:
        """`plan_note` says where the number of workers comes from; empty if it was not planned. `feeder` runs
        batches; None if they are off, and `batches_off` says why. `bulk_plan` is that of workers that only do bulk
        work, if there are. With `named_batches` single batches, and the names of keys, are in `/status`, whoever they
        belong to. `access_files` are those of keys and of the certificate.
        """
        self._access_files = access_files
        self._named_batches = named_batches
        self._bulk_plan = bulk_plan
        self._feeder, self._batches_off = feeder, batches_off
        self._service, self._backend, self._prober = service, backend, prober
        self._replanning, self._plan_note = replan_route, plan_note

    def is_alive(self) -> bool:
        """Whether the relay's clock task ran lately."""
        return self._backend.is_alive

    async def check_readiness(self, known: bool = True) -> Readiness:
        """Readiness from canaries; never ready during a shutdown.

        If the client is `known`, workers not proven lately are tested first, and the reasons hold worker names.
        """
        if self._service.draining:
            return Readiness(ready=False, reasons=["shutting down"])
        return await self._prober.fresh_readiness(known)

    def status_report(self) -> Mapping[str, Any]:
        """The body of `/status`. No canaries are sent for it."""
        readiness, relay = self._prober.current_readiness(), self._backend.relay
        now_s, metrics = self._backend.clock(), self._service.metrics
        # Computed once, since it compares all workers with each other.
        unfit = self._backend.unfit_workers
        states = self._prober.class_states()
        return {
            "time_s": round(now_s, 3),
            "ready": readiness.ready,
            "reasons": readiness.reasons,
            "model": self._service.rules.served_names[0],
            "max_model_len": self._service.context_tokens,
            "split": relay.split,
            "open_requests": self._service.num_open,
            "gateways": [] if self._service.fronts is None else self._service.fronts.report(),
            "sequences": relay.count_stages().total(),
            "queue": self._queue_status(),
            "stages": dict(relay.count_stages()),
            "queued_tokens": relay.admission.queued_tokens,
            "late_messages": dict(relay.late_messages),
            "suspects": len(relay.quarantine),
            "quarantined": relay.quarantine.num_quarantined,
            "local_prefill": relay.split
            and not relay.pairs.only_pools
            and any(source is None for source, _ in self._backend.worker_pairs()),
            "decode_overdraft": self._overdraft_status(),
            "channel_refused": dict(self._backend.hub.refused),
            "pools": {role: self._pool_status(role) for role in ("prefill", "decode")},
            "workers": [self._worker_status(name, name in unfit) for name in sorted(relay.fleet.workers)],
            "kv_classes": _classes_ready(states),
            "links": self._link_status(states),
            "links_out": self._missing_links(),
            "kv_auto": self._kv_auto_status(),
            "kv_keep": self._kv_keep_status(),
            "bulk": self._backend.bulk_report,
            "bulk_plan": self._bulk_status(),
            "batches": report_batches(self._feeder, self._batches_off, self._named_batches),
            "objectives": self._slo_limits(),
            "history": metrics.history.report(now_s, metrics.slo.attainment),
            "plan": self._plan_status(),
            "errors": self._service.errors.report(now_s),
            "fleet_events": self._backend.fleet_events.report(now_s),
            **self._access_files.report(self._named_batches, now_s),
        }

    def _overdraft_status(self) -> dict[str, Any]:
        """Whether prompts may begin before their decode room is free, how many did, and whether it was in time.

        `patience` is the share of a prompt's time within which room must be predicted to be free.
        """
        pairs = self._backend.relay.pairs
        return {
            "mode": "auto" if pairs.overdraft else "off",
            "overdrawn": pairs.num_overdrawn,
            "in_time": pairs.patience.num_in_time,
            "late": pairs.patience.num_late,
            "patience": round(pairs.patience.share, 3),
        }

    def _plan_status(self) -> dict[str, Any]:
        """How many workers of each role there should be, and why; with a replanner, its last report."""
        report = None if self._replanning is None else self._replanning.report
        replanner = (
            {
                "reason": report.reason,
                "target": report.target,
                "expected_attainment": report.attainment,
                "decisions": report.decisions,
                "alarms": report.alarms,
                "actions": report.actions,
            }
            if report is not None
            else None
        )
        return {
            "workers": self._prober.wanted_workers(),
            "note": self._plan_note,
            "replanner": replanner,
        }

    def _bulk_status(self) -> dict[str, Any] | None:
        """Where the policy of bulk workers comes from, its prediction, and the policy in force at each worker."""
        if self._bulk_plan is None:
            return None
        members = self._backend.relay.fleet.workers_of("decode")
        return {
            **msgspec.structs.asdict(self._bulk_plan),
            "in_force": {one.name: one.hello.block_policy for one in members},
        }

    def _queue_status(self) -> dict[str, Any]:
        """Sequences whose prompt is not prefilled yet, and the predicted time to first token of a new request."""
        admission = self._backend.relay.admission
        return {
            "sequences": admission.num_unprefilled,
            "predicted_wait_s": round(admission.predicted_wait_s(self._backend.clock()), 3),
            "max_wait_s": admission.limits.max_wait_s,
        }

    def _link_status(self, states: Mapping[CanaryRoute, bool]) -> list[dict[str, Any]]:
        """The links, and whether canaries or requests have proven each KV class over them."""
        classes: dict[WorkerPair, dict[str, bool]] = {}
        for route, state in states.items():
            classes.setdefault(route.pair, {})[route.kv_class] = state
        return [
            {
                "source": link.source,
                "target": link.target,
                "transport": link.transport,
                "gb_per_s": link.gb_per_s,
                "latency_us": link.latency_us,
                "moved_bytes": link.moved_bytes,
                "kv_classes": classes.get((link.source, link.target), {}),
            }
            for link in self._backend.link_speeds()
        ]

    def _missing_links(self) -> list[dict[str, Any]]:
        """Pairs of workers whose link failed or is unused, why, and in how many seconds it is tried again."""
        now_s = self._backend.clock()
        return [
            {
                "source": source,
                "target": member.name,
                "why": why,
                "again_s": round(max(0.0, member.link_retry_s.get(source, now_s) - now_s), 3),
            }
            for member in self._backend.relay.fleet.workers_of("decode")
            for source, why in sorted(member.link_errors.items())
        ]

    def _kv_auto_status(self) -> dict[str, Any]:
        """The KV classes that the router may choose, and on which pairs of workers it chooses the lighter one."""
        pairs, now_s = self._backend.relay.pairs, self._backend.clock()
        lighter = [
            {
                "source": source,
                "target": target,
                "reason": mode.reason,
                "since_s": round(now_s - mode.since_s, 3),
            }
            for (source, target), mode in sorted(pairs.auto.modes.items(), key=str)
            if mode.reason is not None
        ]
        return {
            "budget_pct": pairs.auto.budget_pct,
            "classes": pairs.capabilities.auto_classes,
            "lighter": lighter,
        }

    def _kv_keep_status(self) -> dict[str, Any]:
        """The threshold of eviction of requests that give none, the KV classes in which KV can be evicted, and
        the share of their KV behind the boundary that the latest requests kept.
        """
        pairs = self._backend.relay.pairs
        return {
            "threshold": self._service.rules.keep_threshold,
            "classes": pairs.capabilities.keep_classes,
            "rules": pairs.capabilities.keep_rules,
            "measured": [
                {"kv_class": kv_class, "threshold": threshold, "rule": rule, "kept_share": round(share, 4)}
                for (kv_class, threshold, rule), share in pairs.kept_shares.latest
            ],
        }

    def _pool_status(self, role: str) -> dict[str, Any]:
        """The statistics of all workers of a role, added up."""
        stats = [worker.stats for worker in self._backend.worker_stats() if worker.role == role]
        return {"workers": len(stats), **msgspec.structs.asdict(sum_stats(stats))}

    def _worker_status(self, name: str, unfit: bool) -> dict[str, Any]:
        """The entry of one worker; `unfit` says that it cannot serve with the others."""
        member = self._backend.relay.fleet.workers[name]
        hello = member.hello
        snapshot = WorkerSnapshot(name, member.role, member.stats, hello.kv_classes)
        state = "draining" if member.draining else "unfit" if unfit else "up"
        return {
            "worker": name,
            "role": member.role,
            "state": state,
            "incarnation": hello.incarnation,
            "fingerprint": hello.fingerprint,
            "kv_classes": {one: use._asdict() for one, use in snapshot.class_use.items()},
            "keep_classes": hello.keep_classes,
            "host": hello.host,
            "pid": hello.pid,
            "log_file": hello.log_file,
            "device": hello.identity.get("device", "cpu"),
            "engine": describe_engine(hello),
            "prefill_slice_ms": hello.prefill_slice_ms,
            "silent_s": round(self._backend.clock() - member.seen_s, 3),
            "stats": {
                **msgspec.structs.asdict(member.stats),
                "tiers": {tier: msgspec.structs.asdict(one) for tier, one in member.stats.tiers.items()},
            },
        }

    def _slo_limits(self) -> dict[str, float | None]:
        """The SLOs in seconds; None where none is set."""
        return {f"{name}_s": limit_s for name, limit_s in self._service.metrics.slo.limits_s().items()}


def describe_engine(hello: Hello) -> str:
    """The engine of a worker in words, for example `vllm 0.32.0, FLASH_ATTN`."""
    identity = hello.identity
    named = f"{identity.get('engine', 'diptych')} {identity.get('vllm', '')}".strip()
    return f"{named}, {identity['attention']}" if identity.get("attention") else named
