"""What a person sees while a deployment starts and runs: phases with progress, one box, then only what changes.

On a terminal the phases are bars that fill; elsewhere each is one line when it is done.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from diptych.errors import DiptychError
from services.cluster.supervisor import Status

ORDER = ("", "load", "warm", "link", "ready")  # what a worker tells, in its order
WIDTH = 9


class Elapsed(ProgressColumn):
    """Seconds with one decimal, standing still once a phase is done."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_time or task.elapsed or 0.0:6.1f} s", style="dim")


@dataclass
class View:
    """Phases in order; `num_workers` shares the bars of load and warm-up among the workers."""

    console: Console
    num_workers: int
    up: bool = False
    _began_s: dict[str, float] = field(default_factory=dict)
    _rows: dict[str, TaskID] = field(default_factory=dict)
    _workers: dict[str, Status] = field(default_factory=dict)
    _states: dict[str, str] = field(default_factory=dict)
    _ends: dict[str, int] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _progress: Progress | None = None

    def begin(self, phase: str) -> None:
        """Show that `phase` is under way."""
        if phase in self._began_s:
            return
        self._began_s[phase] = time.monotonic()
        if self.console.is_terminal:
            if self._progress is None:
                self._progress = _bars(self.console)
                self._progress.start()
            self._rows[phase] = self._progress.add_task(phase.ljust(WIDTH), total=1.0, told="")

    def share(self, phase: str, fraction: float) -> None:
        """Show how far `phase` is, from 0 to 1."""
        if self._progress is not None and phase in self._rows:
            self._progress.update(self._rows[phase], completed=min(fraction, 0.999))

    def done(self, phase: str, told: str = "") -> None:
        """`phase` is complete; `told` in a few words what came of it. Said once."""
        if phase in self._done:
            return
        self.begin(phase)
        self._done.add(phase)
        if self._progress is not None:
            self._progress.update(self._rows[phase], completed=1.0, told=told)
        else:
            took_s = time.monotonic() - self._began_s[phase]
            self.line(f"{phase.ljust(WIDTH)} {took_s:6.1f} s  {told}".rstrip())

    def hear(self, status: Status) -> None:
        """A child's news: progress while starting, a line for what goes wrong later."""
        if status.name != "gateway":
            self._workers[status.name] = status
            if not self.up:
                self._advance()
        if self.up:
            self._later(status)
        self._states[status.name] = status.state

    @property
    def workers_ready(self) -> bool:
        """Whether every worker has said so itself."""
        ready = [name for name, one in self._workers.items() if one.state == "ready"]
        return len(ready) == self.num_workers

    def _advance(self) -> None:
        """Bars of what the workers do at the same time; each ends when the last worker is through."""
        for phase, word, following in (("load", "load", "warm-up"), ("warm-up", "warm", "canary")):
            fraction = sum(_fraction(one, word) for one in self._workers.values()) / self.num_workers
            if fraction >= 1.0:
                self.done(phase)
                self.begin(following)
            elif fraction > 0:
                self.begin(phase)
                self.share(phase, fraction)

    def _later(self, status: Status) -> None:
        # Told by the count of ends, not by states seen: a quick restart is over before anybody looked.
        ends = status.restarts
        ended = ends > self._ends.get(status.name, 0)
        self._ends[status.name] = ends
        if ended:
            why = f": {status.error.what}" if status.error else ""
            loop = (
                f"; {status.crashes} times in a row, trying on" if status.looping else ", starting it again"
            )
            self.line(f"{status.name} ended ({status.ended}{why}){loop}")
        if status.state == "retired":
            self.line(f"{status.name} was drained, and is not started again")
        if (
            status.state == "ready"
            and status.restarts
            and (ended or self._states.get(status.name) != "ready")
        ):
            self.line(f"{status.name} is back (start {status.restarts + 1})")

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def box(self, title: str, content: str) -> None:
        """The last word of a start. Rules above and below only, so that commands can be copied whole."""
        self.close()
        self.console.rule(title, style="green")
        self.line(content)
        self.console.rule(style="green")

    def close(self) -> None:
        """Leave the bars as they are and give the terminal back. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def fail(self, error: DiptychError) -> None:
        """Tell an error on standard error, after what was shown so far."""
        self.close()
        print("\n".join(error.lines()), file=sys.stderr, flush=True)


def _fraction(status: Status, phase: str) -> float:
    if status.phase not in ORDER or ORDER.index(status.phase) < ORDER.index(phase):
        return 0.0
    if status.phase != phase:
        return 1.0
    return min(1.0, status.done / status.total) if status.total else 0.0


def _bars(console: Console) -> Progress:
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        Elapsed(),
        TextColumn("{task.fields[told]}"),
    )
    # Not redirected: Ray would keep rich's stand-in for standard output, and stumble over it when the process ends.
    return Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
