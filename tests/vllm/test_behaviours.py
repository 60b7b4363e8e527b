"""The suite of behaviours on vLLM: on one rank all of it, on two ranks and with prompts in parts what these change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.behaviours import BEHAVIOURS
from tests.vllm.conftest import RunProgram
from tests.vllm.results import check_result, read_results

# One engine is loaded, and runs all behaviours, within the first test.
pytestmark = pytest.mark.timeout(2400)

# What several ranks could break.
ON_TWO_RANKS = (
    "tokens_are_those_of_one_engine",
    "aborts_free_everything",
    "prefixes_are_shared_within_a_scope",
    "failed_loads_can_be_retried",
    "a_storm_leaves_nothing",
)
# What prefill in parts could break.
IN_PARTS = (
    "tokens_are_those_of_one_engine",
    "deferred_first_tokens_are_the_same",
    "aborts_free_everything",
    "seeds_are_repeated_or_refused",
    "a_storm_leaves_nothing",
)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_vllm_behaves(name: str, engine_lines: dict[str, dict[str, Any]]) -> None:
    check_result(engine_lines, name)


@pytest.fixture(scope="module")
def lines_of_two_ranks(run_program: RunProgram, embedded_model: str) -> dict[str, dict[str, Any]]:
    return read_results(run_program("tests.vllm.program", embedded_model, "--ranks", "2", *ON_TWO_RANKS))


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_behave(name: str, lines_of_two_ranks: dict[str, dict[str, Any]]) -> None:
    check_result(lines_of_two_ranks, name)
    assert lines_of_two_ranks["facts"]["facts"]["ranks"] == 2


@pytest.fixture(scope="module")
def lines_in_parts(run_program: RunProgram, embedded_model: str) -> dict[str, dict[str, Any]]:
    return read_results(run_program("tests.vllm.program", embedded_model, "--chunked", *IN_PARTS))


@pytest.mark.parametrize("name", IN_PARTS)
def test_prefill_in_parts_behaves(name: str, lines_in_parts: dict[str, dict[str, Any]]) -> None:
    check_result(lines_in_parts, name)
    assert not lines_in_parts["facts"]["facts"]["chunks_seeded"]
