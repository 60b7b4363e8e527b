"""`--kv-keep` at a start: who may evict by default, and what is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from diptych.errors import DiptychError
from diptych.specs import WorkerSpec
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_classes
from kvcache.codecs.calibration import FILE_NAME, write_calibration
from services.host.model_probe import ProbedModel, ProbeRequest, probe_model
from worker.resolve_model import engine_limits, resolve_model

TINY = str(Path(__file__).parents[2] / "models" / "tiny")


def probe(**more: Any) -> ProbedModel:
    sized: dict[str, Any] = {"revision": None, "max_model_len": None, "kv_bytes": 256 << 20, "num_workers": 1}
    return probe_model(ProbeRequest(TINY, **sized | {"kv_keep": 0.95} | more))


def test_workers_may_evict_by_default() -> None:
    for codec in ("raw", "nuq3-1%", "tq4", "raw:0.25,int8"):
        evicting, keeping = probe(kv_cache_codec=codec), probe(kv_cache_codec=codec, kv_keep=1.0)
        assert evicting.kv_bytes == keeping.kv_bytes
        assert evicting.summary != keeping.summary, "it has memory set aside for evictions"
        ranks = {"prefill": (2, 1) if codec in ("raw", "tq4") else (1, 3), "decode": (1, 2)}
        assert probe(kv_cache_codec=codec, splits=ranks).kv_bytes == evicting.kv_bytes
    assert probe(num_workers=0).kv_bytes == 0, "a gateway alone cannot know its workers"


def test_a_class_that_the_router_chooses_is_refused_in_six_lines() -> None:
    with pytest.raises(DiptychError) as caught:
        probe(kv_cache_codec="auto")
    lines = caught.value.lines()
    named = ["--kv-keep 0.95", "--kv-cache-codec auto", "named", "leave out --kv-keep"]
    assert 1 <= len(lines) <= 6 and all(part in "\n".join(lines) for part in named)
    assert probe(kv_cache_codec="auto", kv_keep=1.0).kv_bytes > 0, "without eviction they serve"


SLAB = 393216  # bytes of the embedded model's KV of 64 tokens


def test_a_pool_that_just_holds_the_longest_request_is_refused_in_six_lines() -> None:
    """A sequence that evicts may need two slabs more. Each way out that is named works."""
    full: dict[str, Any] = {"max_model_len": 512, "kv_bytes": 9 * SLAB}
    with pytest.raises(DiptychError) as caught:
        probe(**full)
    lines = caught.value.lines()
    text = "\n".join(lines)
    assert len(lines) <= 6 and "--kv-keep 0.95" in text and "512 tokens need up to 10 slabs" in text
    ways: list[dict[str, Any]] = [{"kv_bytes": 10 * SLAB}, {"max_model_len": 7 * 64}, {"kv_keep": 1.0}]
    for name, way in zip(
        (f"--kv-cache-memory-bytes {10 * SLAB}", "--max-model-len 448", "leave out --kv-keep"),
        ways,
        strict=True,
    ):
        assert name in text and probe(**full | way).kv_bytes > 0
    # A class of several: what a frame takes more than its part of a page counts as well.
    coded: dict[str, Any] = {
        "max_model_len": 2048,
        "kv_cache_codec": "raw:0.93,nuq3-1%",
        "kv_bytes": 20_400_000,
    }
    with pytest.raises(DiptychError) as caught:
        probe(**coded)
    text = "\n".join(caught.value.lines())
    assert "pool of nuq3-1%.g128@" in text and "2048 tokens need up to 35 slabs, 3 of them" in text
    enough = int(re.search(r"--kv-cache-memory-bytes (\d+)", text)[1])  # type: ignore[index]
    assert probe(**coded | {"kv_bytes": enough}).kv_bytes > 0
    tight = {"max_model_len": 100, "kv_bytes": 2 * SLAB}
    with pytest.raises(DiptychError) as caught:
        probe(**tight)
    assert "--max-model-len" not in caught.value.lines()[-1]


def test_the_pool_that_needs_most_slabs_to_evict_counts_for_both(tmp_path: Path) -> None:
    """Two stages have smaller parts of a slab, of which they lose more: a bag that moves needs as many slabs there."""
    files, file = Checkpoint.resolve(TINY), tmp_path / FILE_NAME
    own = resolve_kv_classes(files, "nuq4-1%")[0].calibration
    assert own is not None
    write_calibration(dataclasses.replace(own, group=64), file)
    (chosen,) = resolve_kv_classes(files, "nuq4-1%", str(file))
    sized: dict[str, Any] = {
        "max_model_len": 2048,
        "kv_bytes": 34 * files.layout(codec=chosen.codec).chunk_bytes,
        "kv_cache_codec": "nuq4-1%",
        "kv_cache_calibration": str(file),
    }
    assert probe(**sized).kv_bytes > 0
    for role in ("prefill", "decode"):
        with pytest.raises(DiptychError) as caught:
            probe(**sized, splits={"prefill": (1, 1), "decode": (1, 1)} | {role: (1, 2)})
        lines = caught.value.lines()
        assert len(lines) <= 6 and "2048 tokens need up to 35 slabs, 3 of them" in "\n".join(lines)
    spec = WorkerSpec(worker="w", role="decode", gateway="", keys_dir="", model=TINY, **sized)
    found = resolve_model(spec)
    assert engine_limits(spec, found).extra_slabs == {"": 2}
    other = structs.replace(spec, pool_splits=((1, 2), (1, 1)))
    assert engine_limits(other, found).extra_slabs == {"": 3}


def test_a_model_whose_tokenizer_cannot_be_read_is_refused_in_six_lines(tmp_path: Path) -> None:
    """It says which tokens are special; without eviction the model is served all the same."""
    for file in Path(TINY).iterdir():
        if file.is_file() and file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").write_text("{}")
    sized: dict[str, Any] = {"revision": None, "max_model_len": None, "kv_bytes": 256 << 20, "num_workers": 1}
    question = ProbeRequest(str(tmp_path), **sized, kv_keep=0.95)
    with pytest.raises(DiptychError) as caught:
        probe_model(question)
    lines = caught.value.lines()
    assert len(lines) <= 6 and "tokenizer" in lines[0] and "leave out --kv-keep" in lines[-1]
    assert probe_model(structs.replace(question, kv_keep=1.0)).kv_bytes > 0
