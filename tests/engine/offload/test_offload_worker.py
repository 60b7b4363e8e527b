"""What a bulk worker says of its block."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from diptych.process import SupervisorPipe
from diptych.specs import WorkerSpec
from services.worker.offload_worker import make_offload_hello
from tests.support.factories import make_folder
from worker import build_offload


def test_the_longest_line_is_what_a_batch_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the gateway refuses longer prompts as over HTTP, and bounds answers without max_tokens."""
    monkeypatch.setattr(build_offload, "machine_kernel_folder", lambda: tmp_path)
    model = str(make_folder(tmp_path / "model"))
    policy = "rows=2,batches=1,prompt_tokens=70,output_tokens=50"
    spec = WorkerSpec(
        worker="decode-0",
        role="decode",
        gateway="tcp://127.0.0.1:1",
        keys_dir=str(tmp_path),
        model=model,
        device="cpu",
        bulk_only=True,
        bulk_policy=policy,
    )
    built = build_offload.build_offload_engine(spec, SupervisorPipe(io.StringIO()))
    built.runner.close()
    # The model takes 512 tokens; a batch has two rows of two chunks.
    assert make_offload_hello(spec, built).max_model_len == 2 * 2 * 64
