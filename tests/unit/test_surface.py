"""What others see of the product is what tests/support/surface.txt says, and does not depend on the machine."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

from tests.support.surface import FILE, ROOT, render_surface

ADVICE = """\
What others see of Diptych has changed. Below, `-` is what tests/support/surface.txt says, and `+` what the code says.
Look at every line as a user would: do scripts, dashboards, files and older workers still fit? If the change is meant:

    python -m tests.support.surface --write

Commit tests/support/surface.txt with the change, and say in the commit's body what users see differently.
"""


@pytest.fixture(scope="module")
def surface() -> str:
    return render_surface()


def test_what_others_see_is_as_committed(surface: str) -> None:
    committed = FILE.read_text(encoding="utf-8")
    difference = unified_diff(
        committed.splitlines(), surface.splitlines(), "committed", "code", lineterm="", n=2
    )
    if surface != committed:
        pytest.fail(ADVICE + "\n" + "\n".join(difference), pytrace=False)


def test_nothing_depends_on_the_machine(surface: str) -> None:
    """No folder of this machine is in it, and nothing of the stand-ins that parts of the gateway were given."""
    folders = [str(folder) for folder in (ROOT, Path.home()) if folder.name]
    assert [text for text in (*folders, "MagicMock", " at 0x") if text in surface] == []
