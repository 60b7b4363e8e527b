"""A selection of the fault matrix on real processes (all of it: `make faults`), and proofs that the checks can see.

Batches run beside the requests.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.step_work import StepWork
from tests.faults import proxy
from tests.faults.client import ClientAnswer
from tests.faults.fault_deployment import DeploymentShape, FaultDeployment
from tests.faults.inject import FaultUnproven, KillFault, ProxyFault, StopFault
from tests.faults.invariants import check_answers, check_log, check_run
from tests.faults.run import run_scenario
from tests.faults.scenario import SCENARIO_FOLDER, FaultEvent, read_scenario, read_scenarios, with_bulk
from tests.faults.toy_model import (
    CODED,
    ToyOracle,
    ToyPool,
    ToyRunner,
    grammar_tokenizer,
    make_logits,
    toy_layout,
)
from tests.faults.workload import RequestBook

pytestmark = pytest.mark.timeout(900)


STRUCK = (
    FaultEvent("kill", "prefill-0", 0.2),
    FaultEvent("kill", "decode-0", 0.2),
    FaultEvent("stop", "decode-1", 3.0),
    FaultEvent("partition", "prefill-1", 3.0),
    FaultEvent("slow", "decode-0", 2.0),
    FaultEvent("kill", "gateway", 0.2, spares=False),
)


def test_faults_in_every_phase_cost_no_client_an_answer_while_a_spare_is_left() -> None:
    scenario = read_scenario(SCENARIO_FOLDER / "kill.yaml")
    few = msgspec.structs.replace(scenario, events=STRUCK, phases=dict.fromkeys(scenario.phases, 2))
    result = run_scenario(with_bulk(few, 40))
    assert not result.broken, "\n".join(result.broken)
    assert result.figures["client_failures"] == 0 and result.figures["bulk_lines"] > 0
    assert {cell.phase for cell in result.cells} == set(scenario.phases), result.missed
    assert len(result.evidence) == len(STRUCK) and sum(cell.hit for cell in result.cells) > 0
    assert result.summary.failures > 0, "a gateway was killed, and nobody noticed"


def test_all_scenario_files_can_be_read() -> None:
    assert {scenario.name for scenario in read_scenarios()} >= {
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


@pytest.mark.parametrize("codec", ["", CODED])
def test_every_byte_of_the_prefix_changes_the_next_token(codec: str) -> None:
    layout = toy_layout(codec)
    tokens = [1 + byte for byte in b"any prompt at all, longer than a chunk" * 3]
    memory = ToyPool(bytearray(4 * layout.chunk_bytes), layout)
    from_slabs = [2, 0, 1]
    ToyRunner(memory).run([StepWork(tokens, 0, from_slabs, "last")])
    before = make_logits(memory.read(from_slabs, len(tokens)))
    raw = memory.words.view("uint8").reshape(4, -1)
    whole = range(0, layout.chunk_bytes, 997)
    for slab, places in ((2, whole), (0, range(0, 128, 9))):
        for place in places:
            raw[slab, place] ^= 1
            if (make_logits(memory.read(from_slabs, len(tokens))) == before).all():
                assert slab == 0, f"byte {place} of a full chunk is not looked at"
            raw[slab, place] ^= 1
    assert (make_logits(memory.read(from_slabs, len(tokens))) == before).all()
    assert (make_logits(memory.read([0, 2, 1], len(tokens))) != before).any(), (
        "chunks that change places go unseen"
    )


def test_slices_and_company_do_not_change_an_answer() -> None:
    book = RequestBook(5)
    ask = book.ask(prompt=(150, 150), kind="penalised")
    oracle = ToyOracle(grammar_tokenizer())
    assert oracle.answer(ask.prompt, ask.sampling) == ToyOracle(grammar_tokenizer()).answer(
        ask.prompt, ask.sampling
    )
    assert oracle.answer(ask.prompt[:-1], ask.sampling) != oracle.answer(ask.prompt, ask.sampling)


def answered(book: RequestBook, text: str, ends: list[str]) -> ClientAnswer:
    ask = book.ask(kind="greedy")
    expected = book.expected(ask)
    usage = [{"completion_tokens": expected.completion_tokens, "prompt_tokens": len(ask.prompt)}]
    answer = ClientAnswer(
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
    book = RequestBook(3)
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
    found = [line.split()[1] for line in check_log(log)]
    assert (word in found) if word else not found


def test_a_run_without_its_log_proves_nothing(tmp_path: Path) -> None:
    book, log = RequestBook(3), tmp_path / "requests.jsonl"
    answer = answered(book, "right", ["finish", "done"])
    answer.id = "cmpl-1"
    assert [line.split()[0] for line in check_run(book, [answer], log).broken] == ["I3"]
    events = [{**ARRIVED, "request": "cmpl-1.0"}, {**ENDED, "request": "cmpl-1.0", "output_tokens": 0}]
    log.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    assert not check_run(book, [answer], log).broken
    assert check_run(book, [answer], tmp_path / "none", cut=True).broken == []


def test_a_fault_that_did_not_happen_is_not_believed(tmp_path: Path) -> None:
    fleet = FaultDeployment(tmp_path, DeploymentShape(prefill=1, decode=1))
    try:
        for fault in (StopFault(fleet, "decode-0"), KillFault(fleet, "decode-0")):
            with pytest.raises(FaultUnproven):
                fault.verify()
        with proxy.running_proxy(tmp_path) as wires:
            line = wires.line("nobody", "127.0.0.1", fleet.port)
            for kind in ("partition", "slow", "cut"):
                wire = ProxyFault({"nobody": line}, "nobody", kind)
                wire.strike()
                wire.heal()
                with pytest.raises(FaultUnproven):
                    wire.verify()
    finally:
        fleet.stop()
