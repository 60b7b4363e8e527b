"""What `diptych serve` asks of a model before it starts anything: found, complete, supported, and it fits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diptych.config.options import Config
from diptych.errors import ConfigError, ModelError
from engine.model.checkpoint import Checkpoint
from engine.model.memory_plan import format_bytes
from services.host import model_probe
from services.host.model_probe import ProbedModel, ProbeRequest

TINY = Path(__file__).parents[2] / "models" / "tiny"


def ask(name: str, **more: Any) -> ProbedModel:
    sized: dict[str, Any] = {"revision": None, "max_model_len": None, "kv_bytes": None, "num_workers": 1}
    return model_probe.probe_model(ProbeRequest(name, **sized | more))


def refused(name: str, **more: Any) -> str:
    with pytest.raises((ModelError, ConfigError)) as caught:
        ask(name, **more)
    lines = caught.value.lines()
    assert 2 <= len(lines) <= 6
    return "\n".join(lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model that a test may spoil."""
    return Path(shutil.copytree(TINY, tmp_path / "copy"))


def test_the_embedded_model_is_found_under_its_name() -> None:
    found = ask("tiny")
    assert Path(found.path).samefile(TINY)
    assert found.has_chat_template and found.max_model_len == 2048 and "context 2,048" in found.summary
    assert "5.8 M parameters" in found.summary  # as its own page says
    assert found.kv_bytes % (6 * 4 * 2 * 64 * 32 * 4) == 0 < found.kv_bytes


def test_a_gateway_needs_neither_weights_nor_memory_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(model_probe, "available_memory", lambda: 1 << 20)
    found = ask(str(folder), num_workers=0, max_model_len=100)
    assert (found.path, found.max_model_len, found.kv_bytes, found.has_chat_template) == (
        str(folder),
        100,
        0,
        True,
    )
    assert "was made for 1 to 2048 tokens" in refused(str(folder), num_workers=0, max_model_len=4096)
    assert "has no weights" in refused(str(folder))


def test_a_slow_tokenizer_is_refused_with_the_way_out(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    for num_workers in (0, 1):
        lines = refused(str(folder), num_workers=num_workers)
        assert "tokenizer.model alone is not read" in lines and "save_pretrained" in lines


def test_the_memory_of_a_worker_is_reported() -> None:
    small, large = ask("tiny"), ask("tiny", step_tokens=4096, step_rows=512)
    for found, tokens, rows in ((small, 512, 64), (large, 4096, 512)):
        plan = Checkpoint.resolve(str(TINY)).memory(
            max_model_len=None, kv_bytes=found.kv_bytes, step_tokens=tokens, step_rows=rows
        )
        assert (
            f"KV {format_bytes(plan.kv_bytes)} of {format_bytes(plan.total_bytes)} per worker"
            in found.summary
        )
    assert small.summary != large.summary


def test_several_workers_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ask("tiny")
    monkeypatch.setattr(model_probe, "available_memory", lambda: 512 << 20)
    assert ask("tiny", num_workers=4).kv_bytes < alone.kv_bytes
    assert "does not fit in memory" in refused("tiny", num_workers=20)


def test_a_model_without_a_chat_template_is_served_without_chat(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(
        json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"})
    )
    assert not ask(str(folder)).has_chat_template


def test_an_unknown_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "there is no model at nothing" in refused("nothing")
    monkeypatch.chdir(tmp_path)
    assert "there is no model at ./nothing" in refused("./nothing")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.safetensors", "has no weights"),
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
    ],
)
def test_a_folder_that_lacks_something(folder: Path, file: str, said: str) -> None:
    (folder / file).unlink()
    assert said in refused(str(folder))


def test_a_model_that_does_not_fit_shows_the_arithmetic_and_what_would_fit() -> None:
    message = refused("tiny", kv_bytes=1 << 20)
    assert "KV pool 1.00 MiB" in message and "32 chunks x 384.00 KiB = 12.00 MiB of KV" in message
    assert (
        "the largest context that fits is 128 tokens" in message and "--max-model-len 128 or less" in message
    )


def test_a_context_longer_than_the_models_own() -> None:
    assert "use --max-model-len 2048 or less" in refused("tiny", max_model_len=4096)


def test_a_swap_space_that_the_memory_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_probe, "available_memory", lambda: 512 << 20)
    pool = {"kv_bytes": 64 << 20, "num_workers": 2}
    assert ask("tiny", **pool, swap_bytes=100 << 20).kv_bytes
    message = refused("tiny", **pool, swap_bytes=200 << 20)
    assert "a swap space of 200.00 MiB per worker does not fit" in message
    most = re.search(r"lower --swap-space to (\d+)MiB or less", message)
    assert most is not None
    assert ask("tiny", **pool, swap_bytes=int(most[1]) << 20).kv_bytes


def test_more_ranks_than_anybody_has() -> None:
    message = refused("tiny", splits={"decode": (4, 1024)})
    assert "4096 ranks are too many" in message and message.endswith("(--decode-tp, --decode-pp)")


# ---- the question from one process to the other


async def test_a_folder_is_looked_at_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    for name in ("tiny", str(TINY)):
        found = await model_probe.resolve_model(Config(model=name, max_model_len=100), 2)
        assert Path(found.path).samefile(TINY) and found.max_model_len == 100


async def test_a_model_of_the_hub_is_looked_at_in_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hub's cache has it, so nothing is downloaded."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("a" * 40)
    shutil.copytree(TINY, snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = await model_probe.resolve_model(Config(model="owner/name", max_model_len=100), 2)
    assert Path(found.path).samefile(snapshot) and found.max_model_len == 100
    with pytest.raises(ModelError, match="neither a folder here nor could it be fetched"):
        await model_probe.resolve_model(Config(model="owner/other"), 2)


def test_looking_at_a_model_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "numba", "huggingface_hub", "httpx", "safetensors")
    code = f"""
import sys
from services.host.model_probe import ProbeRequest, probe_model
probe_model(ProbeRequest({str(TINY)!r}, None, None, None, 2)).summary
print(*(name for name in {heavy!r} if name in sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


async def test_a_split_that_the_model_does_not_allow_is_refused_before_anything_starts() -> None:
    with pytest.raises(ModelError) as caught:
        await model_probe.resolve_model(Config(model="tiny", prefill_tp=3), 2)
    assert "cannot be split into 1 stages of 3 ranks" in caught.value.what
    assert caught.value.fix == "use a tp of 1, 2, 4, and a pp of at most 6 (--prefill-tp, --prefill-pp)"


async def test_a_process_that_breaks_is_reported_as_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(ModelError) as caught:
        await model_probe.resolve_model(Config(model="owner/name"), 1)
    assert caught.value.why == "no such luck"
