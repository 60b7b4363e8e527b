"""What `diptych profile` starts the deployment with that it measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from diptych.errors import ConfigError, StartError
from diptych.eviction_spec import ADA
from planner.types import KvKeep
from planner.workload.workload import find_workload
from services.bench.profile_run import LiveDeployment, PoolSizes, measure_profile
from services.cli.profile import command
from services.cli.profile.options import ProfileOptions
from tests.support.made_up_gpus import made_gpu, plug_in


def small_options(folder: Path, **more: Any) -> ProfileOptions:
    return ProfileOptions(out=folder / "p.json", seconds=4.0, depths="1", as_json=True, **more)


@pytest.mark.parametrize("named", [False, True])
def test_workers_get_the_codec_and_its_calibration(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def start(pools: PoolSizes, model: str = "", options: Sequence[str] = ()) -> NoReturn:
        seen.extend(options)
        raise StartError("not here")

    monkeypatch.setattr(command, "running_deployment", start)
    file = tmp_path / "mine.safetensors"
    more: dict[str, Any] = {"kv_cache_calibration": file} if named else {}
    with pytest.raises(StartError, match="not here"):
        command.run_profile(small_options(tmp_path, kv_cache_codec="nuq4-1%", **more))
    calibration = ["--kv-cache-calibration", str(file)] if named else []
    assert seen == ["--kv-cache-codec", "nuq4-1%", *calibration]


@pytest.mark.parametrize(
    ("codecs", "names"),
    [
        ("raw:0.25,tq4", ["raw", "tq4"]),
        ("tq4:0.5,raw", ["raw", "tq4"]),
        ("int8:0.5,tq4", ["int8", "tq4"]),
        ("tq4", []),
    ],
)
def test_each_class_of_a_list_is_measured_raw_first(
    codecs: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    @contextlib.contextmanager
    def start(pools: PoolSizes, model: str = "", options: Sequence[str] = ()) -> Iterator[Any]:
        assert list(options) == ["--kv-cache-codec", codecs]
        yield SimpleNamespace(server=SimpleNamespace(max_model_len=1024))

    def measure(*arguments: Any) -> NoReturn:
        asked.append(arguments[-2])
        assert arguments[-1] == 1.0, "nothing is evicted"
        raise StartError("not here")

    monkeypatch.setattr(command, "running_deployment", start)
    monkeypatch.setattr(command, "measure_profile", measure)
    with pytest.raises(StartError):
        command.run_profile(small_options(tmp_path, kv_cache_codec=codecs))
    assert asked == [names]


@pytest.mark.parametrize("codecs", ["raw:0.25,int5", "raw:0.9,tq4:0.9", "raw,raw"])
def test_a_list_that_cannot_be_is_refused_before_anything_is_started(
    codecs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> NoReturn:
        raise AssertionError("a deployment was started")

    monkeypatch.setattr(command, "running_deployment", start)
    with pytest.raises(ConfigError) as caught:
        command.run_profile(small_options(tmp_path, kv_cache_codec=codecs))
    assert len(caught.value.lines()) <= 6


def test_eviction_is_measured_beside_whole_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers evict nothing by themselves: the same ones serve both. They have to be able to."""

    @contextlib.contextmanager
    def start(pools: PoolSizes, model: str = "", options: Sequence[str] = ()) -> Iterator[Any]:
        option, codec = options
        assert option == "--kv-cache-codec"
        status = {"kv_keep": {"classes": ["raw"] if codec == "raw" else []}}
        yield SimpleNamespace(server=SimpleNamespace(max_model_len=1024), get_status=lambda: status)

    def measure(*arguments: Any) -> NoReturn:
        assert arguments[-2:] == ([], 0.95)
        raise StartError("not here")

    monkeypatch.setattr(command, "running_deployment", start)
    monkeypatch.setattr(command, "measure_profile", measure)

    def run(codecs: str, keep: float) -> None:
        command.run_profile(small_options(tmp_path, kv_cache_codec=codecs, kv_keep=keep))

    with pytest.raises(StartError):
        run("raw", 0.95)
    for codecs, keep in (("raw", 0.0), ("raw", 1.5), ("raw:0.5,tq4", 0.95), ("int8", 0.95)):
        with pytest.raises(ConfigError) as caught:
            run(codecs, keep)
        assert len(caught.value.lines()) <= 6 and "--kv-keep" in "\n".join(caught.value.lines())


