"""Who is there, and who may be paired with whom."""

from __future__ import annotations

import msgspec
import pytest

from diptych.messages import (
    SILENCE_S,
    Heartbeat,
    Hello,
    Linked,
    Opened,
    OpenTransport,
    Peer,
    Unpeer,
    WorkerStats,
)
from router.effects import RejectSession, SendMessage, WorkerDown, WorkerUnfit, WorkerUp
from router.requests.relay import Relay
from router.workers.fleet import LINK_RETRY_S, RIVAL_GRACE_S, Fleet, describe_mismatch
from tests.unit.router.fake_deployment import make_hello
from tests.unit.router.fleet_messages import beat, kinds, met


def linked(peer: str, life: int = 1, error: str = "") -> Linked:
    return Linked(peer, f"{peer}/{life}", "" if error else "shm", 10.0, 5.0, error)


def test_decode_workers_get_prefill_peers_in_any_order_of_arrival() -> None:
    peer = SendMessage("decode-0", Peer("prefill-0", "prefill-0/1", {"shm": b"x"}))
    for order in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        fleet = met(order[0])
        changes = fleet.on_message(order[1], make_hello(order[1]), 0.0)
        assert changes == [WorkerUp(order[1], order[1].partition("-")[0], f"{order[1]}/1"), peer]


def test_a_pair_is_a_pair_once_linked() -> None:
    fleet = met("prefill-0", "decode-0")
    assert fleet.linked_pairs() == []
    fleet.on_message("decode-0", linked("prefill-0"), 0.0)
    assert fleet.linked_pairs() == [("prefill-0", "decode-0")]
    fleet.on_message("decode-0", linked("prefill-0", error="no route"), 0.0)
    assert fleet.linked_pairs() == [] and fleet.workers["decode-0"].link_errors == {"prefill-0": "no route"}


def test_a_link_that_could_not_be_made_is_tried_again() -> None:
    fleet, again = met("prefill-0", "decode-0"), Peer("prefill-0", "prefill-0/1", {"shm": b"x"})

    def ticks(*moments_s: float) -> list[SendMessage]:
        sent = []
        for now_s in moments_s:
            for member in fleet.workers.values():
                fleet.mark_seen(member.name, now_s)
            sent += [change for change in fleet.check_silence(now_s) if isinstance(change, SendMessage)]
        return sent

    fleet.on_message("decode-0", linked("prefill-0", error="a KV transfer stalled"), 0.0)
    assert ticks(0.0, LINK_RETRY_S - 1) == []
    assert ticks(LINK_RETRY_S, LINK_RETRY_S + 1) == [SendMessage("decode-0", again)]
    fleet.on_message("decode-0", linked("prefill-0"), LINK_RETRY_S + 2)
    assert fleet.linked_pairs() == [("prefill-0", "decode-0")]
    assert ticks(3 * LINK_RETRY_S, 3 * LINK_RETRY_S + 1) == []
    fleet.on_message("decode-0", linked("prefill-0", error="a KV transfer stalled"), 4 * LINK_RETRY_S)
    fleet.remove_worker("prefill-0", "it is gone")
    assert ticks(6 * LINK_RETRY_S, 6 * LINK_RETRY_S + 1) == []


def test_a_link_to_an_earlier_life_does_not_count() -> None:
    fleet = met("prefill-0", "decode-0")
    fleet.on_message("prefill-0", make_hello("prefill-0", life=2), 0.0)
    fleet.on_message("decode-0", linked("prefill-0", life=1), 0.0)
    assert fleet.linked_pairs() == []


def test_a_restart_is_a_loss_and_a_coming() -> None:
    fleet = met("prefill-0", "decode-0")
    fleet.on_message("decode-0", linked("prefill-0"), 0.0)
    changes = fleet.on_message("prefill-0", make_hello("prefill-0", life=2), 1.0)
    assert changes == [
        WorkerDown("prefill-0", "prefill-0/1", "it has restarted"),
        SendMessage("decode-0", Unpeer("prefill-0", "prefill-0/1")),
        WorkerUp("prefill-0", "prefill", "prefill-0/2"),
        SendMessage("decode-0", Peer("prefill-0", "prefill-0/2", {"shm": b"x"})),
    ]
    assert fleet.linked_pairs() == []


def test_a_repeated_hello_changes_nothing_and_a_new_link_does() -> None:
    fleet = met("decode-0")
    assert fleet.on_message("decode-0", make_hello("decode-0"), 1.0) == []
    changes = fleet.on_message("decode-0", make_hello("decode-0", link="2"), 1.0)
    assert [type(change) for change in changes] == [WorkerDown, WorkerUp]


