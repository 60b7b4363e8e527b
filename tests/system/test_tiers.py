"""A deployment whose prefixes leave the pool: they come back from host memory, and after a restart from the disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcache.tiers.tier_checks import HOST_BASE, HOST_PREFIX
from tests.support.deployment import Served, serve_parts, wait_for

pytestmark = pytest.mark.timeout(600)

# 32 slabs; a prompt takes 11 and some.
SMALL = ("--kv-cache-memory-bytes", "12MiB", "--max-model-len", "1024", "--transports", "shm")
LENGTH, PROMPTS, CHUNKS = 700, 4, 10


def prompt_of(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 4000) for _ in range(LENGTH)]


def ask(served: Served, number: int, salt: str = "") -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": prompt_of(number),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    more = {"cache_salt": salt} if salt else {}
    response = httpx.post(f"{served.url}/v1/completions", json=body | more, timeout=120)
    answer: dict[str, Any] = response.raise_for_status().json()
    return answer


def cached_tokens(answer: dict[str, Any]) -> int:
    found = answer["usage"].get("prompt_tokens_details") or {}
    return int(found.get("cached_tokens", 0))


def tier_stats(served: Served, tier: str, name: str) -> list[int]:
    """A figure of a tier, of each worker."""
    return [one["stats"]["tiers"][tier][name] for one in served.status()["workers"]]


def folders() -> set[Path]:
    return set(HOST_BASE.glob(f"{HOST_PREFIX}*"))


def test_prefixes_come_back_from_memory_and_after_a_restart_from_disk(tmp_path: Path) -> None:
    before = folders()
    disk = ("--kv-disk-bytes", "256MiB", "--kv-disk-folder", str(tmp_path / "kv"))
    command = ("--prefill", "1", "--decode", "1", "--kv-host-bytes", "128MiB", *disk, *SMALL)
    with serve_parts(*command) as served:
        cold = [ask(served, number) for number in range(PROMPTS)]
        wait_for(lambda: max(tier_stats(served, "disk", "chunks")) >= CHUNKS * PROMPTS)
        warm = [ask(served, number) for number in range(PROMPTS)]
        assert [one["choices"] for one in warm] == [one["choices"] for one in cold]
        assert all(cached_tokens(one) == 0 for one in cold)
        assert [cached_tokens(one) for one in warm[:2]] == [CHUNKS * 64] * 2, "they had left the pool"
        assert cached_tokens(ask(served, 0, salt="of another tenant")) == 0
        wait_for(lambda: sum(tier_stats(served, "host", "restored_chunks")) >= 2 * CHUNKS)
        assert served.metric("vllm:external_prefix_cache_hits_total") >= 2 * CHUNKS * 64
        assert served.metric("diptych:kv_tier_used_bytes", tier="host") > 0
        assert served.metric("diptych:ttft_stage_seconds_sum", stage="restore") > 0
        wait_for(lambda: not any(served.held().values()))
        assert len(folders() - before) == 1
    assert folders() == before, "the memory goes with the deployment"
    with serve_parts(*command) as served:
        again = ask(served, 1)
        assert again["choices"] == cold[1]["choices"] and cached_tokens(again) == CHUNKS * 64
        wait_for(lambda: sum(tier_stats(served, "disk", "restored_chunks")) >= CHUNKS)
    assert sum(1 for _ in (tmp_path / "kv" / "chunks").iterdir()) >= CHUNKS * PROMPTS
