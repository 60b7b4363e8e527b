"""vLLM's interpreter: what it imports, its environment, and what is said when it cannot be used."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import ConfigError, ModelError
from diptych.launch.own_packages import PACKAGES, ROOT
from diptych.specs import WorkerSpec
from services.host.vllm import links, probe
from services.host.vllm.interpreter import worker_command, worker_environment
from services.host.vllm.probe import VllmFacts, VllmRequest, ask_vllm, plan_on_vllm

QUESTION = {"model": "/m", "device": "cpu", "vllm_args": []}
SPEC = WorkerSpec(worker="w", role="decode", gateway="tcp://a:1", keys_dir="/k", model="/m")
VLLM_SPEC = WorkerSpec(
    worker="w", role="decode", gateway="tcp://a:1", keys_dir="/k", model="/m", engine="vllm",
    vllm_python="/v/bin/python", threads=3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def interpreter(folder: Path, *, vllm: str = "", files: str = "", missing: str = "") -> str:
    """A Python that also finds a package `vllm` of this version, with this text; and not the package `missing`."""
    packages = folder / "packages"
    packages.mkdir()
    if vllm:
        (packages / "vllm").mkdir()
        (packages / "vllm/__init__.py").write_text(f"__version__ = {vllm!r}\n{files}")
        (packages / f"vllm-{vllm}.dist-info").mkdir()
        (packages / f"vllm-{vllm}.dist-info/METADATA").write_text(f"Name: vllm\nVersion: {vllm}\n")
    hides = f"import sys\nsys.modules[{missing!r}] = None\n" if missing else ""
    (packages / "sitecustomize.py").write_text(hides)
    made = folder / "python"
    made.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} "$@"\n')
    made.chmod(0o755)
    return str(made)


def refused(python: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ask_vllm(python, dict(QUESTION))
    assert caught.value.fix and len(caught.value.lines()) <= 6
    return "\n".join(caught.value.lines())


# ---- what it imports


def test_only_our_packages_are_on_the_import_path(tmp_path: Path) -> None:
    environ = worker_environment(VLLM_SPEC, {"PYTHONPATH": "/other", "VLLM_CPU_KVCACHE_SPACE": "9"})
    folder = Path(environ["PYTHONPATH"])
    assert sorted(os.listdir(folder)) == sorted(PACKAGES)
    program = "import sys, vllm_worker.port, diptych.specs; print(diptych.specs.__file__); print('ray' in sys.modules)"
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert shown == [str(folder / "diptych/specs.py"), "False"]
    assert (
        environ["OMP_NUM_THREADS"] == "3"
        and environ["HF_HUB_OFFLINE"] == environ["VLLM_NO_USAGE_STATS"] == "1"
    )
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "VLLM_CPU_KVCACHE_SPACE" not in environ
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert (
        worker_environment(VLLM_SPEC, {"VLLM_CPU_OMP_THREADS_BIND": "0-3"})["VLLM_CPU_OMP_THREADS_BIND"]
        == "0-3"
    )


def test_workers_of_our_own_engine_start_as_before() -> None:
    assert worker_command(SPEC, "services.worker") == [sys.executable, "-m", "services.worker"]
    assert worker_environment(SPEC, {})["PYTHONPATH"] == str(ROOT)
    assert worker_command(VLLM_SPEC, "services.worker") == [
        "/v/bin/python",
        "-m",
        "services.worker.vllm_process",
    ]
    assert worker_command(VLLM_SPEC, "tests.toy") == [sys.executable, "-m", "tests.toy"]


def test_links_are_made_once_and_again_if_somebody_changed_them(tmp_path: Path, cache: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(cache)}
    folder = links.link_packages(environ)
    inode = folder.stat().st_ino
    assert links.link_packages(environ) == folder and folder.stat().st_ino == inode
    (folder / "torch").symlink_to(tmp_path)
    assert links.link_packages(environ) == folder and not (folder / "torch").exists()
    folder.chmod(0o777)
    assert stat.S_IMODE(links.link_packages(environ).stat().st_mode) == 0o700
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_without_a_cache_folder_links_are_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert links.link_packages({"XDG_CACHE_HOME": str(tmp_path / "file")}).parent == tmp_path


def test_vllm_does_not_see_files_that_it_would_take_for_weights(tmp_path: Path) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    for folder in (plain, ours):
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
    (ours / "kvquant.safetensors").write_text("constants")
    assert links.link_model(plain, os.environ) == plain
    linked = links.link_model(ours, os.environ)
    assert [(entry.name, entry.read_text()) for entry in linked.iterdir()] == [
        ("model.safetensors", "weights")
    ]


# ---- what is said when it cannot be used


def test_an_interpreter_without_vllm(tmp_path: Path) -> None:
    assert "has no vLLM" in refused(interpreter(tmp_path))


def test_an_interpreter_without_packages_of_our_part(tmp_path: Path) -> None:
    shown = refused(interpreter(tmp_path, vllm="0.32.0", missing="xxhash"))
    assert "has vLLM, but not xxhash" in shown and "-m pip install xxhash" in shown


@pytest.mark.parametrize("version", ["0.12.0", "0.32.0"])
def test_a_version_outside_the_list_or_without_a_name(tmp_path: Path, version: str) -> None:
    shown = refused(interpreter(tmp_path, vllm=version))
    assert f"vLLM {version} is not supported" in shown and "vllm.SamplingParams" in shown and "more" in shown


def test_programs_that_are_no_python(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho no such thing >&2\n")
    silent.chmod(0o755)
    assert "no such thing" in refused(str(silent))
    assert "cannot be used" in refused(str(tmp_path / "missing"))
    assert "cannot be used" in refused("/bin/true")


# ---- memory


FACTS = VllmFacts(
    version="0.32.0", device="cpu", dtype="float32", max_model_len=128, architecture="LlamaForCausalLM", layers=2,
    block_bytes=1 << 20,
)  # fmt: skip


def planned(monkeypatch: pytest.MonkeyPatch, folder: Path, **changed: Any) -> probe.VllmPlan:
    asked: list[dict[str, Any]] = []

    def answer(python: str, question: dict[str, Any]) -> VllmFacts:
        asked.append(question)
        return FACTS

    monkeypatch.setattr(probe, "ask_vllm", answer)
    given: dict[str, Any] = {
        "tp": 1, "max_model_len": None, "kv_bytes": None, "step_tokens": 512, "step_rows": 8, "num_workers": 2,
        "host_bytes": 8 << 30,
    }  # fmt: skip
    request = VllmRequest("/python", buffer_bytes=changed.pop("buffer_bytes", None))
    plan = plan_on_vllm(request, "m", folder, **given | changed)
    assert json.dumps(asked[0]) and asked[0]["gpu_memory_utilization"] is None
    return plan


def test_kv_and_buffer_have_room_for_several_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = planned(monkeypatch, tmp_path)
    assert plan.kv_bytes == 16 * (3 << 20) and plan.share.buffer_bytes % (1 << 20) == 0
    assert plan.share.buffer_bytes >= 2 << 20
    assert "vLLM 0.32.0 on cpu" in plan.summary and "context 128" in plan.summary
    assert planned(monkeypatch, tmp_path, kv_bytes=5 << 20).kv_bytes == 5 << 20


def test_ranks_of_a_worker_share_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "find_gpus", lambda environ, own_torch: [object()] * 3)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(probe, "ask_vllm", lambda python, question: asked.append(question) or FACTS)  # type: ignore[func-returns-value]
    given: dict[str, Any] = {
        "max_model_len": None,
        "kv_bytes": 8 << 20,
        "step_tokens": 512,
        "step_rows": 8,
        "host_bytes": 8 << 30,
    }
    request = VllmRequest("/python", device="cuda")
    plan = plan_on_vllm(request, "m", tmp_path, tp=1, num_workers=6, **given)
    assert plan.share.workers == 2 and asked[0]["gpu_memory_utilization"] == 0.45
    plan = plan_on_vllm(request, "m", tmp_path, tp=2, num_workers=1, **given)
    assert plan.share.workers == 1 and asked[1]["kv_bytes"] == 4 << 20
    with pytest.raises(ConfigError, match="2 workers of 2 ranks need 4 GPUs") as caught:
        plan_on_vllm(request, "m", tmp_path, tp=2, num_workers=2, **given)
    assert "there are 3" in caught.value.why


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"buffer_bytes": 1 << 20}, "--transfer-buffer-bytes 2MiB or more"),
        ({"kv_bytes": 1 << 20}, "--kv-cache-memory-bytes 3MiB or more"),
        ({"kv_bytes": 64 << 30}, "--max-model-len"),
        ({"host_bytes": 1 << 20}, "does not fit in host memory"),
    ],
)
def test_memory_that_does_not_hold_one_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, int], words: str
) -> None:
    with pytest.raises(ModelError) as caught:
        planned(monkeypatch, tmp_path, **changed)
    assert words in "\n".join(caught.value.lines()) and len(caught.value.lines()) <= 6
