"""The file is read again when it is replaced; one that is wrong, half written or gone changes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import ConfigError
from services.gateway.keys.key_watch import NUM_LOOKS, KeyFileWatch, open_named_keys
from services.gateway.keys.named_keys import NamedKeys, tenant_of_name
from tests.unit.gateway.keys.named_file import write_keys

A, B = {"name": "a", "key": "a" * 20}, {"name": "b", "key": "b" * 20}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys.yaml", [A])


def names(keys: NamedKeys) -> list[str]:
    return [rates.key.name for rates in keys.rates]


Steps = Callable[[NamedKeys, KeyFileWatch], Coroutine[Any, Any, None]]


def watched(file: Path, steps: Steps) -> None:
    watch = open_named_keys(str(file), ("p" * 20,))
    keys = watch.keys
    assert names(keys) == ["a"]
    asyncio.run(steps(keys, watch))


def test_a_replaced_file_counts_at_once_and_one_written_over_when_it_rests(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def steps(keys: NamedKeys, watch: KeyFileWatch) -> None:
        await watch.look()
        assert not caplog.records
        write_keys(file, [A, B])
        await watch.look()
        assert names(keys) == ["a", "b"] and "new: b; gone: none" in caplog.text
        with file.open("w") as opened:
            opened.write(f"keys:\n- {json.dumps(B)}\n")
            opened.flush()
            await watch.look()
            assert names(keys) == ["a", "b"], "who writes may not be done"
            opened.write(f"- {json.dumps(A)}\n")
        await watch.look()
        assert names(keys) == ["a", "b"]
        await watch.look()
        assert names(keys) == ["b", "a"]

    with caplog.at_level(logging.WARNING):
        watched(file, steps)
    assert "a" * 20 not in caplog.text


def test_a_link_that_is_turned_counts_at_once(tmp_path: Path) -> None:
    """An orchestrator mounts a secret as a link to a folder, which it exchanges."""
    for number, entries in enumerate(([A], [B])):
        (tmp_path / str(number)).mkdir()
        write_keys(tmp_path / str(number) / "keys.yaml", entries)
    (tmp_path / "now").symlink_to("0")

    async def steps(keys: NamedKeys, watch: KeyFileWatch) -> None:
        (tmp_path / "next").symlink_to("1")
        (tmp_path / "next").replace(tmp_path / "now")
        await watch.look()
        assert names(keys) == ["b"]

    watched(tmp_path / "now" / "keys.yaml", steps)


@pytest.mark.parametrize("wrong", ["unknown field", "open to others", "gone", "taken"])
def test_a_file_that_is_wrong_changes_nothing_and_is_logged_once(
    file: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def steps(keys: NamedKeys, watch: KeyFileWatch) -> None:
        if wrong == "unknown field":
            write_keys(file, [B | {"limit": 3}])
        elif wrong == "taken":
            write_keys(file, [{"name": "b", "key": "p" * 20}])
        elif wrong == "open to others":
            write_keys(file, [B])
            file.chmod(0o644)
        else:
            file.unlink()
        for _ in range(4):
            await watch.look()
        assert names(keys) == ["a"]
        assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
        assert str(file) in watch.report(False, 0.0)["problem"] and "names" not in watch.report(False, 0.0)
        write_keys(file, [B])
        # A file that was gone counts once it rests.
        for _ in range(2):
            await watch.look()
        assert names(keys) == ["b"] and watch.report(True, watch.loaded_s + 2)["problem"] is None
        assert watch.report(True, watch.loaded_s + 2) | {"names": 0} == {
            "count": 1, "age_s": 2.0, "problem": None, "names": 0
        }  # fmt: skip

    watched(file, steps)
    assert "b" * 20 not in caplog.text and "p" * 20 not in caplog.text


def test_a_gateway_does_not_start_with_a_wrong_file(file: Path) -> None:
    file.chmod(0o644)
    with pytest.raises(ConfigError):
        open_named_keys(str(file), ())


def test_many_who_wait_for_a_tenant_share_the_looks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = [], KeyFileWatch.look

    async def count(watch: KeyFileWatch) -> None:
        looks.append(watch)
        await look(watch)

    monkeypatch.setattr(KeyFileWatch, "look", count)

    async def steps(keys: NamedKeys, watch: KeyFileWatch) -> None:
        await asyncio.gather(*(watch.wait_for_tenant("nobody") for _ in range(50)))
        assert len(looks) <= 2 * NUM_LOOKS
        write_keys(file, [A, B])
        tenant = tenant_of_name("b")
        await asyncio.gather(*(watch.wait_for_tenant(tenant) for _ in range(3)))
        assert keys.accepts_tenant(tenant)

    watched(file, steps)
