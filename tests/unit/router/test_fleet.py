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
    assert fleet.tick(2.5) == [] and fleet.members
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


def beat(worker: str, life: int = 1, **stats: float | bool) -> Beat:
    return Beat(worker, f"{worker}/{life}", Stats(**stats))  # type: ignore[arg-type]


def test_a_worker_that_drains_says_so_itself() -> None:
    fleet = met("prefill-0", "decode-0")
    fleet.hear("decode-0", linked("prefill-0"), 0.0)
    fleet.hear("decode-0", beat("decode-0", draining=True), 0.1)
    assert fleet.members["decode-0"].draining and fleet.pairs() == []
    fleet.hear("decode-0", beat("decode-0"), 0.2)
    assert fleet.members["decode-0"].draining, "there is no way back in one life"


def test_a_worker_whose_engine_stands_still_is_lost_until_it_moves() -> None:
    fleet = met("decode-0")
    assert fleet.hear("decode-0", beat("decode-0", stuck_s=5.9), 1.0) == []
    (down,) = fleet.hear("decode-0", beat("decode-0", stuck_s=6.0), 1.1)
    assert isinstance(down, Down) and "not moved" in down.reason
    assert fleet.hear("decode-0", beat("decode-0", stuck_s=0.0), 1.2) == [], "it has not said who it is"
    for _ in range(2):
        assert fleet.hear("decode-0", hello("decode-0", link="2"), 1.3) == [], "it speaks, but does not work"
    assert fleet.hear("decode-0", beat("decode-0", stuck_s=7.0), 1.4) == [] and not fleet.members
    (up,) = fleet.hear("decode-0", beat("decode-0"), 1.5)
    assert up == Up("decode-0", "decode", "decode-0/1") and fleet.members["decode-0"].hello.link == "2"
    fleet.hear("decode-0", beat("decode-0", stuck_s=9.0), 2.0)
    assert [type(one) for one in fleet.hear("decode-0", hello("decode-0", life=2), 2.1)] == [Up], "a new life"


@pytest.mark.parametrize("ended", ["crashed", "killed", ""])
def test_how_a_life_ended_is_what_the_next_one_says(ended: str) -> None:
    fleet = met("decode-0")
    fleet.lose("decode-0", "test")
    fleet.hear("decode-0", msgspec.structs.replace(hello("decode-0", life=2), ended=ended, pid=2), 1.0)
    assert fleet.members["decode-0"].ended == ended


def test_who_comes_back_as_the_same_process_had_not_ended() -> None:
    fleet, crashed = Fleet(), msgspec.structs.replace(hello("decode-0"), ended="crashed")
    fleet.hear("decode-0", crashed, 0.0)
    fleet.hear("decode-0", msgspec.structs.replace(crashed, link="2"), 1.0)
    assert fleet.members["decode-0"].ended == "alive"
    turned = msgspec.structs.replace(crashed, role="prefill", incarnation="decode-0/2")
    fleet.hear("decode-0", turned, 2.0)
    assert (fleet.members["decode-0"].ended, fleet.members["decode-0"].role) == ("alive", "prefill")


def test_a_link_that_corrupts_again_and_again_is_not_used_for_a_while() -> None:
    fleet = met("prefill-0", "decode-0", "decode-1")
    for worker in ("decode-0", "decode-1"):
        fleet.hear(worker, linked("prefill-0"), 0.0)
    for now_s in (0.0, 30.0, 61.0):  # too far apart
        fleet.corrupt("prefill-0", "decode-0", now_s)
    assert len(fleet.pairs()) == 2 and fleet.links_given_up == 0
    fleet.corrupt("prefill-0", "decode-0", 62.0)
    assert fleet.pairs() == [("prefill-0", "decode-1")] and fleet.links_given_up == 1
    assert "corrupt" in fleet.members["decode-0"].troubles["prefill-0"]
    fleet.corrupt("prefill-0", "decode-0", 62.0)
    fleet.corrupt("nobody", "decode-0", 62.0)
    fleet.corrupt("prefill-0", "nobody", 62.0)
    again = [change for now_s in (62.0 + RELINK_S - 1, 62.0 + RELINK_S) for change in ticked(fleet, now_s)]
    assert again == [Send("decode-0", Peer("prefill-0", "prefill-0/1", {"shm": b"x"}))]
    fleet.hear("decode-0", linked("prefill-0"), 93.0)
    assert len(fleet.pairs()) == 2


def ticked(fleet: Fleet, now_s: float) -> list[object]:
    for name in fleet.members:
        fleet.touch(name, now_s)
    return [*fleet.tick(now_s), *fleet.tick(now_s)]  # the first may be that of one who slept


def test_while_versions_are_mixed_nobody_is_unfit_who_has_a_partner() -> None:
    fleet = met("prefill-0", "decode-0")
    for worker in ("prefill-1", "decode-1"):
        fleet.hear(worker, hello(worker, fingerprint="new"), 1.0)
        alone = worker == "prefill-1"
        assert list(fleet.misfits()) == (["prefill-1"] if alone else [])
    for worker, peer in (("decode-0", "prefill-0"), ("decode-1", "prefill-1")):
        fleet.hear(worker, linked(peer), 2.0)
    assert fleet.pairs() == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
    fleet.lose("decode-1", "test")
    assert list(fleet.misfits()) == ["prefill-1"]


def test_a_stranger_is_unfit_until_it_has_a_role() -> None:
    fleet, stranger = Fleet(), msgspec.structs.replace(hello("prefill-0"), role="both")
    fleet.hear("prefill-0", stranger, 0.0)
    assert list(fleet.misfits()) == ["prefill-0"]
    fleet.hear("prefill-0", hello("prefill-0"), 1.0)
    assert fleet.misfits() == {}
