"""`diptych plan --bulk`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.unit.cli.typed_command import run_typed

Run = Callable[..., tuple[int, str, str]]
WORDS = ("--model", "Llama-3.1-8B", "--bulk", "512:64", "--bulk-memory", "8GiB", "--bulk-disk-rate", "2GB/s")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *words: run_typed(monkeypatch, capsys, "plan", *words)


def test_it_prints_the_choice_and_what_more_would_bring(run: Run) -> None:
    code, out, _ = run(*WORDS, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["weights_in_memory"] + found["weights_on_disk"] == pytest.approx(1)
    assert found["weights_on_disk"] > 0.5 and found["memory_bytes"] <= 1.0001 * (8 << 30)
    assert found["tokens_per_s"] > 0 and found["waits_for"] in ("disk", "compute")
    assert all(gain >= 0.9999 for gain in found["gains"].values())
    code, out, _ = run(*WORDS)
    assert code == 0 and "tokens/s" in out and "waits for" in out and "one more GiB" in out


def test_four_bits_are_only_used_if_asked_for(run: Run) -> None:
    exact = json.loads(run(*WORDS, "--json")[1])
    dense = json.loads(run(*WORDS, "--json", "--bulk-int4")[1])
    assert exact["weight_bits"] == 16 and exact["kv_bits"] == 32
    assert dense["tokens_per_s"] >= exact["tokens_per_s"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((*WORDS, "--rate", "3"), "--rate has no effect with --bulk"),
        ((*WORDS, "--device", "H100"), "--bulk cannot plan for H100"),
        ((*WORDS[:3], "512"), "--bulk 512 cannot be read"),
        ((*WORDS[:3], "512:0"), "--bulk 512:0 cannot be read"),
        ((*WORDS[:-1], "fast"), "--bulk-disk-rate fast cannot be read"),
        ((*WORDS[:4], "--bulk-memory", "much"), "--bulk-memory much cannot be read"),
        ((*WORDS[:4], "--bulk-memory", "1MiB"), "too little memory"),
        ((*WORDS[:2], "--bulk-int4"), "--bulk-int4 has no effect"),
    ],
)
def test_what_cannot_be_used_is_refused(run: Run, words: tuple[str, ...], text: str) -> None:
    code, out, err = run(*words)
    assert code == 2 and out == "" and text in err and len(err.splitlines()) <= 6