def test_different_fingerprints_are_not_paired_and_shown_side_by_side() -> None:
    fleet = Fleet()
    fleet.on_message(
        "prefill-0", make_hello("prefill-0", fingerprint="a", model="tiny", dtype="float32"), 0.0
    )
    changes = fleet.on_message(
        "decode-0", make_hello("decode-0", fingerprint="b", model="tiny", dtype="float16"), 0.0
    )
    assert [type(change) for change in changes] == [WorkerUp, WorkerUnfit]
    text = changes[1].text if isinstance(changes[1], WorkerUnfit) else ""
    assert text.splitlines() == ["prefill-0  decode-0", "dtype  float32    float16"]


def test_equal_identities_with_different_fingerprints_show_the_fingerprints() -> None:
    text = describe_mismatch(
        make_hello("prefill-0", fingerprint="aa"), make_hello("decode-0", fingerprint="bb")
    )
    assert "fingerprint" in text and "aa" in text and "bb" in text


def test_an_unknown_role_is_unfit() -> None:
    stranger = msgspec.structs.replace(make_hello("prefill-0"), role="both")
    fleet = Fleet()
    assert [type(change) for change in fleet.on_message("prefill-0", stranger, 0.0)] == [WorkerUnfit]
    assert not fleet.workers


def test_nobody_introduces_another() -> None:
    fleet = Fleet()
    assert fleet.on_message("decode-1", make_hello("decode-0"), 0.0) == [] and not fleet.workers


def silent(fleet: Fleet, until_s: float, step_s: float = 0.25) -> list[str]:
    lost: list[str] = []
    for step in range(1, round(until_s / step_s) + 1):
        lost += [
            change.worker for change in fleet.check_silence(step * step_s) if isinstance(change, WorkerDown)
        ]
    return lost


def test_silence_that_cannot_be_a_stall_is_a_loss() -> None:
    assert SILENCE_S >= 10.0
    assert silent(met("decode-0"), SILENCE_S) == []
    assert silent(met("decode-0"), SILENCE_S + 0.25) == ["decode-0"]


@pytest.mark.parametrize("sign", ["beat", "anything"])
def test_signs_of_life_keep_a_worker(sign: str) -> None:
    fleet = Fleet(lost_s=2.0)
    fleet.on_message("decode-0", make_hello("decode-0"), 0.0)
    fleet.check_silence(0.0)
    fleet.check_silence(0.9)
    beat = Heartbeat("decode-0", "decode-0/1", WorkerStats(steps=7))
    assert (
        fleet.on_message("decode-0", beat, 1.0) == [] if sign == "beat" else fleet.mark_seen("decode-0", 1.0)
    )
    fleet.check_silence(1.8)
    assert fleet.check_silence(2.5) == [] and fleet.workers
    assert fleet.workers["decode-0"].stats.steps == (7 if sign == "beat" else 0)


def test_after_a_long_pause_nothing_is_decided_before_messages_are_read() -> None:
    fleet = Fleet(lost_s=10.0)
    for name in ("prefill-0", "decode-0"):
        fleet.on_message(name, make_hello(name), 0.0)
    fleet.on_message("decode-0", Linked("prefill-0", "prefill-0/1", "", 0.0, 0.0, error="no memory"), 0.0)
    fleet.check_silence(0.0)
    assert fleet.check_silence(100.0) == [] and len(fleet.workers) == 2 and not fleet.quiet
    assert len([one for one in fleet.check_silence(100.1) if isinstance(one, WorkerDown)]) == 2


def test_beats_of_an_earlier_life_or_after_the_loss_count_for_nothing() -> None:
    fleet = met("decode-0")
    fleet.on_message("decode-0", Heartbeat("decode-0", "decode-0/0", WorkerStats()), 2.0)
    assert fleet.workers["decode-0"].seen_s == 0.0
    fleet.remove_worker("decode-0", "test")
    assert fleet.on_message("decode-0", Heartbeat("decode-0", "decode-0/1", WorkerStats()), 2.0) == []
    assert not fleet.workers and not fleet.mark_seen("decode-0", 2.0)


def test_who_slept_accuses_nobody_at_once() -> None:
    fleet = met("decode-0")
    fleet.check_silence(0.0)
    assert fleet.check_silence(30.0) == []
    assert [type(change) for change in fleet.check_silence(30.1)] == [WorkerDown]


