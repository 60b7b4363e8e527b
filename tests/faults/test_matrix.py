"""A selection of the fault matrix on real processes (all of it: `make faults`), and proofs that the checks can see."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.work import Work
from tests.faults import proxy
from tests.faults.check import check_answers, check_log, check_run
from tests.faults.client import Answer
from tests.faults.fleet import Fleet, Shape
from tests.faults.inject import Kill, Stop, Unproven, Wire
from tests.faults.load import Book
from tests.faults.run import run
from tests.faults.scenario import FOLDER, Event, all_of, read
from tests.faults.toy_model import LAYOUT, Memory, Oracle, ToyRunner, guide, logits

pytestmark = pytest.mark.timeout(900)


STRUCK = (
    Event("kill", "prefill-0", 0.2),
    Event("kill", "decode-0", 0.2),
    Event("stop", "decode-1", 3.0),
    Event("partition", "prefill-1", 3.0),
    Event("slow", "decode-0", 2.0),
    Event("kill", "gateway", 0.2, spares=False),
)


def test_faults_in_every_phase_cost_no_client_an_answer_while_a_spare_is_left() -> None:
    scenario = read(FOLDER / "kill.yaml")
    few = msgspec.structs.replace(scenario, events=STRUCK, phases=dict.fromkeys(scenario.phases, 2))
    result = run(few)
    assert not result.broken, "\n".join(result.broken)
    assert result.figures["client_failures"] == 0
    assert {cell.phase for cell in result.cells} == set(scenario.phases), result.missed
    assert len(result.evidence) == len(STRUCK) and sum(cell.hit for cell in result.cells) > 0
    assert result.verdict.failures > 0, "a gateway was killed, and nobody noticed"


def test_all_scenario_files_can_be_read() -> None:
    assert {scenario.name for scenario in all_of()} >= {
        "kill",
        "stop",
        "partition",
        "slow",
        "link",
        "migrate",
        "leave",
        "chaos",
    }


# ---- the proving ground sees


def test_every_byte_of_the_prefix_changes_the_next_token() -> None:
    tokens = [1 + byte for byte in b"any prompt at all, longer than a chunk" * 3]
    memory = Memory(bytearray(4 * LAYOUT.chunk_bytes))
    from_slabs = [2, 0, 1]
    ToyRunner(memory).run([Work(tokens, 0, from_slabs, "last")])
    before = logits(memory.read(from_slabs, len(tokens)))
    raw = memory.words.view("uint8").reshape(4, -1)
    whole = range(0, LAYOUT.chunk_bytes, 997)
    for slab, places in ((2, whole), (0, range(0, 128, 9))):
        for place in places:
            raw[slab, place] ^= 1
            if (logits(memory.read(from_slabs, len(tokens))) == before).all():
                assert slab == 0, f"byte {place} of a full chunk is not looked at"
            raw[slab, place] ^= 1
    assert (logits(memory.read(from_slabs, len(tokens))) == before).all()
    assert (logits(memory.read([0, 2, 1], len(tokens))) != before).any(), (
        "chunks that change places go unseen"
    )


def test_slices_and_company_do_not_change_an_answer() -> None:
    book = Book(5)
    ask = book.ask(prompt=(150, 150), kind="penalised")
    oracle = Oracle(guide())
    assert oracle.answer(ask.prompt, ask.sampling) == Oracle(guide()).answer(ask.prompt, ask.sampling)
    assert oracle.answer(ask.prompt[:-1], ask.sampling) != oracle.answer(ask.prompt, ask.sampling)


def answered(book: Book, text: str, ends: list[str]) -> Answer:
    ask = book.ask(kind="greedy")
    expected = book.expected(ask)
    usage = [{"completion_tokens": expected.completion_tokens, "prompt_tokens": len(ask.prompt)}]
    answer = Answer(
        ask, 200, text=expected.text if text == "right" else text, finish=expected.finish, ends=ends
    )
    answer.usage = usage if answer.whole else []
    return answer


@pytest.mark.parametrize(
    ("text", "ends", "word"),
    [
        ("right", ["finish", "done"], ""),
        ("wrong", ["finish", "done"], "I2"),
        ("wrong", ["cut"], "I2"),
        ("", [], "I3"),
        ("", ["error", "finish"], "I3"),
        ("", ["hang"], "I12"),
    ],
)
def test_answers_that_must_not_be_are_seen(text: str, ends: list[str], word: str) -> None:
    book = Book(3)
    broken = check_answers(book, [answered(book, text, ends)]).broken
    assert [line.split()[0] for line in broken] == ([word] if word else [])


ARRIVED = {"t": 0.0, "event": "arrive", "request": "r", "prompt_tokens": 5}
BOTH: dict[str, object] = {"event": "tokens", "count": 2, "total": 2}
ENDED = {"t": 9.0, "event": "end", "request": "r", "outcome": "done", "output_tokens": 2}


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([BOTH], ""),
        ([{"event": "tokens", "count": 2, "total": 3}], "I2"),
        ([{"event": "tokens", "count": 1, "total": 1}], "I4"),
        ([BOTH, {**ENDED, "t": 1.0}], "I3"),
        ([BOTH, {"event": "stage", "stage": "decoding"}], "I9"),
        ([BOTH, {"event": "begin", "epoch": 1}, {"event": "begin", "epoch": 0}], "I9"),
        ([BOTH, *[{"event": "retried", "epoch": n} for n in range(12)]], "I10"),
        ([{"event": "tokens", "count": 2, "total": 2, "t": -70.0}], "I12"),
    ],
)
def test_logs_that_must_not_be_are_seen(events: list[dict[str, object]], word: str) -> None:
    log = [ARRIVED, *({"t": 1.0, "request": "r", **event} for event in events), ENDED]
    told = [line.split()[1] for line in check_log(log)]
    assert (word in told) if word else not told


def test_a_run_without_its_log_proves_nothing(tmp_path: Path) -> None:
    book, log = Book(3), tmp_path / "requests.jsonl"
    answer = answered(book, "right", ["finish", "done"])
    answer.id = "cmpl-1"
    assert [line.split()[0] for line in check_run(book, [answer], log).broken] == ["I3"]
    events = [{**ARRIVED, "request": "cmpl-1.0"}, {**ENDED, "request": "cmpl-1.0", "output_tokens": 0}]
    log.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    assert not check_run(book, [answer], log).broken
    assert check_run(book, [answer], tmp_path / "none", cut=True).broken == []


def test_a_fault_that_did_not_happen_is_not_believed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, Shape(prefill=1, decode=1))
    try:
        for fault in (Stop(fleet, "decode-0"), Kill(fleet, "decode-0")):
            with pytest.raises(Unproven):
                fault.verify()
        with proxy.running(tmp_path) as wires:
            line = wires.line("nobody", "127.0.0.1", fleet.port)
            for kind in ("partition", "slow", "cut"):
                wire = Wire({"nobody": line}, "nobody", kind)
                wire.strike()
                wire.heal()
                with pytest.raises(Unproven):
                    wire.verify()
    finally:
        fleet.stop()
