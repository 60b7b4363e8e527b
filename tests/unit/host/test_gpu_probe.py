"""What `diptych serve` says of a model that is to be served on GPUs, before anything is started; NVML is made up."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych.config.load import load_config
from diptych.errors import ConfigError, ModelError
from engine.model.checkpoint import Checkpoint
from services.cli.serve.specs import deployment_spec
from services.host import model_probe
from services.host.device_settings import apply_device
from services.host.model_probe import ProbedModel, probe_model, probe_request
from tests.support.made_up_gpus import GIB, made_gpu, plug_in

TINY = Path(__file__).parents[3] / "models" / "tiny"


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_probe, "available_memory", lambda: 64 * GIB)


def ask(num_workers: int = 2, **given: str) -> ProbedModel:
    loaded = apply_device(load_config("serve", {"device": "cuda", "model": str(TINY)} | given, {}))
    return probe_model(probe_request(loaded.config, num_workers))


def refused(num_workers: int = 2, **given: str) -> str:
    with pytest.raises((ModelError, ConfigError)) as caught:
        ask(num_workers, **given)
    lines = caught.value.lines()
    assert 3 <= len(lines) <= 6 and caught.value.fix
    return "\n".join(lines)


def test_two_workers_share_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plug_in(monkeypatch, tmp_path, made_gpu(gib=16))
    both, alone = ask(2), ask(1)
    assert both.gpu and alone.gpu and (both.gpu.workers, alone.gpu.workers) == (2, 1)
    assert alone.kv_bytes - both.kv_bytes == pytest.approx(16 * GIB * 0.45, rel=0.01)
    layout = Checkpoint.resolve(str(TINY)).layout("bfloat16")
    assert both.gpu.buffer_bytes == 4 * layout.num_chunks(2048) * layout.chunk_bytes
    assert "context 2,048" in both.summary


def test_the_smallest_gpu_and_the_visible_ones_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plug_in(monkeypatch, tmp_path, made_gpu(gib=16), made_gpu(gib=8))
    assert ask(2).kv_bytes < 8 * GIB * 0.9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    shared = ask(2)
    assert shared.gpu and shared.gpu.workers == 2


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plug_in(monkeypatch, tmp_path, made_gpu(gib=2.3))
    assert "does not fit on the device" in refused(2)
    assert "--kv-cache-memory-bytes" in refused(1, kv_cache_memory_bytes="4GiB")
    plug_in(monkeypatch, tmp_path, made_gpu("Tesla T4", 15, (7, 5)))
    assert "Tesla T4 does not compute in bfloat16" in refused(1)
    assert ask(1, dtype="float16").kv_bytes > GIB
    plug_in(monkeypatch, tmp_path, made_gpu())
    assert "is too small for one request" in refused(1, transfer_buffer_bytes="1MiB")
    assert "does not fit in host memory" in refused(1, transfer_buffer_bytes="70GiB")
    assert "was made for 1 to 2048 tokens" in refused(1, max_model_len="4096")
    plug_in(monkeypatch, tmp_path)
    assert "there is no device 'cuda' here" in refused(1)


def test_swap_space_has_to_fit_beside_the_buffer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plug_in(monkeypatch, tmp_path, made_gpu())
    loaded = apply_device(load_config("serve", {"device": "cuda", "model": str(TINY)}, {}))

    def probe(swap_bytes: int) -> ProbedModel:
        return probe_model(msgspec.structs.replace(probe_request(loaded.config, 2), swap_bytes=swap_bytes))

    buffer = probe(0).gpu
    assert buffer is not None
    with pytest.raises(ConfigError, match="swap space of 40.00 GiB per worker does not fit") as caught:
        probe(40 * GIB)
    assert "beside the transfer buffer of" in caught.value.why and len(caught.value.lines()) <= 6
    found = re.search(r"lower --swap-space to (\d+)MiB or less", caught.value.fix)
    # A worker may use 0.9 of half of this machine's memory.
    assert found and int(found[1]) == (int(32 * GIB * 0.9) - buffer.buffer_bytes) >> 20
    assert probe(int(found[1]) << 20) == probe(0)


def test_quantised_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plug_in(monkeypatch, tmp_path, made_gpu())
    folder = tmp_path / "quantised"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "its weights are quantised (method awq)" in refused(1, model=str(folder))


def test_an_emulated_device_takes_half_of_the_worker_s_memory() -> None:
    found = ask(2, device="emulated", dtype="float32")
    assert found.gpu and found.gpu.workers == 1 and found.gpu.emulated_bytes == int(64 * GIB / 2 * 0.9) // 2
    layout = Checkpoint.resolve(str(TINY)).layout("float32")
    assert found.kv_bytes == 16 * layout.num_chunks(2048) * layout.chunk_bytes


def deployed(folder: Path, **given: str) -> Any:
    loaded = apply_device(load_config("serve", {"device": "cuda", "model": str(TINY)} | given, {}))
    model = probe_model(probe_request(loaded.config, sum(loaded.config.pools)))
    return deployment_spec(loaded, model, folder, folder, 1, 2, ())


def test_workers_get_their_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plug_in(monkeypatch, tmp_path, made_gpu())
    what = deployed(tmp_path, gpu_memory_utilization="0.8")
    for spec in what.workers:
        assert (spec.gpu_workers, spec.gpu_memory_utilization, spec.core, spec.threads) == (2, 0.8, None, 2)
        assert spec.transfer_buffer_bytes > 0 and not spec.kv_bytes_asked
    assert [group[0].demand for group in what.node_groups] == [{"CPU": 1.0, "GPU": 0.5}] * 2
    plug_in(monkeypatch, tmp_path, *[made_gpu()] * 4)
    what = deployed(tmp_path, prefill="2", decode="2", kv_cache_memory_bytes="1GiB")
    assert [group[0].demand for group in what.node_groups] == [{"CPU": 1.0, "GPU": 1.0}] * 4
    assert all(spec.gpu_workers == 1 and spec.kv_bytes_asked for spec in what.workers)


def test_workers_on_the_cpu_get_none(tmp_path: Path) -> None:
    what = deployed(tmp_path, device="cpu")
    for spec in what.workers:
        assert (spec.gpu_workers, spec.transfer_buffer_bytes, spec.emulated_bytes) == (1, 0, 0)
    assert [group[0].demand for group in what.node_groups] == [{"CPU": 1.0}] * 2


def test_all_refusals_name_a_size_that_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plug_in(monkeypatch, tmp_path, made_gpu(gib=4))
    found = re.search(r"--kv-cache-memory-bytes (\S+) or less", refused(1, kv_cache_memory_bytes="40GiB"))
    assert found and ask(1, kv_cache_memory_bytes=found[1]).kv_bytes > GIB