def test_a_loss_of_another_life_is_ignored() -> None:
    fleet = met("decode-0")
    assert fleet.remove_worker("decode-0", "test", "decode-0/0") == [] and fleet.workers
    assert [type(change) for change in fleet.remove_worker("decode-0", "test", "decode-0/1")] == [WorkerDown]


def test_a_worker_that_drains_says_so_itself() -> None:
    fleet = met("prefill-0", "decode-0")
    fleet.on_message("decode-0", linked("prefill-0"), 0.0)
    fleet.on_message("decode-0", beat("decode-0", draining=True), 0.1)
    assert fleet.workers["decode-0"].draining and fleet.linked_pairs() == []
    fleet.on_message("decode-0", beat("decode-0"), 0.2)
    assert fleet.workers["decode-0"].draining, "there is no way back in one life"


def test_a_worker_whose_engine_stands_still_is_lost_until_it_moves() -> None:
    fleet = met("decode-0")
    assert fleet.on_message("decode-0", beat("decode-0", stuck_s=5.9), 1.0) == []
    (down,) = fleet.on_message("decode-0", beat("decode-0", stuck_s=6.0), 1.1)
    assert isinstance(down, WorkerDown) and "stuck for" in down.reason
    assert fleet.on_message("decode-0", beat("decode-0", stuck_s=0.0), 1.2) == [], "it has not said who it is"
    for _ in range(2):
        assert fleet.on_message("decode-0", make_hello("decode-0", link="2"), 1.3) == [], (
            "it speaks, but does not work"
        )
    assert fleet.on_message("decode-0", beat("decode-0", stuck_s=7.0), 1.4) == [] and not fleet.workers
    (up,) = fleet.on_message("decode-0", beat("decode-0"), 1.5)
    assert (
        up == WorkerUp("decode-0", "decode", "decode-0/1", "2")
        and fleet.workers["decode-0"].hello.link == "2"
    )
    fleet.on_message("decode-0", beat("decode-0", stuck_s=9.0), 2.0)
    assert [type(one) for one in fleet.on_message("decode-0", make_hello("decode-0", life=2), 2.1)] == [
        WorkerUp
    ], "a new life"


@pytest.mark.parametrize("ended", ["crashed", "killed", ""])
def test_how_a_life_ended_is_what_the_next_one_says(ended: str) -> None:
    fleet = met("decode-0")
    fleet.remove_worker("decode-0", "test")
    fleet.on_message(
        "decode-0", msgspec.structs.replace(make_hello("decode-0", life=2), ended=ended, pid=2), 1.0
    )
    assert fleet.workers["decode-0"].ended == ended


def test_who_comes_back_as_the_same_process_had_not_ended() -> None:
    fleet, crashed = Fleet(), msgspec.structs.replace(make_hello("decode-0"), ended="crashed")
    fleet.on_message("decode-0", crashed, 0.0)
    fleet.on_message("decode-0", msgspec.structs.replace(crashed, link="2"), 1.0)
    assert fleet.workers["decode-0"].ended == "alive"
    switched = msgspec.structs.replace(crashed, role="prefill", incarnation="decode-0/2")
    fleet.on_message("decode-0", switched, 2.0)
    assert (fleet.workers["decode-0"].ended, fleet.workers["decode-0"].role) == ("alive", "prefill")


def test_a_link_that_corrupts_again_and_again_is_not_used_for_a_while() -> None:
    fleet = met("prefill-0", "decode-0", "decode-1")
    for worker in ("decode-0", "decode-1"):
        fleet.on_message(worker, linked("prefill-0"), 0.0)
    for now_s in (0.0, 30.0, 61.0):  # too far apart
        fleet.record_corruption("prefill-0", "decode-0", now_s)
    assert len(fleet.linked_pairs()) == 2 and fleet.links_given_up == 0
    fleet.record_corruption("prefill-0", "decode-0", 62.0)
    assert fleet.linked_pairs() == [("prefill-0", "decode-1")] and fleet.links_given_up == 1
    assert "corrupt" in fleet.workers["decode-0"].link_errors["prefill-0"]
    fleet.record_corruption("prefill-0", "decode-0", 62.0)
    fleet.record_corruption("nobody", "decode-0", 62.0)
    fleet.record_corruption("prefill-0", "nobody", 62.0)
    again = [
        change for now_s in (62.0 + LINK_RETRY_S - 1, 62.0 + LINK_RETRY_S) for change in ticked(fleet, now_s)
    ]
    assert again == [SendMessage("decode-0", Peer("prefill-0", "prefill-0/1", {"shm": b"x"}))]
    fleet.on_message("decode-0", linked("prefill-0"), 93.0)
    assert len(fleet.linked_pairs()) == 2


