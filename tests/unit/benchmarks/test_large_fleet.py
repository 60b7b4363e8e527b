"""The relay of a large deployment, as `benchmarks.gateway` measures it: it keeps its streams, and all of them end."""

from __future__ import annotations

from benchmarks.gateway_parts.large_fleet import FleetShape, LargeFleet


def test_it_stays_as_busy_as_it_was_made() -> None:
    fleet = LargeFleet(FleetShape(3, streams=30, waiting=90, prompt_tokens=640, known_chunks=100))
    fleet.fill()
    known = len(fleet.relay.index)
    fleet.measure(40)
    stages = fleet.relay.count_stages()
    assert fleet.ended >= 40 and fleet.request_s > 0 and fleet.longest_s > 0
    assert stages.total() == 120 and stages["decoding"] >= 20 and len(fleet.relay.queue) > 0
    assert len(fleet.relay.find_pairs()) == 9 and known > 100, "prefixes are known on both sides"
