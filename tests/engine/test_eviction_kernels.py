"""The kernels that evict: compiled beside the worker, at which priority, and who waits for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych.kernels import cache
from diptych.messages import Failed
from diptych.process import EXIT_FATAL
from diptych.specs import WorkerSpec
from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from kvcache.pool import KvPool
from tests.engine.cpu.eviction.evicted_runs import FOLDER, SETUP
from tests.engine.evicting_engine import EvictingEngine, answers
from worker import eviction_kernels
from worker.build_cpu import _leader_spec
from worker.eviction_kernels import EvictionKernels, compiler_command
from worker.precompile import precompile_evictions
from worker.ranks import RankSpec
from worker.resolve_model import resolve_model

PATIENCE_S = 120.0
# Notes its priority and its orders, and ends when it may.
COMPILER = """
import json, os, pathlib, sys, time
spec = json.load(sys.stdin)
number = len(list(pathlib.Path(".").glob("run-*")))
while True:
    noted = {"idle": os.sched_getscheduler(0) == os.SCHED_IDLE, "nice": os.nice(0), "worker": spec["worker"]}
    pathlib.Path("new").write_text(json.dumps(noted))
    os.replace("new", f"run-{number}")
    if os.path.exists("may-end"):
        break
    time.sleep(0.02)
pathlib.Path("stored").touch()
"""


class Bench:
    """Kernels that are stored once the compiler has ended, in a folder of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self.loaded: list[str] = []
        self.woken = threading.Event()
        monkeypatch.setattr(eviction_kernels, "is_stored", lambda kernel: Path("stored").exists())
        monkeypatch.setattr(eviction_kernels, "load_stored", self.loaded.append)
        command = [sys.executable, "-c", more.pop("code", COMPILER)]
        self.kernels = EvictionKernels(
            leader(), lambda: ["a", "b"], command, more.pop("available", lambda: 8 << 30)
        )
        self.kernels.notify(self.woken.set)

    def run(self, number: int) -> dict[str, Any]:
        """What a run of the compiler noted, when its priority has been set."""

        def look() -> dict[str, Any] | None:
            path = Path(f"run-{number}")
            return json.loads(path.read_text()) if path.exists() else None

        found: dict[str, Any] = until(look)
        return found

    def is_ready(self) -> bool:
        return self.kernels.ready