def ticked(fleet: Fleet, now_s: float) -> list[object]:
    for name in fleet.workers:
        fleet.mark_seen(name, now_s)
    return [
        *fleet.check_silence(now_s),
        *fleet.check_silence(now_s),
    ]  # the first may be that of one who slept


def test_while_versions_are_mixed_nobody_is_unfit_who_has_a_partner() -> None:
    fleet = met("prefill-0", "decode-0")
    for worker in ("prefill-1", "decode-1"):
        fleet.on_message(worker, make_hello(worker, fingerprint="new"), 1.0)
        alone = worker == "prefill-1"
        assert list(fleet.find_mismatches()) == (["prefill-1"] if alone else [])
    for worker, peer in (("decode-0", "prefill-0"), ("decode-1", "prefill-1")):
        fleet.on_message(worker, linked(peer), 2.0)
    assert fleet.linked_pairs() == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
    fleet.remove_worker("decode-1", "test")
    assert list(fleet.find_mismatches()) == ["prefill-1"]


def test_a_stranger_is_unfit_until_it_has_a_role() -> None:
    fleet, stranger = Fleet(), msgspec.structs.replace(make_hello("prefill-0"), role="both")
    fleet.on_message("prefill-0", stranger, 0.0)
    assert list(fleet.find_mismatches()) == ["prefill-0"]
    fleet.on_message("prefill-0", make_hello("prefill-0"), 1.0)
    assert fleet.find_mismatches() == {}


# ---- one worker of a name


def twin(link: str = "2") -> Hello:
    """Another process that was given the name decode-0."""
    return make_hello("decode-0", life=9, link=link, pid=77)


def test_a_second_worker_of_a_name_waits_and_is_rejected_while_the_first_one_lives() -> None:
    fleet = met("decode-0")
    assert fleet.on_message("decode-0", twin(), 1.0) == []
    assert fleet.on_message("decode-0", beat("decode-0"), 1.0 + RIVAL_GRACE_S / 2) == [], (
        "it may have been said before"
    )
    changes = fleet.on_message("decode-0", beat("decode-0"), 1.0 + RIVAL_GRACE_S)
    assert kinds(changes) == ["WorkerUnfit", "RejectSession"]
    rejected = changes[1]
    assert isinstance(rejected, RejectSession) and rejected.link == "2" and "pid 1" in rejected.why
    assert fleet.workers["decode-0"].hello.incarnation == "decode-0/1"
    assert [who for who in fleet.find_mismatches() if "pid 77" in who], "the operator is informed"
    assert fleet.on_message("decode-0", beat("decode-0"), 9.0) == []
    for now_s in (9.0, 18.0, 80.0):
        fleet.mark_seen("decode-0", now_s)
        fleet.check_silence(now_s)
    assert fleet.find_mismatches() == {}, "and not for ever"


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_who_waits_for_a_name_gets_it_when_its_holder_is_lost(how: str) -> None:
    fleet = met("decode-0")
    assert fleet.on_message("decode-0", twin(), 1.0) == []
    if how == "closed":
        changes = fleet.remove_worker("decode-0", "its connection is closed")
    else:
        changes = []
        for step in range(4, 60):
            fleet.on_message("decode-0", Heartbeat("decode-0", "decode-0/9", WorkerStats()), step * 0.25)
            changes += fleet.check_silence(step * 0.25)
    assert kinds(changes) == ["WorkerDown", "WorkerUp"] and changes[1] == WorkerUp(
        "decode-0", "decode", "decode-0/9", "2"
    )


def test_a_life_that_was_replaced_is_rejected_when_it_returns() -> None:
    fleet = met("decode-0")
    follows = make_hello(
        "decode-0", life=2, pid=5, ended="crashed"
    )  # its supervisor knows that the first one is over
    assert kinds(fleet.on_message("decode-0", follows, 1.0)) == ["WorkerDown", "WorkerUp"]
    back = msgspec.structs.replace(make_hello("decode-0", life=1, link="9"), ended="crashed")
    assert kinds(fleet.on_message("decode-0", back, 2.0)) == ["WorkerUnfit", "RejectSession"]
    assert fleet.workers["decode-0"].hello.incarnation == "decode-0/2"
    fleet.remove_worker("decode-0", "test")
    assert kinds(fleet.on_message("decode-0", back, 3.0)) == ["WorkerUp"], "there is no other any more"


