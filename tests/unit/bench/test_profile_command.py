"""What `diptych profile` starts the deployment with that it measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

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


def test_a_profile_is_of_one_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list would be measured for minutes before the figures turn out to be of no single codec."""

    def start(*_: object) -> NoReturn:
        raise AssertionError("a deployment was started")

    monkeypatch.setattr(profile_command, "running_deployment", start)
    with pytest.raises(ConfigError, match=r"'raw:0.25,nuq4-1%' is not a single KV codec"):
        profile_command.run_profile(
            "", tmp_path / "p.json", "sharegpt", 1.0, 0, 4.0, (1,), 1, True, "raw:0.25,nuq4-1%"
        )
