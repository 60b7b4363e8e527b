"""A worker that is asked to end or to change pool: what it still takes, what it says, what has to be free."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from diptych.channel.keys import make_keys
from diptych.errors import WorkerRejected
from diptych.messages import (
    Drain,
    Failed,
    Generate,
    Reject,
    SwitchRole,
    ToWorker,
    Welcome,
    WorkerStats,
)
from diptych.process import SupervisorPipe
from diptych.request import SamplingParams
from diptych.specs import WorkerSpec
from engine.loop import Engine
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.layout import KvLayout
from kvcache.prefix_tree import PrefixTree, chunk_keys, root_key
from kvcache.slab_ledger import SlabLedger
from kvtransfer.resharding import ShardedPool, unsharded_pool
from kvtransfer.transfer_buffer import TransferBuffer
from services.worker import role_lifecycle
from tests.unit.engine.fakes import FakeRunner, FakeSampler
from tests.unit.worker.fake_role import FakeGatewayLink, FakeRole
from worker.loop import LatestStats, WorkerLoop


@pytest.fixture
def line() -> FakeGatewayLink:
    return FakeGatewayLink()


@pytest.fixture
def role() -> FakeRole:
    return FakeRole()


@pytest.fixture
def shell(line: FakeGatewayLink, role: FakeRole) -> WorkerLoop:
    holdings = KvAllocator(SlabLedger(8), PrefixTree())
    engine = Engine(
        FakeRunner(8), Scheduler(EngineLimits(num_slabs=8, max_model_len=256)), holdings, FakeSampler()
    )
    return WorkerLoop(line, engine, role, holdings, LatestStats(), drain_s=10.0, clock=lambda: line.now_s)


def order(request: str) -> Generate:
    return Generate(request, 0, [5, 6, 7], [], SamplingParams(max_tokens=4, seed=0), 60.0)


def test_a_worker_that_holds_nothing_switches_at_once(line: FakeGatewayLink, shell: WorkerLoop) -> None:
    line.orders = [[SwitchRole("prefill")]]
    shell.run_until_drained()
    shell.check_settled()
    assert (shell.next_role, line.now_s, line.said) == ("prefill", 0.0, [])


def test_it_waits_for_what_it_holds_and_takes_nothing_new(
    line: FakeGatewayLink, role: FakeRole, shell: WorkerLoop
) -> None:
    line.orders = [[order("a")], [SwitchRole("prefill"), order("b")]]
    shell.run_once()
    before = shell.latest_stats.stats
    shell.run_once()
    assert (before.draining, shell.latest_stats.stats.draining, role.kept) == (False, True, {"a": 0})
    assert line.said == [Failed("b", 0, "draining", "the worker is about to end")]
    role.kept.clear()  # fetched
    shell.run_until_drained()
    assert shell.next_role == "prefill" and line.now_s < 10.0 and len(line.said) == 1


def test_what_is_left_after_its_patience_fails_as_draining(
    line: FakeGatewayLink, role: FakeRole, shell: WorkerLoop
) -> None:
    line.orders = [[order("a")], [SwitchRole("prefill")]]
    shell.run_until_drained()
    assert line.said == [Failed("a", 0, "draining", "the worker had to end")]
    assert line.now_s == pytest.approx(10.0)
    shell.check_settled()
    assert shell.next_role == "prefill"


def test_a_role_that_does_not_let_go_ends_the_process(
    line: FakeGatewayLink, role: FakeRole, shell: WorkerLoop
) -> None:
    role.lands = False
    line.orders = [[order("a")], [SwitchRole("prefill")]]
    shell.run_until_drained()
    with pytest.raises(RuntimeError, match="still holds"):
        shell.check_settled()


def test_slabs_that_are_left_end_the_process(line: FakeGatewayLink, shell: WorkerLoop) -> None:
    assert isinstance(shell.books, KvAllocator)
    line.orders = [[SwitchRole("prefill")]]
    shell.run_until_drained()
    shell.books.allocate("nobody", 1)
    with pytest.raises(RuntimeError, match="slabs are used"):
        shell.check_settled()


@pytest.mark.parametrize(
    ("orders", "next_role"),
    [
        ([SwitchRole("prefill"), SwitchRole("decode")], "prefill"),  # the first one counts
        ([SwitchRole("prefill"), Drain()], ""),  # the end counts more
        ([Drain(), SwitchRole("prefill")], ""),
        ([SwitchRole("juggler"), Drain()], ""),
    ],
)
def test_of_several_orders_one_counts(
    line: FakeGatewayLink, shell: WorkerLoop, orders: list[ToWorker], next_role: str
) -> None:
    line.orders = [orders]
    shell.run_until_drained()
    assert shell.next_role == next_role


def test_a_new_life_counts_from_its_beginning() -> None:
    parts = {"run": 3.0, "send": 1.0}
    then = WorkerStats(
        steps=4, step_seconds=4.0, step_tokens=40, prefix_queries=64, step_parts=parts, seat_pauses=3
    )
    now = WorkerStats(
        slabs_used=2,
        steps=5,
        step_seconds=6.0,
        step_tokens=45,
        prefix_queries=128,
        prefix_hits=64,
        preemptions={"park": 1},
        step_parts={"run": 4.5, "send": 1.5},
        seat_pauses=5,
    )
    assert now.since(then) == WorkerStats(
        slabs_used=2,
        steps=1,
        step_seconds=2.0,
        step_tokens=5,
        prefix_queries=64,
        prefix_hits=64,
        preemptions={"park": 1},
        step_parts={"run": 1.5, "send": 0.5},
        seat_pauses=2,
    )
    assert now.since(WorkerStats()) is now


def test_an_unknown_role_changes_nothing(line: FakeGatewayLink, shell: WorkerLoop) -> None:
    line.orders = [[Welcome("g", 0.5, 10.0), SwitchRole("juggler")]]
    shell.run_once()
    assert not shell.is_over and not shell.latest_stats.stats.draining


def made_parts(pool: ShardedPool, engine: Any = None, **fields: Any) -> role_lifecycle.WorkerParts:
    """The parts of a worker whose pool is in no shared memory; without `engine` it computes nothing."""
    known: dict[str, Any] = {"kv": None, "fingerprint": "f", "identity": {}, "max_model_len": 192} | fields
    return role_lifecycle.WorkerParts(engine=engine, pool=pool, memories=[], close=lambda: None, **known)


def test_a_signal_while_a_worker_changes_pools_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two roles nobody is there to be drained: no other role begins, and none without a name."""

    class SwitchingLoop:
        """Asked to become a prefill worker; then the signal comes, which takes that back."""

        role = "prefill"

        @property
        def next_role(self) -> str:
            wanted, self.role = self.role, ""
            signal.raise_signal(signal.SIGTERM)
            return wanted

    make_keys(tmp_path)
    roles: list[str] = []
    said = io.StringIO()
    monkeypatch.setattr(role_lifecycle, "_serve_role", lambda life, will, voice: SwitchingLoop())
    pool = unsharded_pool(
        KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32"), memoryview(bytearray(2048))
    )
    parts = made_parts(pool, tune_for=roles.append)
    spec = WorkerSpec(worker="w", role="decode", gateway="", keys_dir=str(tmp_path), model="")
    before = signal.getsignal(signal.SIGTERM)
    try:
        status = role_lifecycle.run_worker(spec, SupervisorPipe(said), parts)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (status, roles, said.getvalue()) == (0, ["decode"], "")