# ---- a transport that is opened when somebody needs it


def test_a_transport_that_is_wanted_is_opened_and_tried() -> None:
    fleet = met("prefill-0", "decode-0", "decode-1")
    fleet.on_message("decode-1", linked("prefill-0"), 0.0)
    wants = Linked("prefill-0", "prefill-0/1", "", 0.0, 0.0, "no transport reaches it yet", "nixl")
    assert fleet.on_message("decode-0", wants, 1.0) == [SendMessage("prefill-0", OpenTransport("nixl"))]
    assert fleet.linked_pairs() == [("prefill-0", "decode-1")]
    endpoints = {"shm": b"x", "nixl": b"reach me"}
    assert fleet.on_message("prefill-0", Opened("nixl", b"reach me"), 2.0) == [
        SendMessage("decode-0", Peer("prefill-0", "prefill-0/1", endpoints))
    ], "only who could not reach it is informed"
    fleet.on_message("decode-0", linked("prefill-0"), 3.0)
    assert len(fleet.linked_pairs()) == 2
    assert SendMessage("decode-2", Peer("prefill-0", "prefill-0/1", endpoints)) in fleet.on_message(
        "decode-2", make_hello("decode-2"), 4.0
    )


def test_a_transport_that_cannot_be_opened_is_reported() -> None:
    fleet = met("prefill-0", "decode-0")
    wants = Linked("prefill-0", "prefill-0/1", "", 0.0, 0.0, "no transport reaches it yet", "nixl")
    fleet.on_message("decode-0", wants, 1.0)
    assert fleet.on_message("prefill-0", Opened("nixl", b"", "no such device"), 2.0) == []
    assert fleet.workers["decode-0"].link_errors == {"prefill-0": "nixl: no such device"}


# ---- what the gateway and the workers have to agree on


def context_of(**lengths: int) -> tuple[Relay, int | None]:
    """A relay with workers of such contexts ("decode_1_g": of fingerprint "g"), and what they can take."""
    relay = Relay(local_prefill="never")
    for name, length in lengths.items():
        role, number, fingerprint = name.split("_")
        met = make_hello(f"{role}-{number}", fingerprint=fingerprint)
        relay.fleet.on_message(met.worker, msgspec.structs.replace(met, max_model_len=length), 0.0)
    return relay, relay.capabilities.max_model_len


def test_the_workers_context_is_that_of_the_shortest() -> None:
    relay, length = context_of(prefill_0_f=4096, decode_0_f=1024)
    assert length == 1024, "they will be linked"
    relay.fleet.on_message("decode-0", linked("prefill-0"), 0.0)
    assert relay.capabilities.max_model_len == 1024
    relay.fleet.remove_worker("decode-0", "test")
    assert relay.capabilities.max_model_len == 4096
    assert context_of()[1] is None


def test_a_worker_that_fits_no_other_shortens_nothing() -> None:
    relay, length = context_of(prefill_0_f=4096, decode_0_f=2048, decode_1_g=512)
    assert length == 2048
    relay.fleet.on_message("decode-0", linked("prefill-0"), 0.0)
    assert relay.capabilities.max_model_len == 2048
    relay.fleet.remove_worker("decode-0", "test")
    assert relay.capabilities.max_model_len == 4096, (
        "nobody is informed that it asks for too much while it can be restarted"
    )


def test_a_worker_with_another_tokenizer_than_the_gateway_is_unfit() -> None:
    fleet = Fleet(tokenizer="aaaa")
    (unfit,) = fleet.on_message("decode-0", make_hello("decode-0", tokenizer="bbbb"), 0.0)
    assert (
        isinstance(unfit, WorkerUnfit) and "bbbb" in unfit.text and "aaaa" in unfit.text and not fleet.workers
    )
    assert "decode-0" in fleet.find_mismatches()
    assert kinds(fleet.on_message("decode-0", make_hello("decode-0", link="2", tokenizer="aaaa"), 1.0)) == [
        "WorkerUp"
    ]
    assert fleet.find_mismatches() == {}


def test_the_size_of_a_pool_is_known_before_the_first_heartbeat() -> None:
    fleet = met("decode-0")
    stats = fleet.workers["decode-0"].stats
    assert stats.slabs_total == fleet.workers["decode-0"].hello.num_slabs > 0
    assert stats.slabs_used == 0