def test_the_share_is_that_of_the_first_decisions_of_the_stage(tmp_path: Path) -> None:
    lines = [
        {"event": "arrive", "request": "a"},
        {"event": "tokens", "request": "a", "count": 1, "kept_rows": 30, "all_rows": 100},
        {"event": "tokens", "request": "a", "count": 1},
        {"event": "tokens", "request": "a", "count": 1, "kept_rows": 99, "all_rows": 164},
        {"event": "tokens", "request": "b", "count": 1, "kept_rows": 150, "all_rows": 300},
        {"event": "tokens", "request": "before", "count": 1, "kept_rows": 1, "all_rows": 900},
    ]
    (tmp_path / "requests").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + b"{")
    unused: Any = None
    live = LiveDeployment(PoolSizes(), "", "", tmp_path, unused, unused)
    assert live.read_kept_share({"a", "b", "c"}) == 180 / 400
    assert live.read_kept_share({"c"}) == 1.0, "none has decided"


def test_the_rule_is_that_of_the_requests_that_have_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = None
    live, measured = LiveDeployment(PoolSizes(), "", "", unused, unused, unused), list[dict[str, str]]()
    monkeypatch.setattr(LiveDeployment, "get_status", lambda self: {"kv_keep": {"measured": measured}})
    assert live.find_keep_rule() == KvKeep(0.9, 0.5).rule == ADA
    measured.append({"rule": "zap@0123456789abcdef"})
    assert live.find_keep_rule() == measured[0]["rule"]


def test_a_gpu_that_the_planner_does_not_know_is_refused_before_anything_is_measured() -> None:
    worker = {"device": "NVIDIA Imaginary 9000", "kv_classes": {}, "stats": {"slabs_total": 9}}
    status = {"max_model_len": 2048, "workers": [worker]}
    live: Any = SimpleNamespace(model="", get_status=lambda: status)
    with pytest.raises(ConfigError, match="'NVIDIA Imaginary 9000' is not known") as caught:
        measure_profile(live, find_workload("sharegpt"))
    assert len(caught.value.lines()) <= 6


def test_a_profile_is_of_the_gpu_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be measured or named is refused before anything is started."""
    seen: list[str] = []

    def start(pools: PoolSizes, model: str = "", options: Sequence[str] = ()) -> NoReturn:
        seen.extend(options)
        raise StartError("started")

    def refusal(**more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            command.run_profile(small_options(tmp_path, device="cuda", **more))
        assert caught.value.fix and len(caught.value.lines()) <= 6
        return "\n".join(caught.value.lines())

    monkeypatch.setattr(command, "running_deployment", start)
    plug_in(monkeypatch, tmp_path)
    assert "there is no device 'cuda' here" in refusal()
    plug_in(monkeypatch, tmp_path, made_gpu("NVIDIA Imaginary 9000"))
    assert "'NVIDIA Imaginary 9000' is not known" in refusal()
    plug_in(monkeypatch, tmp_path, made_gpu("NVIDIA H200"), made_gpu("NVIDIA L40S"))
    assert "a profile is of one kind" in refusal()
    plug_in(monkeypatch, tmp_path, made_gpu("NVIDIA H200"))
    assert "several KV classes" in refusal(kv_cache_codec="raw:0.5,tq4")
    assert "evicts KV" in refusal(kv_keep=0.9)
    assert not seen
    with pytest.raises(StartError, match="started"):
        command.run_profile(small_options(tmp_path, device="cuda"))
    assert seen == ["--kv-cache-codec", "raw", "--device", "cuda"]


def test_vllm_workers_are_measured_as_they_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def start(pools: PoolSizes, model: str = "", options: Sequence[str] = ()) -> NoReturn:
        seen.extend(options)
        raise StartError("not here")

    monkeypatch.setattr(command, "running_deployment", start)
    monkeypatch.setattr("services.host.device_settings.check_vllm_settings", lambda loaded: None)
    vllm: dict[str, Any] = {
        "engine": "vllm",
        "vllm_python": tmp_path / "python",
        "vllm_args": "--enforce-eager",
    }
    with pytest.raises(StartError, match="not here"):
        command.run_profile(small_options(tmp_path, **vllm))
    assert seen == [
        "--engine",
        "vllm",
        "--vllm-python",
        str(tmp_path / "python"),
        "--vllm-args=--enforce-eager",
    ]


def test_what_vllm_does_not_have_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    options = small_options(tmp_path, engine="vllm", vllm_python=tmp_path / "python", kv_cache_codec="tq4")
    with pytest.raises(ConfigError, match="no effect on vLLM"):
        command.run_profile(options)
    with pytest.raises(ConfigError, match="has no effect"):
        command.run_profile(small_options(tmp_path, vllm_args="--enforce-eager"))
