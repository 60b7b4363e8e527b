"""Fleets by their links, and views of them by their loads."""

from __future__ import annotations

from diptych.messages import Linked
from router.requests.relay import Relay
from router.routing.load_ledger import LoadLedger, WorkerLoad
from router.routing.policy import ANY_POOLED, ANY_REQUEST, RoutingView, find_pairs
from router.workers.fleet import Fleet
from tests.unit.router.fake_deployment import make_hello


def fleet_of(*workers: str, links: dict[tuple[str, str], float] | None = None) -> Fleet:
    """Workers, and gb_per_s by (prefill, decode); all linked at 10 GB/s if no links are named."""
    fleet = Fleet()
    for worker in workers:
        fleet.on_message(worker, make_hello(worker), 0.0)
    everywhere = {(p, d): 10.0 for p in workers for d in workers if p.startswith("p") and d.startswith("d")}
    for (source, target), gb_per_s in (everywhere if links is None else links).items():
        fleet.on_message(target, Linked(source, f"{source}/1", "shm", gb_per_s, 5.0), 0.0)
    return fleet


def assert_up_to_date(relay: Relay) -> None:
    """What is remembered of the fleet and of the queue is what one would find by looking at each of them again."""
    able = relay.capabilities
    for need in (ANY_REQUEST, ANY_POOLED, *(state.need for state in relay.live.values())):
        assert able.find_pairs(need) == find_pairs(need, able.view)
    versions = {one for pair in relay.find_pairs() for one in able.versions_of(pair)}
    assert able.served_versions() == versions
    assert relay.queue.kinds == {state.kind for state in relay.queue}


def view(fleet: Fleet, split: bool = True, **loads: WorkerLoad) -> RoutingView:
    ledger = LoadLedger()
    for name, load in loads.items():
        ledger.book_shares(f"on {name}", {name.replace("_", "-"): load})
    return RoutingView(fleet, ledger, split)
