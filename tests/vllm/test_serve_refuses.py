"""`diptych serve --engine vllm` with what cannot be served: six lines at most, with the fix, and no worker started."""

from __future__ import annotations

import sys

import pytest

from tests.support.terminal import run
from tests.vllm.refusals import MAMBA, model_folder

pytestmark = pytest.mark.timeout(600)


def refused(model: str, *arguments: str, python: str) -> str:
    """What the command says; its start must have ended before any worker's."""
    given = ("serve", model, "--engine", "vllm", "--vllm-python", python, "--port", "0", *arguments)
    result = run(*given)
    assert result.returncode in (1, 2), result
    lines = result.stderr.strip().splitlines()
    assert 2 <= len(lines) <= 6 and lines[0].startswith("error: "), result.stderr
    assert any(line.strip().startswith("fix: ") for line in lines), result.stderr
    assert "Traceback" not in result.stdout + result.stderr and "load" not in result.stdout
    return result.stderr


def test_an_interpreter_without_vllm() -> None:
    shown = refused("tiny", python=sys.executable)
    assert f"{sys.executable} has no vLLM" in shown and "make vllm" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vllm-args", "--no-such-flag"), "no-such-flag"),
        (("--dtype", "float32", "--transfer-buffer-bytes", "1MiB"), "--transfer-buffer-bytes 12MiB or more"),
        (("--dtype", "float32", "--kv-cache-memory-bytes", "1MiB"), "--kv-cache-memory-bytes 13MiB or more"),
        (("--max-model-len", "1000000"), "1000000"),
    ],
)
def test_arguments_and_sizes_that_vllm_or_memory_refuses(
    vllm_python: str, arguments: tuple[str, ...], words: str
) -> None:
    assert words in refused("tiny", *arguments, python=vllm_python)


def test_a_model_without_kv(vllm_python: str, embedded_model: str) -> None:
    folder = model_folder(embedded_model, MAMBA)
    assert "the model has a state instead of KV" in refused(folder, python=vllm_python)
