"""Who is there, and who may be paired with whom."""

from __future__ import annotations

import msgspec
import pytest

from diptych.messages import Beat, Linked, Peer, Stats, Unpeer
from router.effects import Down, Send, Unfit, Up
from router.fleet import RELINK_S, Fleet, compare
from tests.unit.router.world import hello


def met(*workers: str) -> Fleet:
    fleet = Fleet()
    for worker in workers:
        fleet.hear(worker, hello(worker), 0.0)
    return fleet


def linked(peer: str, life: int = 1, error: str = "") -> Linked:
    return Linked(peer, f"{peer}/{life}", "" if error else "shm", 10.0, 5.0, error)


def test_decode_workers_are_told_of_prefill_workers_whoever_comes_first() -> None:
    peer = Send("decode-0", Peer("prefill-0", "prefill-0/1", {"shm": b"x"}))
    for order in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        fleet = met(order[0])
        changes = fleet.hear(order[1], hello(order[1]), 0.0)
        assert changes == [Up(order[1], order[1].partition("-")[0], f"{order[1]}/1"), peer]


def test_a_pair_is_a_pair_once_linked() -> None:
    fleet = met("prefill-0", "decode-0")
    assert fleet.pairs() == []
    fleet.hear("decode-0", linked("prefill-0"), 0.0)
    assert fleet.pairs() == [("prefill-0", "decode-0")]
    fleet.hear("decode-0", linked("prefill-0", error="no route"), 0.0)
    assert fleet.pairs() == [] and fleet.members["decode-0"].troubles == {"prefill-0": "no route"}


def test_a_link_that_could_not_be_made_is_tried_again() -> None:
    fleet, again = met("prefill-0", "decode-0"), Peer("prefill-0", "prefill-0/1", {"shm": b"x"})

    def ticks(*moments_s: float) -> list[Send]:
        told = []
        for now_s in moments_s:
            for member in fleet.members.values():
                fleet.touch(member.name, now_s)
            told += [change for change in fleet.tick(now_s) if isinstance(change, Send)]
        return told

    fleet.hear("decode-0", linked("prefill-0", error="a KV transfer stalled"), 0.0)
    assert ticks(0.0, RELINK_S - 1) == []
    assert ticks(RELINK_S, RELINK_S + 1) == [Send("decode-0", again)]
    fleet.hear("decode-0", linked("prefill-0"), RELINK_S + 2)
    assert fleet.pairs() == [("prefill-0", "decode-0")]
    assert ticks(3 * RELINK_S, 3 * RELINK_S + 1) == []
    fleet.hear("decode-0", linked("prefill-0", error="a KV transfer stalled"), 4 * RELINK_S)
    fleet.lose("prefill-0", "it is gone")
    assert ticks(6 * RELINK_S, 6 * RELINK_S + 1) == []


def test_a_link_to_an_earlier_life_does_not_count() -> None:
    fleet = met("prefill-0", "decode-0")
    fleet.hear("prefill-0", hello("prefill-0", life=2), 0.0)
    fleet.hear("decode-0", linked("prefill-0", life=1), 0.0)
    assert fleet.pairs() == []


def test_a_restart_is_a_loss_and_a_coming() -> None:
    fleet = met("prefill-0", "decode-0")
    fleet.hear("decode-0", linked("prefill-0"), 0.0)
    changes = fleet.hear("prefill-0", hello("prefill-0", life=2), 1.0)
    assert changes == [
        Down("prefill-0", "prefill-0/1", "it has restarted"),
        Send("decode-0", Unpeer("prefill-0", "prefill-0/1")),
        Up("prefill-0", "prefill", "prefill-0/2"),
        Send("decode-0", Peer("prefill-0", "prefill-0/2", {"shm": b"x"})),
    ]
    assert fleet.pairs() == []


def test_a_repeated_hello_changes_nothing_and_a_new_link_does() -> None:
    fleet = met("decode-0")
    assert fleet.hear("decode-0", hello("decode-0"), 1.0) == []
    changes = fleet.hear("decode-0", hello("decode-0", link="2"), 1.0)
    assert [type(change) for change in changes] == [Down, Up]


def test_different_fingerprints_are_not_paired_and_told_side_by_side() -> None:
    fleet = Fleet()
    fleet.hear("prefill-0", hello("prefill-0", fingerprint="a", model="tiny", dtype="float32"), 0.0)
    changes = fleet.hear("decode-0", hello("decode-0", fingerprint="b", model="tiny", dtype="float16"), 0.0)
    assert [type(change) for change in changes] == [Up, Unfit]
    text = changes[1].text if isinstance(changes[1], Unfit) else ""
    assert text.splitlines() == ["prefill-0  decode-0", "dtype  float32    float16"]


def test_equal_identities_with_different_fingerprints_show_the_fingerprints() -> None:
    text = compare(hello("prefill-0", fingerprint="aa"), hello("decode-0", fingerprint="bb"))
    assert "fingerprint" in text and "aa" in text and "bb" in text


def test_an_unknown_role_is_unfit() -> None:
    stranger = msgspec.structs.replace(hello("prefill-0"), role="both")
    fleet = Fleet()
    assert [type(change) for change in fleet.hear("prefill-0", stranger, 0.0)] == [Unfit]
    assert not fleet.members


def test_nobody_introduces_another() -> None:
    fleet = Fleet()
    assert fleet.hear("decode-1", hello("decode-0"), 0.0) == [] and not fleet.members


def silent(fleet: Fleet, until_s: float, step_s: float = 0.25) -> list[str]:
    lost: list[str] = []
    for step in range(1, round(until_s / step_s) + 1):
        lost += [change.worker for change in fleet.tick(step * step_s) if isinstance(change, Down)]
    return lost


def test_two_seconds_of_silence_are_a_loss() -> None:
    assert silent(met("decode-0"), 2.0) == []
    assert silent(met("decode-0"), 2.25) == ["decode-0"]


@pytest.mark.parametrize("sign", ["beat", "anything"])
def test_signs_of_life_keep_a_worker(sign: str) -> None:
    fleet = met("decode-0")
    fleet.tick(0.0)
    fleet.tick(0.9)
    beat = Beat("decode-0", "decode-0/1", Stats(steps=7))
    assert fleet.hear("decode-0", beat, 1.0) == [] if sign == "beat" else fleet.touch("decode-0", 1.0)
    fleet.tick(1.8)
    assert fleet.tick(2.5) == [] and fleet.alive(2.5)
    assert fleet.members["decode-0"].stats.steps == (7 if sign == "beat" else 0)


def test_beats_of_an_earlier_life_or_after_the_loss_count_for_nothing() -> None:
    fleet = met("decode-0")
    fleet.hear("decode-0", Beat("decode-0", "decode-0/0", Stats()), 2.0)
    assert fleet.members["decode-0"].seen_s == 0.0
    fleet.lose("decode-0", "test")
    assert fleet.hear("decode-0", Beat("decode-0", "decode-0/1", Stats()), 2.0) == []
    assert not fleet.members and not fleet.touch("decode-0", 2.0)


def test_who_slept_accuses_nobody_at_once() -> None:
    fleet = met("decode-0")
    fleet.tick(0.0)
    assert fleet.tick(30.0) == []
    assert [type(change) for change in fleet.tick(30.1)] == [Down]


def test_a_loss_of_another_life_is_ignored() -> None:
    fleet = met("decode-0")
    assert fleet.lose("decode-0", "test", "decode-0/0") == [] and fleet.members
    assert [type(change) for change in fleet.lose("decode-0", "test", "decode-0/1")] == [Down]
