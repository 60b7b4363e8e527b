"""A deployment that follows its traffic: a worker is started through Ray, then one changes its role; nothing fails.

And one whose worker is killed while it is to change: that is noted, and the fleet does what it can with the others.

What a step costs is made up, and slow (a profile of the test), so that decisions do not depend on this machine. Traffic
like HumanEval's (short prompts, longer answers) needs two decode workers there, traffic like LongBench's (long prompts,
short answers) two prefill workers, and three devices are all there are.

The first decision is made on a few seconds of traffic, and is not looked at again while the traffic stays the same. If
the machine stands still then, the rate that is seen is too low. So both tests begin with short requests, for which the
first fleet is right at every rate: after a change of traffic the decision is renewed every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import httpx
import pytest

from planner.costs.step import StepCost
from planner.replan.journal import FailedAction, read_journal
from planner.replan.replanner import replay_decisions
from tests.support.deployment import Served, serve, wait_for
from tests.system.batches.batch_lines import COMPLETION, finished, input_file, results, start
from tests.system.replan_load import COST, HUMANEVAL, LONGBENCH, Load, decisions, steered

pytestmark = pytest.mark.timeout(600)

# Here answers cost next to nothing: those that are held are long, and how many of them end is the machine's affair.
READING = StepCost(prefill=(0.0, 0.001, 0.0), decode=((0.002, 0.0, 0.0002),))
HELD = 10  # long answers at a time: so many that no decode worker is ever without one
ACTIONS = "diptych:replan_actions_total"


def roles(served: Served) -> list[str]:
    return sorted(one["role"] for one in served.status()["workers"] if one["state"] == "up")


def again(journal: Path) -> int:
    """How many decisions are in the journal; each comes out the same again."""
    replayed = list(replay_decisions(read_journal(journal)))
    assert all(one.same for one in replayed), "what was decided is what is decided again"
    return len(replayed)


@contextmanager
def batch_beside(served: Served) -> Iterator[None]:
    """A batch of more lines than can be done in the block; at its end it is cancelled, and each line has one result."""
    lines = {f"n{number}": Load._body(number % 97, 32, 8) for number in range(5000)}
    with served.client() as client:
        batch = start(client, input_file(lines.items(), COMPLETION), COMPLETION)
        yield
        client.batches.cancel(batch.id)
        done = finished(client, batch.id)
        good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
        assert done.status == "cancelled" and good.keys() | bad.keys() == lines.keys()
        assert good and not good.keys() & bad.keys()
        assert {one["error"]["code"] for one in bad.values()} == {"batch_cancelled"}
        answers = {name: one["response"]["body"]["choices"][0]["text"] for name, one in good.items()}
        for name in list(answers)[::100]:
            answer = httpx.post(f"{served.url}/v1/completions", json=lines[name], timeout=60).json()
            assert answer["choices"][0]["text"] == answers[name]
        wait_for(lambda: not any(one["stats"]["slabs_lent"] for one in served.status()["workers"]))


@pytest.mark.parametrize("bulk", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fleet_grows_and_switches_with_its_traffic_and_no_request_fails(tmp_path: Path, bulk: bool) -> None:
    """Bulk work beside is no traffic, and goes on at other workers when its own switches."""
    options, journal = steered(tmp_path, COST, "--replan-budget", "3")
    options += ["--data-dir", str(tmp_path / "data")] if bulk else []
    with serve("--prefill", "1", "--decode", "1", *options) as served:
        load = Load(served.url)
        with load.flowing(), batch_beside(served) if bulk else nullcontext():
            wait_for(lambda: decisions(journal))
            load.shape = HUMANEVAL
            wait_for(
                lambda: roles(served) == ["decode", "decode", "prefill"], explain=partial(decisions, journal)
            )
            wait_for(lambda: served.metric(ACTIONS, action="start", outcome="done") == 1)
            load.shape = LONGBENCH
            wait_for(
                lambda: roles(served) == ["decode", "prefill", "prefill"], explain=partial(decisions, journal)
            )
            wait_for(lambda: served.metric(ACTIONS, action="flip", outcome="done") >= 1)
        assert load.wrong == [] and len(load.answers) > 40
        assert served.metric("diptych:replan_alarms_total", what="prompt") >= 1
        assert served.metric("diptych:replan_target_workers", role="prefill") == 2
        wait_for(lambda: served.held() == {})
        served.terminal.expect("replan: start of decode-1 is done")
    assert again(journal) >= 2


def test_a_flip_whose_worker_is_killed_fails_and_the_fleet_goes_on(tmp_path: Path) -> None:
    """It is killed while it drains, with long answers on it: these go on elsewhere, and another worker switches."""
    options, journal = steered(tmp_path, READING)
    with serve("--prefill", "1", "--decode", "2", *options) as served:
        load = Load(served.url, held=HELD)
        with load.flowing():
            wait_for(lambda: decisions(journal))
            load.shape = LONGBENCH
            victims: list[str] = []

            def is_switching() -> bool:
                workers = served.status()["workers"]
                victims.extend(one["worker"] for one in workers if one["state"] == "draining")
                switched = {one["worker"] for one in workers if one["role"] == "prefill"} - {"prefill-0"}
                assert victims or not switched, f"{switched} switched before it was seen to drain"
                return bool(victims)

            wait_for(is_switching, pause_s=0.01, explain=partial(decisions, journal))
            victim = victims[0]
            served.worker(victim).kill()
            wait_for(lambda: served.metric(ACTIONS, action="flip", outcome="failed") == 1)
            load.released.set()
            served.terminal.expect(f"replan: flip of {victim} failed: it came back in its old role")
            wait_for(
                lambda: roles(served) == ["decode", "prefill", "prefill"], explain=partial(decisions, journal)
            )
            wait_for(lambda: served.metric(ACTIONS, action="flip", outcome="done") == 1)
            wait_for(
                lambda: len(served.status()["links"]) == 2
            )  # both prefill workers with the one that decodes
        assert load.wrong == [] and len(load.answers) > 40
        (decoder,) = [one for one in served.status()["workers"] if one["role"] == "decode"]
        assert decoder["worker"] == victim, "another one switched: this one is left alone for a window"
        wait_for(lambda: served.held() == {})
    (failed,) = [line for line in read_journal(journal) if isinstance(line, FailedAction)]
    assert failed.worker == victim and "old role" in failed.why
    assert again(journal) >= 2
