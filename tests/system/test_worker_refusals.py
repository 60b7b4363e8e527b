"""Worker processes that cannot start say why in one line of progress, and end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.worker_driver import PATIENCE_S, ROOT, Driver

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A gateway's end, and no worker yet."""
    driver = Driver(tmp_path_factory.mktemp("refused"), Path(ROOT / "models" / "tiny"))
    yield driver
    driver.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere/at/all"}, "no model at"),
        ({"kv_bytes": 1 << 20}, "does not fit in memory"),
        ({"transports": ("pigeon",)}, "pigeon"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(
    driver: Driver, changes: dict[str, object], words: str
) -> None:
    member = driver.start("prefill-9", **changes)
    assert member.process.wait(PATIENCE_S) == 3
    member.reader.join()
    error = member.lines[-1]["error"]
    assert words in error["what"] and set(error) == {"what", "why", "fix"}
    assert len(f"{error['what']}\n{error['why']}\n{error['fix']}".splitlines()) <= 6
    del driver.members["prefill-9"]
