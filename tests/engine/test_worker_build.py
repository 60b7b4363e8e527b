"""What a worker refuses before it reads any weights, and what it does without when it is built."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from diptych.errors import ConfigError, DiptychError, ModelError
from diptych.specs import WorkerSpec
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits
from engine.step_work import StepWork
from kvcache.allocator import KvAllocator
from kvcache.slab_ledger import SlabLedger
from tests.support.factories import make_folder
from worker.build_cpu import _eviction_setup
from worker.resolve_model import load_tokenizer, resolve_model
from worker.role_tuning import RoleTuning, choose_step_clock
from worker.saturation_store import SaturationStore

ROOT = Path(__file__).resolve().parents[2]


def spec(folder: Path, **changes: object) -> WorkerSpec:
    fields: dict[str, object] = {
        "worker": "decode-0",
        "role": "decode",
        "gateway": "tcp://127.0.0.1:1",
        "keys_dir": "keys",
        "model": str(folder),
        "kv_bytes": 8 << 20,
    }
    return WorkerSpec(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"device": "cuda"}, ConfigError, "cuda"),
        ({"device": "cuda", "kv_cache_codec": "tq4"}, ConfigError, "cuda"),
        ({"dtype": "float16"}, ConfigError, "float16"),
        ({"max_num_seqs": 600}, ConfigError, "512 tokens is too small for 600 requests"),
        ({"max_model_len": 100_000}, ModelError, "100000 tokens"),
        ({"kv_bytes": 64 << 10}, ModelError, "does not fit"),
        ({"tp": 4}, ModelError, "cannot be split into 1 stages of 4 ranks"),  # it has 2 KV heads
        ({"pp": 3}, ModelError, "cannot be split into 3 stages of 1 ranks"),  # and 2 layers
        ({"tp": 1024, "pp": 2}, ConfigError, "2048 ranks are too many"),
    ],
)
def test_refusals_name_what_is_wrong(
    folder: Path, changes: dict[str, object], kind: type[DiptychError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        resolve_model(spec(folder, **changes))
    assert caught.value.fix and len(caught.value.lines()) <= 6


def test_the_longest_request_and_the_pool_are_what_was_asked_for(folder: Path) -> None:
    found = resolve_model(spec(folder))
    assert sum(found.pool_sizes) == found.plan.num_slabs * found.layout.chunk_bytes <= 8 << 20
    assert found.plan.max_model_len == 512


class Stepless:
    """An engine whose runner only counts its steps."""

    def __init__(self, num_slabs: int) -> None:
        self.steps = 0
        self.runner = self
        self.scheduler = Scheduler(EngineLimits(num_slabs, 512, 8, 512))

    def run(self, works: list[StepWork]) -> None:
        self.steps += 1


def test_the_saturation_is_measured_once_for_all_processes(tmp_path: Path) -> None:
    holdings = KvAllocator(SlabLedger(16))

    def tuned(role: str) -> tuple[int, int]:
        """(steps of measuring, tokens of a step) of a new process in `role`."""
        engine = Stepless(16)
        store = SaturationStore(tmp_path, "model")
        RoleTuning(engine, holdings, store, time.monotonic).tune_for(role)  # type: ignore[arg-type]
        return engine.steps, engine.scheduler.limits.saturation_tokens

    assert tuned("decode") == (0, 0)
    steps, tokens = tuned("prefill")
    assert steps > 0 and tokens > 0
    assert tuned("prefill") == (0, tokens)


class Disturbed(Stepless):
    """An engine that is kept from its core in every step of more than 32 tokens."""

    def run(self, works: list[StepWork]) -> None:
        (work,) = works
        sum(range(500 * len(work.tokens)))
        time.sleep(0.03 * (len(work.tokens) > 32))


def test_a_busy_machine_does_not_make_steps_short(tmp_path: Path) -> None:
    engine, store = Disturbed(16), SaturationStore(tmp_path, "model")
    tuning = RoleTuning(engine, KvAllocator(SlabLedger(16)), store, choose_step_clock(spec(tmp_path)))  # type: ignore[arg-type]
    tuning.tune_for("prefill")
    assert engine.scheduler.limits.saturation_tokens > 32


def test_the_time_of_several_threads_is_not_that_of_one(tmp_path: Path) -> None:
    assert choose_step_clock(spec(tmp_path)) is time.thread_time
    for changes in ({"threads": 2}, {"tp": 2}, {"pp": 2}):
        assert choose_step_clock(spec(tmp_path, **changes)) is time.monotonic


def test_a_worker_loads_no_transformers(folder: Path) -> None:
    code = """
import sys, msgspec
from diptych.specs import WorkerSpec
from services.worker.model_worker import build_worker
from diptych.process import SupervisorPipe
spec = msgspec.json.decode(sys.argv[1], type=WorkerSpec)
build_worker(spec, SupervisorPipe(sys.stderr)).tune_for(spec.role)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"transformers", "huggingface_hub", "ray", "nixl"}))
"""
    encoded = msgspec.json.encode(spec(folder, role="prefill")).decode()
    done = subprocess.run(
        [sys.executable, "-c", code, encoded], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_kv_can_be_evicted_where_there_is_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    tiny = spec(ROOT / "models" / "tiny", kv_bytes=64 << 20)
    found = resolve_model(tiny)
    tokenizer = load_tokenizer(found.checkpoint.path)
    setup = _eviction_setup(tiny, found, tokenizer)
    assert tokenizer is not None and setup is not None
    assert setup.surrogate is not None and setup.rules == ("ada", "fastgen", setup.surrogate.rule)
    assert (
        setup.kinds.shape == (found.checkpoint.config.vocab,)
        and setup.kinds[: len(tokenizer.special_ids)].all()
    )
    assert load_tokenizer(tmp_path) is None and _eviction_setup(tiny, found, None) is None
