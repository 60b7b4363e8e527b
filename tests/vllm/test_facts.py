"""vLLM's names, what it says of a model, and what is refused before weights are read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import RunProgram
from tests.vllm.results import read_results
from vllm_worker.setup.used_names import SUPPORTED_VERSIONS

# One engine is loaded, and runs all behaviours, within the first test.
pytestmark = pytest.mark.timeout(2400)


def test_every_name_is_there(engine_lines: dict[str, dict[str, Any]]) -> None:
    assert engine_lines["missing"]["missing"] == []


def test_the_engine_is_described(engine_lines: dict[str, dict[str, Any]]) -> None:
    facts = engine_lines["facts"]["facts"]
    assert facts["version"].split("+")[0] in SUPPORTED_VERSIONS
    assert (facts["device"], facts["dtype"], facts["attention_backend"]) == ("cpu", "float32", "CPU_ATTN")
    assert (facts["block_tokens"], facts["max_model_len"], facts["num_blocks"]) == (64, 1024, 20)
    # Keys and values of 64 tokens with four heads of 32 numbers, in six layers.
    assert [part["block_bytes"] for part in facts["parts"]] == [2 * 64 * 4 * 32 * 4] * 6
    assert facts["chunks_seeded"] and not facts["seeds_by_position"]
    assert facts["identity"]["architectures"] == "LlamaForCausalLM"


@pytest.fixture(scope="module")
def refusals(run_program: RunProgram, embedded_model: str) -> dict[str, dict[str, Any]]:
    return read_results(run_program("tests.vllm.refusals", embedded_model))


def test_what_can_be_served_is_accepted(refusals: dict[str, dict[str, Any]]) -> None:
    assert refusals["good"]["lines"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no model", "vLLM refuses the model"),
        ("unknown flag", "--no-such-flag"),
        ("unknown value", "none-such"),
        ("too long", "1000000"),
        ("block size", "a chunk of 64 tokens"),
        ("data parallel", "data parallelism"),
        ("state", "a state instead of KV"),
        ("hybrid", "a state beside layers with KV"),
        ("no text", "generates no text"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(
    name: str, words: str, refusals: dict[str, dict[str, Any]]
) -> None:
    kind, *lines = refusals[name]["lines"]
    assert kind in ("ModelError", "ConfigError")
    assert words in " ".join(lines)
    assert len(lines) <= 6 and any("fix:" in line for line in lines)