def until(look: Callable[[], Any]) -> Any:
    """What `look` returns as soon as it is true."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if found := look():
            return found
        pause.wait(0.02)
    raise AssertionError("it did not come to that")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def worker_spec(**changes: Any) -> WorkerSpec:
    fields: dict[str, Any] = {"worker": "decode-0", "role": "decode", "gateway": "tcp://127.0.0.1:1"}
    fields |= {"keys_dir": "keys", "model": str(FOLDER), "kv_bytes": 64 << 20}
    return WorkerSpec(**fields | changes)


def leader(**changes: Any) -> RankSpec:
    spec = worker_spec(**changes)
    return _leader_spec(spec, resolve_model(spec), None)


def test_they_are_compiled_at_the_lowest_priority_and_loaded_when_a_request_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.kernels.start()
    bench.kernels.start()
    until(lambda: bench.run(0)["idle"] and bench.run(0)["nice"] == 19)
    assert bench.run(0)["worker"] == "decode-0" and not bench.is_ready()
    Path("may-end").touch()
    until(lambda: Path("stored").exists() and bench.kernels._child is None)
    assert not bench.loaded and not bench.is_ready(), "nobody has asked"
    bench.kernels.request()
    assert bench.woken.wait(PATIENCE_S) and bench.is_ready() and bench.loaded == ["a", "b"]
    assert not Path("run-1").exists()
    bench.kernels.close()


def test_a_request_that_waits_for_them_raises_the_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.kernels.start()
    until(lambda: bench.run(0)["idle"])
    bench.kernels.request()
    assert not bench.run(1)["idle"] and bench.run(1)["nice"] == os.nice(0)
    assert not bench.is_ready()
    Path("may-end").touch()
    assert bench.woken.wait(PATIENCE_S) and bench.loaded == ["a", "b"]
    bench.kernels.close()


def test_short_memory_is_left_to_others_until_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def count_free() -> int:
        asked.set()
        return 0

    bench = Bench(monkeypatch, available=count_free)
    bench.kernels.start()
    assert asked.wait(PATIENCE_S)
    assert not Path("run-0").exists()
    Path("may-end").touch()
    bench.kernels.request()
    assert bench.woken.wait(PATIENCE_S) and not bench.run(0)["idle"]
    bench.kernels.close()


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_a_compiler_that_fails_holds_up_no_request(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    bench = Bench(monkeypatch, code=code)
    bench.kernels.request()
    assert bench.woken.wait(PATIENCE_S) and bench.is_ready()
    bench.kernels.close()


def test_nothing_is_left_when_the_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.kernels.close()
    bench.kernels.start()
    assert bench.kernels._thread is None
    bench = Bench(monkeypatch)
    bench.kernels.start()
    bench.run(0)
    child = bench.kernels._child
    bench.kernels.close()
    assert child is not None and child.poll() is not None and not bench.loaded


class Late:
    """Kernels that are ready when the test says so."""

    def __init__(self) -> None:
        self.ready, self.requests = False, 0

    def request(self) -> None:
        self.requests += 1

    def notify(self, wake: Callable[[], None]) -> None:
        self.wake = wake


def test_a_sequence_that_evicts_waits_while_others_decode() -> None:
    late = Late()
    bench = EvictingEngine()
    bench.engine.decisions.preparation = late
    bench.engine.notify(lambda: None)
    evicting, plain = bench.request(1), bench.request(0)
    plain.keep = type(plain.keep)()
    assert not plain.keep.evicts
    bench.engine.add(evicting, 0.0)
    assert not bench.engine.has_work, "it would spin"
    bench.engine.add(plain, 0.0)
    emitted = [one for _ in range(20) for one in bench.step()]
    assert set(answers(emitted)) == {plain.id} and late.requests >= 1 and not evicting.computed
    late.ready = True
    assert set(answers(bench.run())) == {plain.id, evicting.id}


def test_a_sequence_waits_until_its_deadline_at_most() -> None:
    bench = EvictingEngine()
    bench.engine.decisions.preparation = Late()
    evicting = bench.request(1)
    evicting.deadline_s = 5.0
    bench.engine.add(evicting, 0.0)
    (ended,) = bench.run()
    assert isinstance(ended.message, Failed) and ended.message.code == "deadline_exceeded"


@pytest.mark.parametrize("codecs", ["raw", "raw:0.6,nuq3-1%", "tq4", "int8"])
def test_what_is_compiled_beside_a_worker_is_all_that_it_needs(
    codecs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicting on the model itself compiles nothing more, and loads no other types than those that are stored."""
    spec = worker_spec(kv_cache_codec=codecs)
    found = resolve_model(spec)
    precompile_evictions(
        msgspec.json.decode(msgspec.json.encode(_leader_spec(spec, found, None)), type=RankSpec)
    )
    files = Checkpoint.resolve(str(FOLDER))
    pools = [
        (KvPool(layout, 12, first=12 * n), one.calibration)
        for n, (layout, one) in enumerate(zip(found.layouts, found.classes, strict=True))
    ]
    (pool, calibration), *others = pools
    runner = CpuModelRunner.load(files, pool, 512, calibration, others=others, eviction=SETUP)
    kernels = runner.rank_evictor.list_kernels()
    assert kernels and all(map(cache.is_stored, kernels))
    runner.warm(evict=False)
    before = [
        set(kernel.signatures) for kernel in kernels
    ]  # earlier tests of this process may have used others

    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel is missing")

    monkeypatch.setattr(cache._KernelCache, "_load_or_compile", refuse)
    runner.warm(evict=True)
    assert all(
        kernel.signatures and len(set(kernel.signatures) - known) <= 1
        for kernel, known in zip(kernels, before, strict=True)
    )


def test_a_compiler_whose_worker_is_gone_before_it_runs_ends() -> None:
    *command, worker = compiler_command()
    assert worker == str(os.getpid())
    assert subprocess.run([*command, "1"], stdin=subprocess.DEVNULL, check=False).returncode == EXIT_FATAL
