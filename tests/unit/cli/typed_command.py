"""`diptych` as if its words had been typed, in this process."""

from __future__ import annotations

import sys

import pytest

from services.cli.main import main


def run_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    """The exit status of `diptych WORDS`, and what it wrote to standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["diptych", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    out, err = capsys.readouterr()
    return code or 0, out, err
