"""A worker that is told to end or to change pool: what it still takes, what it says, what has to be free."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.config import WorkerSpec
from diptych.keys import make_keys
from diptych.messages import Drain, Failed, Generate, Stats, ToGateway, ToWorker, Turn, Welcome
from diptych.request import Sampling
from engine.loop import Engine
from engine.scheduler import Limits, Scheduler, Sequence
from kvcache.holdings import Holdings
from kvcache.layout import KVLayout
from kvcache.prefix_tree import PrefixTree
from kvcache.slabs import Slabs
from kvtransfer.parts import whole
from services.worker import compose
from tests.unit.engine.fakes import FakeRunner, FakeSampler
from worker.shell import Books, Order, Shell, since
from worker.start import Voice


class Line:
    """A gateway that says what is listed, turn by turn, and moves the clock as far as the worker would wait."""

    def __init__(self) -> None:
        self.gateway_lost = False
        self.said: list[ToGateway] = []
        self.orders: list[list[ToWorker]] = []
        self.now_s = 0.0

    def send(self, message: ToGateway) -> None:
        self.said.append(message)

    def poll(self, timeout_s: float) -> list[ToWorker]:
        if self.orders:
            return self.orders.pop(0)
        self.now_s += timeout_s
        return []

    def wake(self) -> None:
        pass


class Role:
    """Holds the names of what it was given until they are taken away from it."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.lands = True  # whether what was abandoned is let go of at the next `tend`
        self.abandoned = False

    def begin(self, order: Order, seq: Sequence, now_s: float) -> None:
        self.kept[order.request] = order.epoch

    def take(self, message: ToWorker, now_s: float) -> None: ...

    def let_go(self, seq: Sequence, now_s: float) -> None: ...

    def tend(self, now_s: float) -> float | None:
        if self.abandoned and self.lands:
            self.kept.clear()
        return None

    def abort(self, request: str, epoch: int) -> None:
        if self.kept.get(request, epoch + 1) <= epoch:
            del self.kept[request]

    def abandon(self) -> list[tuple[str, int]]:
        ended, self.abandoned = list(self.kept.items()), True
        return ended

    @property
    def holds(self) -> bool:
        return bool(self.kept)

    def books(self, stats: Stats) -> Stats:
        return stats


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def role() -> Role:
    return Role()


@pytest.fixture
def shell(line: Line, role: Role) -> Shell:
    holdings = Holdings(Slabs(8), PrefixTree())
    engine = Engine(FakeRunner(8), Scheduler(Limits(num_slabs=8, max_model_len=256)), holdings, FakeSampler())
    return Shell(line, engine, role, holdings, Books(), drain_s=10.0, clock=lambda: line.now_s)


def order(request: str) -> Generate:
    return Generate(request, 0, [5, 6, 7], [], Sampling(max_tokens=4, seed=0), 60.0)


def test_a_worker_that_holds_nothing_turns_at_once(line: Line, shell: Shell) -> None:
    line.orders = [[Turn("prefill")]]
    shell.run()
    shell.settle()
    assert (shell.turned, line.now_s, line.said) == ("prefill", 0.0, [])


def test_it_waits_for_what_it_holds_and_takes_nothing_new(line: Line, role: Role, shell: Shell) -> None:
    line.orders = [[order("a")], [Turn("prefill"), order("b")]]
    shell.turn()
    before = shell.books.stats
    shell.turn()
    assert (before.draining, shell.books.stats.draining, role.kept) == (False, True, {"a": 0})
    assert line.said == [Failed("b", 0, "draining", "the worker is about to end")]
    role.kept.clear()  # fetched
    shell.run()
    assert shell.turned == "prefill" and line.now_s < 10.0 and len(line.said) == 1


def test_what_is_left_after_its_patience_fails_as_draining(line: Line, role: Role, shell: Shell) -> None:
    line.orders = [[order("a")], [Turn("prefill")]]
    shell.run()
    assert line.said == [Failed("a", 0, "draining", "the worker had to end")]
    assert line.now_s == pytest.approx(10.0)
    shell.settle()
    assert shell.turned == "prefill"


def test_a_role_that_does_not_let_go_ends_the_process(line: Line, role: Role, shell: Shell) -> None:
    role.lands = False
    line.orders = [[order("a")], [Turn("prefill")]]
    shell.run()
    with pytest.raises(RuntimeError, match="still holds"):
        shell.settle()


def test_slabs_that_are_left_end_the_process(line: Line, shell: Shell) -> None:
    assert isinstance(shell.holdings, Holdings)
    line.orders = [[Turn("prefill")]]
    shell.run()
    shell.holdings.take("nobody", 1)
    with pytest.raises(RuntimeError, match="slabs are used"):
        shell.settle()


@pytest.mark.parametrize(
    ("orders", "turned"),
    [
        ([Turn("prefill"), Turn("decode")], "prefill"),  # the first one counts
        ([Turn("prefill"), Drain()], ""),  # the end counts more
        ([Drain(), Turn("prefill")], ""),
        ([Turn("juggler"), Drain()], ""),
    ],
)
def test_of_several_orders_one_counts(line: Line, shell: Shell, orders: list[ToWorker], turned: str) -> None:
    line.orders = [orders]
    shell.run()
    assert shell.turned == turned


def test_a_new_life_counts_from_its_beginning() -> None:
    parts = {"run": 3.0, "send": 1.0}
    then = Stats(steps=4, step_seconds=4.0, step_tokens=40, prefix_queries=64, step_parts=parts)
    now = Stats(
        slabs_used=2,
        steps=5,
        step_seconds=6.0,
        step_tokens=45,
        prefix_queries=128,
        prefix_hits=64,
        preemptions={"park": 1},
        step_parts={"run": 4.5, "send": 1.5},
    )
    assert since(now, then) == Stats(
        slabs_used=2,
        steps=1,
        step_seconds=2.0,
        step_tokens=5,
        prefix_queries=64,
        prefix_hits=64,
        preemptions={"park": 1},
        step_parts={"run": 1.5, "send": 0.5},
    )
    assert since(now, Stats()) is now


def test_an_unknown_role_changes_nothing(line: Line, shell: Shell) -> None:
    line.orders = [[Welcome("g", 0.5, 10.0), Turn("juggler")]]
    shell.turn()
    assert not shell.over and not shell.books.stats.draining


def test_a_signal_while_a_worker_changes_pools_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two roles nobody is there to be drained: no other role begins, and none without a name."""

    class Turned:
        """Asked to become a prefill worker; then the signal comes, which takes that back."""

        role = "prefill"

        @property
        def turned(self) -> str:
            told, self.role = self.role, ""
            signal.raise_signal(signal.SIGTERM)
            return told

    make_keys(tmp_path)
    roles: list[str] = []
    said = io.StringIO()
    monkeypatch.setattr(compose, "_live", lambda life, will, voice: Turned())
    parts = whole(KVLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32"), memoryview(bytearray(2048)))
    built: Any = SimpleNamespace(parts=parts, memories=[], close=lambda: None, suit=roles.append)
    spec = WorkerSpec(worker="w", role="decode", gateway="", keys_dir=str(tmp_path), model="")
    before = signal.getsignal(signal.SIGTERM)
    try:
        status = compose.run(spec, Voice(said), built)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (status, roles, said.getvalue()) == (0, ["decode"], "")
