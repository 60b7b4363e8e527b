"""What a worker on a device refuses before it reads any weights; and a worker on the CPU loads nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diptych.errors import ConfigError, DiptychError, ModelError
from diptych.specs import WorkerSpec
from engine.model.weights import WeightReader
from tests.support.factories import make_folder
from worker.build_device import resolve_device_model

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
