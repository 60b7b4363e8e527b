"""What the trial came to: a table of checks, with the versions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Report:
    """A row for each check: what, whether it works, and the figure or the reason. `file` has all rows at any time."""

    file: Path
    versions: Mapping[str, str] = field(default_factory=dict)
    rows: list[tuple[str, bool, str]] = field(default_factory=list)

    def check(self, what: str, call: Callable[[], str]) -> bool:
        """Run one check, which returns its figure; whether it passed. It fails by raising, whatever it raises."""
        began_s = time.monotonic()
        print(f"{what} ...", flush=True)
        try:
            passed, figure = True, call()
        except Exception as error:
            passed, figure = False, f"{type(error).__name__}: {' '.join(str(error).split())[:3000]}"
        print(
            f"  {'works' if passed else 'FAILS'} after {time.monotonic() - began_s:.0f} s: {figure}",
            flush=True,
        )
        self.rows.append((what, passed, figure))
        self.file.write_text(self.page())
        return passed

    @property
    def failed(self) -> int:
        return sum(not passed for _, passed, _ in self.rows)

    def page(self) -> str:
        """The report, as Markdown."""
        lines = [
            "| part | version |",
            "|---|---|",
            *(f"| {name} | {text} |" for name, text in self.versions.items()),
        ]
        lines += ["", "| check | result | figure |", "|---|---|---|"]
        for what, passed, figure in self.rows:
            figure = figure.replace("|", "\\|")
            lines.append(f"| {what} | {'works' if passed else '**fails**'} | {figure} |")
        return "\n".join(lines) + "\n"
