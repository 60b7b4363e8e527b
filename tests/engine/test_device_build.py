"""What a worker on a device refuses before it reads any weights; and a worker on the CPU loads nothing of it."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from diptych.errors import ConfigError, DiptychError, ModelError
from diptych.process import SupervisorPipe
from diptych.specs import WorkerSpec
from engine.gpu.model_runner import GpuModelRunner, load_kernels
from engine.model.device_step import list_graph_rows
from engine.model.weights import WeightReader
from engine.step_work import StepWork
from tests.support.factories import make_folder
from worker.build_device import build_device_engine, resolve_device_model

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "models" / "tiny")


def spec(folder: Path, **changes: object) -> WorkerSpec:
    fields: dict[str, object] = {
        "worker": "decode-0",
        "role": "decode",
        "gateway": "tcp://127.0.0.1:1",
        "keys_dir": "keys",
        "model": str(folder),
        "device": "emulated",
        "kv_bytes": 8 << 20,
        "emulated_bytes": 1 << 30,
    }
    return WorkerSpec(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"tp": 2}, ConfigError, "tensor and pipeline parallelism"),
        ({"pp": 2}, ConfigError, "tensor and pipeline parallelism"),
        ({"kv_keep": 0.9}, ConfigError, "eviction"),
        ({"bulk_only": True}, ConfigError, "bulk workers"),
        ({"kv_cache_codec": "raw:0.5,tq4", "model": TINY}, ConfigError, "has one codec"),
        ({"dtype": "int8"}, ConfigError, "int8 is not available on a GPU"),
        ({"max_num_seqs": 600}, ConfigError, "512 tokens is too small for 600 requests"),
        ({"max_model_len": 100_000}, ModelError, "100000 tokens"),
        ({"kv_bytes": 64 << 10}, ModelError, "does not fit on the device"),
        ({"emulated_bytes": 1 << 20}, ModelError, "does not fit on the device"),
        ({"gpu_memory_utilization": 0.001}, ModelError, "does not fit on the device"),
        ({"gpu_workers": 1000}, ModelError, "does not fit on the device"),
    ],
)
def test_refusals_come_before_weights_and_name_the_fix(
    folder: Path,
    changes: dict[str, object],
    kind: type[DiptychError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WeightReader, "__enter__", lambda reader: pytest.fail("weights are read"))
    with pytest.raises(kind, match=words) as caught:
        resolve_device_model(spec(folder, **changes))
    assert caught.value.fix and len(caught.value.lines()) <= 6


def test_a_gpu_that_is_not_there_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="there is no device 'cuda' here") as caught:
        resolve_device_model(spec(folder, device="cuda"))
    assert "built without CUDA" in caught.value.why and len(caught.value.lines()) <= 6
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match="there is no device 'cuda' here") as caught:
        resolve_device_model(spec(folder, device="cuda"))
    assert "CUDA_VISIBLE_DEVICES=7" in caught.value.why


def test_the_pool_has_the_type_of_the_weights(folder: Path) -> None:
    model, opened = resolve_device_model(spec(folder))
    assert (model.dtype, model.layout.dtype, opened.name) == ("bfloat16", "bfloat16", "emulated")
    assert model.plan.kv_bytes == model.num_slabs * model.layout.chunk_bytes <= 8 << 20
    exact, _ = resolve_device_model(spec(folder, dtype="float32"))
    assert model.checkpoint.fingerprint("bfloat16")[0] != exact.checkpoint.fingerprint("float32")[0]
    assert exact.num_slabs == model.num_slabs // 2


class ScriptedMeter:
    """Says what a test wants: so many bytes are held, and steps take so many more."""

    def __init__(self, held: int, step: int) -> None:
        self.held, self.step = held, step
        self.calls: list[str] = []

    def held_bytes(self) -> int:
        self.calls.append("held")
        return self.held

    def restart_peak(self) -> None:
        self.calls.append("restart")

    def peak_bytes(self) -> int:
        self.calls.append("peak")
        return self.held + self.step


MIB = 1 << 20


def note_steps(meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch) -> list[list[StepWork]]:
    """Notes in the meter's calls when graphs are captured, and returns the steps that are rehearsed at their time."""
    steps: list[list[StepWork]] = []
    warm, rehearse = GpuModelRunner.warm, GpuModelRunner.rehearse

    def note_warm(runner: GpuModelRunner, rows: list[int]) -> None:
        meter.calls.append(f"graphs over {runner.data.shape[0]}: {list(rows)}")
        warm(runner, rows)

    def note_step(runner: GpuModelRunner, works: list[StepWork]) -> torch.Tensor:
        steps.append(list(works))
        return rehearse(runner, works)

    monkeypatch.setattr(GpuModelRunner, "warm", note_warm)
    monkeypatch.setattr(GpuModelRunner, "rehearse", note_step)
    return steps


@pytest.mark.parametrize("codec", ["raw", "tq4"])
def test_the_pool_has_what_is_left_beside_measured_steps(
    folder: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec(folder, max_num_seqs=20, max_num_batched_tokens=300, kv_bytes_asked=True, kv_bytes=8 * MIB,
                 kv_cache_codec=codec, model=TINY if codec != "raw" else str(folder))  # fmt: skip
    model, opened = resolve_device_model(asked)
    meter = ScriptedMeter(100 * MIB, 500 * MIB)
    steps = note_steps(meter, monkeypatch)
    # On a GPU the pool takes all that is left.
    opened = replace(
        opened, meter=meter, name="Made-up GPU", share=replace(opened.share, total_bytes=1 << 30)
    )
    whole = msgspec.structs.replace(asked, kv_bytes_asked=False)
    monkeypatch.setattr("worker.build_device.load_kernels", lambda emulated: load_kernels(True))
    said = io.StringIO()
    parts = build_device_engine(whole, model, opened, SupervisorPipe(said))
    room = int((1 << 30) * 0.9) - 600 * MIB
    assert parts.kv.num_slabs == room // model.layout.chunk_bytes != model.num_slabs
    assert parts.buffer.pool.num_slabs >= model.layout.num_chunks(model.plan.max_model_len)
    graphs = list_graph_rows(20)
    assert meter.calls == [
        "held", "restart", "graphs over 1: [24]", "peak", "held", f"graphs over {parts.kv.num_slabs}: {graphs}",
    ]  # fmt: skip
    # Between the two "warm" of a runner, which begin with a short prompt: the largest step there is.
    (largest,) = [works for works in steps if len(works) > 1]
    assert len(largest) == 20 and sum(len(work.tokens) for work in largest) == 300
    assert '"ready"' not in said.getvalue() and said.getvalue().splitlines()[-1].startswith(
        '{"phase": "warm"'
    )
    parts.buffer.memory.close()
    with pytest.raises(ModelError, match="does not fit on the device") as caught:
        build_device_engine(
            msgspec.structs.replace(whole, kv_bytes_asked=True, kv_bytes=room + MIB),
            model,
            opened,
            SupervisorPipe(said),
        )
    assert "weights 100.00 MiB" in caught.value.why and "--kv-cache-memory-bytes" in caught.value.fix
    assert len(caught.value.lines()) <= 6


def test_a_worker_on_the_cpu_loads_nothing_for_devices() -> None:
    code = (
        "import sys, services.worker.__main__\nprint([name for name in sys.modules if name.startswith(OURS)])"
    )
    ours = ("kvcache.device", "engine.gpu", "kvtransfer.transfer_buffer", "kvtransfer.buffered_links",
            "prefill_worker.buffered", "worker.build_device", "services.worker.device_worker", "triton")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", f"OURS = {ours!r}\n{code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[]\n", done.stderr
