"""What a worker is built of over a port: its identity, its `Hello`, its patience."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.channel.keys import make_keys
from diptych.errors import ConfigError
from diptych.messages import Hello
from diptych.request import BANS, SEED
from diptych.specs import WorkerSpec
from router.workers.fleet import describe_mismatch
from router.workers.kv_classes import can_exchange_kv
from services.gateway.status import describe_engine
from services.worker.role_lifecycle import WorkerParts
from services.worker.vllm_parts import build_parts
from services.worker.vllm_process import engine_options
from tests.support.toy_port import ToyPort
from worker.watchdog import LIMIT_S, STUCK_S


def spec_of(folder: Path, **changed: object) -> WorkerSpec:
    given: dict[str, object] = {
        "worker": "w", "role": "decode", "gateway": "tcp://127.0.0.1:1", "keys_dir": str(folder / "keys"),
        "model": str(folder), "engine": "vllm", "transfer_buffer_bytes": 1 << 20, "kv_bytes": 1 << 30,
    }  # fmt: skip
    return WorkerSpec(**given | changed)  # type: ignore[arg-type]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture
def parts(model: Path) -> Iterator[WorkerParts]:
    built = build_parts(spec_of(model), ToyPort())
    yield built
    close(built)


def close(built: WorkerParts) -> None:
    built.close()
    for memory in built.memories:
        memory.close()


def hello_of(built: WorkerParts, worker: str) -> Hello:
    return Hello(
        worker, "decode", "i", built.fingerprint, built.identity, "h", 1, 1, 1, 64, {},
        kv_classes={name: (slabs, built.layout.chunk_bytes) for name, slabs in built.class_slabs.items()},
    )  # fmt: skip


def test_slabs_are_vllms_blocks_and_kv_leaves_through_the_buffer(parts: WorkerParts) -> None:
    assert list(parts.class_slabs.values()) == [34] and parts.kv is None
    assert parts.pool.num_slabs == (1 << 20) // parts.layout.chunk_bytes == 2048
    assert parts.books.used == 0 and parts.books.owners() == {"vLLM": 0, "copies": 0}
    assert parts.roles is not None and parts.roles.traits == (SEED, BANS) and parts.waiting_tokens == 1024


def test_a_step_that_prefills_a_whole_prompt_does_not_count_as_hanging(
    parts: WorkerParts, model: Path
) -> None:
    assert (parts.stuck_s, parts.limit_s) == (STUCK_S, LIMIT_S)
    patient = build_parts(spec_of(model), ToyPort(step_tokens=32_768))
    assert patient.limit_s > 3000 and patient.stuck_s > 600
    close(patient)


@pytest.mark.parametrize(
    ("changed", "shown"), [({"version": "0.31.0"}, "0.31.0"), ({"attention_backend": "FLASH"}, "FLASH")]
)
def test_other_versions_and_backends_are_seen_side_by_side_and_never_paired(
    parts: WorkerParts, model: Path, changed: dict[str, str], shown: str
) -> None:
    port = ToyPort()
    port.facts = replace(port.facts, **changed)  # type: ignore[arg-type]
    other = build_parts(spec_of(model), port)
    left, right = hello_of(parts, "a"), hello_of(other, "b")
    assert not can_exchange_kv(left, right) and can_exchange_kv(left, hello_of(parts, "c"))
    text = describe_mismatch(left, right)
    assert shown in text and ("toy" in text or "HASHES" in text) and "fingerprint" not in text
    assert describe_engine(left) == "vllm toy, HASHES" and shown in describe_engine(right)
    close(other)


def test_other_weights_are_another_model(parts: WorkerParts, model: Path) -> None:
    same = build_parts(spec_of(model), ToyPort())
    (model / "model.safetensors").write_bytes(b"others!")
    other = build_parts(spec_of(model), ToyPort())
    assert same.fingerprint == parts.fingerprint != other.fingerprint
    close(same)
    close(other)


def test_a_buffer_that_does_not_hold_one_request_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_parts(spec_of(model, transfer_buffer_bytes=1 << 10), ToyPort())
    assert "--transfer-buffer-bytes 16384 or more" in "\n".join(caught.value.lines())


def test_memory_is_planned_on_cpus_and_shared_on_gpus(model: Path) -> None:
    cpu = engine_options(spec_of(model))
    assert (cpu.kv_bytes, cpu.gpu_memory_utilization) == (1 << 30, None)
    gpu = engine_options(spec_of(model, device="cuda", gpu_workers=2, gpu_memory_utilization=0.8))
    assert (gpu.kv_bytes, gpu.gpu_memory_utilization) == (None, 0.4)
    assert engine_options(spec_of(model, tp=4)).kv_bytes == 1 << 28
    asked = engine_options(spec_of(model, device="cuda", kv_bytes_asked=True))
    assert asked.kv_bytes == 1 << 30
