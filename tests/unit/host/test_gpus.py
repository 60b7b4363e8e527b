"""Which GPUs are found here, and what is said if none is; NVML is made up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from services.host.gpus import find_gpus, gpu_amount, workers_per_gpu
from tests.support.made_up_gpus import made_gpu, plug_in

A, B, C = made_gpu("A", 80), made_gpu("B", 80), made_gpu("C", 40)


def refusal(environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        find_gpus(environ or {})
    lines = caught.value.lines()
    assert len(lines) <= 6 and "fix:" in lines[-1]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [A, B, C]),
        ("2,0", [C, A]),
        (" 1 ", [B]),
        ("GPU-2,GPU-0", [C, A]),
        ("1,7,0", [B]),
        ("1,GPU-9,0", [B]),
        ("0,-1,1", [A]),
    ],
)
def test_visible_gpus_are_found_in_their_order(
    visible: str | None, found: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml = plug_in(monkeypatch, tmp_path, A, B, C)
    assert find_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == found
    assert nvml.opened == 0


def test_no_gpu_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = plug_in(monkeypatch, tmp_path, A)
    assert "CUDA_VISIBLE_DEVICES=7 leaves none" in refusal({"CUDA_VISIBLE_DEVICES": "7"})
    assert nvml.opened == 0
    plug_in(monkeypatch, tmp_path)
    assert "NVIDIA's driver knows none" in refusal()
    plug_in(monkeypatch, tmp_path, A, error="Driver Not Loaded")
    assert "does not answer: Driver Not Loaded" in refusal()
    plug_in(monkeypatch, tmp_path, A, cuda=None)
    assert "torch was built without CUDA" in refusal()


def test_the_binding_is_asked_for() -> None:
    code = "import sys; sys.modules['pynvml'] = None\nfrom services.host import gpus\n"
    code += "gpus._check_torch = lambda: None\ntry: gpus.find_gpus({})\n"
    code += "except Exception as error: print(error.fix)\nassert not {'torch', 'ray'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "pip install 'diptych[gpu]'; or use --device cpu\n", done.stderr


@pytest.mark.parametrize(
    ("workers", "there", "sharing", "amount"),
    [(2, 1, 2, 0.5), (4, 4, 1, 1.0), (2, 4, 1, 1.0), (4, 2, 2, 0.5), (3, 2, 2, 0.5), (3, 1, 3, 0.3333)],
)
def test_workers_share_gpus_evenly(workers: int, there: int, sharing: int, amount: float) -> None:
    assert workers_per_gpu(workers, there) == sharing
    assert gpu_amount(sharing) == amount and amount * sharing <= 1