def test_kv_of_two_codecs_never_meets_in_a_tree(line: FakeGatewayLink, role: FakeRole) -> None:
    """The same prompt in one tree: what one class publishes, no other class finds. Raw addresses have no codec."""
    codecs = ["", "fp16", "int8.g32", "nuq4-1%.g128@" + "0" * 16, "nuq4-1%.g128@" + "1" * 16]
    holdings, prompt = KvAllocator(SlabLedger(8), PrefixTree()), list(range(64))
    limits = EngineLimits(num_slabs=8, max_model_len=256)
    for number, codec in enumerate(codecs):
        engine = Engine(FakeRunner(8), Scheduler(limits), holdings, FakeSampler())
        loop = WorkerLoop(
            line, engine, role, holdings, LatestStats(), fingerprint="model", codecs={codec or "raw": codec}
        )
        line.orders = [[msgspec.structs.replace(order(f"{number}"), prompt=prompt)]]
        loop.run_once()
        keys = chunk_keys(prompt, role.begun[-1].root)
        assert holdings.count_cached(keys) == 0
        holdings.publish(f"{number}#0", keys, holdings.allocate(f"{number}#0", 1))
        assert holdings.count_cached(keys) == 1
    assert role.begun[0].root == root_key("model", "")
    assert len({seq.root for seq in role.begun}) == len(codecs) == holdings.used


