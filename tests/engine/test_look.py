"""What `diptych serve` asks of a model before it starts anything: found, complete, supported, and it fits."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from diptych.config import Config
from diptych.errors import ConfigError, ModelError
from engine.model.files import ModelFiles
from engine.model.memory import show
from services.cli import look, model
from services.cli.model import Model, Question

TINY = Path(__file__).parents[2] / "models" / "tiny"


def ask(name: str, **more: Any) -> Model:
    sized: dict[str, Any] = {"revision": None, "max_model_len": None, "kv_bytes": None, "num_workers": 1}
    return look.look(Question(name, **sized | more))


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
    assert found.chats and found.max_model_len == 2048 and "context 2,048" in found.told
    assert "5.8 M parameters" in found.told  # as its own page says
    assert found.kv_bytes % (6 * 4 * 2 * 64 * 32 * 4) == 0 < found.kv_bytes


def test_what_a_worker_will_take_is_told() -> None:
    small, large = ask("tiny"), ask("tiny", step_tokens=4096, step_rows=512)
    for found, tokens, rows in ((small, 512, 64), (large, 4096, 512)):
        plan = ModelFiles.resolve(str(TINY)).memory(
            max_model_len=None, kv_bytes=found.kv_bytes, step_tokens=tokens, step_rows=rows
        )
        assert f"KV {show(plan.kv_bytes)} of {show(plan.total_bytes)} per worker" in found.told
    assert small.told != large.told


def test_several_workers_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ask("tiny")
    monkeypatch.setattr(look, "available_memory", lambda: 512 << 20)
    assert ask("tiny", num_workers=4).kv_bytes < alone.kv_bytes
    assert "does not fit in memory" in refused("tiny", num_workers=20)


def test_a_model_without_a_chat_template_is_served_without_chat(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(
        json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"})
    )
    assert not ask(str(folder)).chats


def test_an_unknown_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "there is no model at nothing" in refused("nothing")
    monkeypatch.chdir(tmp_path)
    assert "there is no model at ./nothing" in refused("./nothing")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.safetensors", "has no weights"),
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_a_folder_that_lacks_something(folder: Path, file: str, said: str) -> None:
    (folder / file).unlink()
    assert said in refused(str(folder))


def test_a_model_that_does_not_fit_shows_the_arithmetic_and_what_would_fit() -> None:
    told = refused("tiny", kv_bytes=1 << 20)
    assert "KV pool 1.00 MiB" in told and "32 chunks x 384.00 KiB = 12.00 MiB of KV" in told
    assert "the largest context that fits is 128 tokens" in told and "--max-model-len 128 or less" in told


def test_a_context_longer_than_the_models_own() -> None:
    assert "use --max-model-len 2048 or less" in refused("tiny", max_model_len=4096)


def test_a_swap_space_that_the_memory_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "available_memory", lambda: 512 << 20)
    pool = {"kv_bytes": 64 << 20, "num_workers": 2}
    assert ask("tiny", **pool, swap_bytes=100 << 20).kv_bytes
    told = refused("tiny", **pool, swap_bytes=200 << 20)
    assert "a swap space of 200.00 MiB per worker does not fit" in told
    most = re.search(r"lower --swap-space to (\d+)MiB or less", told)
    assert most is not None
    assert ask("tiny", **pool, swap_bytes=int(most[1]) << 20).kv_bytes


def test_more_ranks_than_anybody_has() -> None:
    told = refused("tiny", splits={"decode": (4, 1024)})
    assert "4096 ranks are too many" in told and told.endswith("(--decode-tp, --decode-pp)")


# ---- the question from one process to the other


async def test_the_answer_crosses_processes() -> None:
    found = await model.find(Config(model="tiny", max_model_len=100), 2)
    assert Path(found.path).samefile(TINY) and found.max_model_len == 100


async def test_a_split_that_the_model_does_not_allow_is_told_before_anything_starts() -> None:
    with pytest.raises(ModelError) as caught:
        await model.find(Config(model="tiny", prefill_tp=3), 2)
    assert "cannot be split into 1 stages of 3 ranks" in caught.value.what
    assert caught.value.fix == "use a tp of 1, 2, 4, and a pp of at most 6 (--prefill-tp, --prefill-pp)"


async def test_a_process_that_breaks_is_told_as_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(ModelError) as caught:
        await model.find(Config(), 1)
    assert caught.value.why == "no such luck"
