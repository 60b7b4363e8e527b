"""What `/status` tells operators and `diptych status`: pools, workers with their books, links, and readiness."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from diptych.messages import Stats
from services.gateway.app import Probes
from services.gateway.backend import RelayBackend
from services.gateway.ready import Prober
from services.gateway.replies import Readiness
from services.gateway.service import Service


def summed(books: Iterable[Stats]) -> Stats:
    """Several workers' books as one: numbers added, those kept by name added name by name."""
    totals: dict[str, Any] = msgspec.structs.asdict(Stats())
    for book in books:
        for name, value in msgspec.structs.asdict(book).items():
            if isinstance(value, dict):
                totals[name] = {
                    key: totals[name].get(key, 0) + value.get(key, 0) for key in totals[name] | value
                }
            else:
                totals[name] += value
    return Stats(**totals)


class LiveProbes(Probes):
    """Probes of a gateway with workers."""

    def __init__(self, service: Service, backend: RelayBackend, prober: Prober) -> None:
        self._service, self._backend, self._prober = service, backend, prober

    def alive(self) -> bool:
        return self._backend.alive

    async def ready(self) -> Readiness:
        if self._service.draining:
            return Readiness(ready=False, reasons=["shutting down"])
        return await self._prober.fresh()

    def status(self) -> Mapping[str, Any]:
        readiness, relay = self._prober.state(), self._backend.relay
        return {
            "ready": readiness.ready,
            "reasons": readiness.reasons,
            "model": self._service.rules.names[0],
            "max_model_len": self._service.rules.context_tokens,
            "split": relay.split,
            "open_requests": len(self._service.open),
            "sequences": len(relay.live),
            "queue": self._queue(),
            "stages": dict(relay.stages()),
            "queued_tokens": relay.admission.queued_tokens,
            "late_messages": dict(relay.late),
            "suspects": len(relay.docket),
            "quarantined": relay.docket.num_quarantined,
            "local_prefill": relay.split and any(source is None for source, _ in self._backend.ways()),
            "channel_refused": dict(self._backend.hub.refused),
            "pools": {role: self._pool(role) for role in ("prefill", "decode")},
            "workers": [self._worker(name) for name in sorted(relay.fleet.members)],
            "links": [dataclasses.asdict(link) for link in self._backend.links()],
            "links_out": self._links_out(),
            "objectives": self._objectives(),
        }

    def _queue(self) -> dict[str, Any]:
        """Sequences whose prompt has not been read, and how long a first token is predicted to take."""
        admission = self._backend.relay.admission
        return {
            "sequences": admission.num_unread,
            "predicted_wait_s": round(admission.wait_s(self._backend.clock()), 3),
            "max_wait_s": admission.limits.max_wait_s,
        }

    def _links_out(self) -> list[dict[str, Any]]:
        """Pairs of workers that are not linked, or not used, and why."""
        now_s = self._backend.clock()
        return [
            {
                "source": source,
                "target": member.name,
                "why": why,
                "again_s": round(max(0.0, member.relink_s.get(source, now_s) - now_s), 3),
            }
            for member in self._backend.relay.fleet.role("decode")
            for source, why in sorted(member.troubles.items())
        ]

    def _pool(self, role: str) -> dict[str, Any]:
        """The books of all workers of a role, added up."""
        books = [book.stats for book in self._backend.books() if book.role == role]
        return {"workers": len(books), **msgspec.structs.asdict(summed(books))}

    def _worker(self, name: str) -> dict[str, Any]:
        member = self._backend.relay.fleet.members[name]
        hello = member.hello
        state = "draining" if member.draining else "unfit" if name in self._backend.unfit else "up"
        return {
            "worker": name,
            "role": member.role,
            "state": state,
            "incarnation": hello.incarnation,
            "fingerprint": hello.fingerprint,
            "host": hello.host,
            "pid": hello.pid,
            "silent_s": round(self._backend.clock() - member.seen_s, 3),
            "stats": msgspec.structs.asdict(member.stats),
        }

    def _objectives(self) -> dict[str, float | None]:
        slo = self._service.metrics.objectives
        return {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