@pytest.mark.parametrize("codec", ["", "int4.g2"])
def test_a_worker_says_which_class_of_kv_it_has(codec: str) -> None:
    layout = KvLayout(layers=2, kv_heads=1, head_dim=2, dtype="float32", codec=codec)
    pool = unsharded_pool(layout, memoryview(bytearray(3 * layout.chunk_bytes)))
    parts = made_parts(
        pool, kv=KvAllocator(SlabLedger(3)), kv_losses={"int4.g2": 0.5}, kv_auto=True, keep_classes=("raw",)
    )
    spec = WorkerSpec(worker="w", role="decode", gateway="", keys_dir="", model="")
    life: Any = SimpleNamespace(parts=parts, spec=spec, role="decode")
    hello = role_lifecycle.make_hello(life, {})
    assert hello.kv_classes == {codec or "raw": (3, layout.chunk_bytes)}
    assert (hello.num_slabs, hello.chunk_bytes) == (3, layout.chunk_bytes)
    assert hello.kv_losses == {"int4.g2": 0.5} and hello.kv_auto
    assert hello.keep_classes == ["raw"] and hello.block_tokens == 0


@pytest.mark.parametrize(("saturation", "waiting"), [(0, 8192), (1500, 3000), (5000, 8192)])
def test_two_steps_of_prompts_may_wait_at_a_worker_on_a_device(saturation: int, waiting: int) -> None:
    """Else its large steps would never be full, and it would idle until the gateway hears of the last one's end."""
    layout = KvLayout(layers=2, kv_heads=1, head_dim=2, dtype="float32")
    pool = unsharded_pool(layout, memoryview(bytearray(3 * layout.chunk_bytes)))
    limits = EngineLimits(3, 192, 256, 4096, saturation_tokens=saturation)
    kv, buffer = KvAllocator(SlabLedger(9)), TransferBuffer(layout, layout.chunk_bytes)
    engine = Engine(FakeRunner(9), Scheduler(limits), kv, FakeSampler())
    parts = made_parts(pool, engine, kv=kv, buffer=buffer)
    spec = WorkerSpec(worker="w", role="prefill", gateway="", keys_dir="", model="")
    life: Any = SimpleNamespace(parts=parts, spec=spec, role="prefill")
    hello = role_lifecycle.make_hello(life, {})
    buffer.close()
    assert (hello.block_tokens, hello.block_sequences, hello.num_slabs) == (waiting, 0, 9)


def test_a_worker_that_is_rejected_ends_and_says_why(line: FakeGatewayLink, shell: WorkerLoop) -> None:
    line.orders = [[Reject("there is a living worker decode-0 on host (pid 7)")]]
    with pytest.raises(WorkerRejected) as caught:
        shell.run_until_drained()
    assert "pid 7" in caught.value.why and "--name" in caught.value.fix


def test_nothing_is_computed_for_a_gateway_that_does_not_get_on(
    line: FakeGatewayLink, shell: WorkerLoop
) -> None:
    assert isinstance(shell.engine, Engine)
    shell.engine.add(Sequence("a", 0, [5, 6, 7], SamplingParams(max_tokens=4, seed=0), 60.0), 0.0)
    line.is_congested = True
    before = shell.engine.stats.steps
    shell.run_once()
    assert shell.engine.stats.steps == before and shell.max_wait_s > 0, "and it waits, it does not spin"
    line.is_congested = False
    assert shell.max_wait_s == 0
    shell.run_once()
    assert shell.engine.stats.steps == before + 1
