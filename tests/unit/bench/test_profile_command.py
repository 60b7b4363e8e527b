"""What `diptych profile` starts the deployment with that it measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from diptych.errors import ConfigError, StartError
from services.bench import profile_command
from services.bench.profile_run import PoolSizes


@pytest.mark.parametrize("named", [False, True])
def test_workers_get_the_codec_and_its_calibration(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def start(pools: PoolSizes, model: str = "", options: Sequence[str] = ()) -> NoReturn:
        seen.extend(options)
        raise StartError("not here")

    monkeypatch.setattr(profile_command, "running_deployment", start)
    file = tmp_path / "mine.safetensors"
    more = (file,) if named else ()
    with pytest.raises(StartError, match="not here"):
        profile_command.run_profile(
            "", tmp_path / "p.json", "sharegpt", 1.0, 0, 4.0, (1,), 1, True, "nuq4-1%", *more
        )
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
        yield SimpleNamespace(target=SimpleNamespace(max_model_len=1024))

    def measure(*arguments: Any) -> NoReturn:
        asked.append(arguments[-1])
        raise StartError("not here")

    monkeypatch.setattr(profile_command, "running_deployment", start)
    monkeypatch.setattr(profile_command, "measure_profile", measure)
    with pytest.raises(StartError):
        profile_command.run_profile("", tmp_path / "p.json", "sharegpt", 1.0, 0, 4.0, (1,), 1, True, codecs)
    assert asked == [names]


@pytest.mark.parametrize("codecs", ["raw:0.25,int5", "raw:0.9,tq4:0.9", "raw,raw"])
def test_a_list_that_cannot_be_is_refused_before_anything_is_started(
    codecs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> NoReturn:
        raise AssertionError("a deployment was started")

    monkeypatch.setattr(profile_command, "running_deployment", start)
    with pytest.raises(ConfigError) as caught:
        profile_command.run_profile("", tmp_path / "p.json", "sharegpt", 1.0, 0, 4.0, (1,), 1, True, codecs)
    assert len(caught.value.lines()) <= 6
