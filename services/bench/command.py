"""What `diptych bench` does, once its options are read."""

from __future__ import annotations

import asyncio
import importlib
import json
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from diptych.errors import ConfigError, StartError
from planner.goodput import Goodput
from planner.workload import named
from services.bench import report
from services.bench.drive import Plan
from services.bench.live import Live
from services.bench.options import REPLAY, Options
from services.bench.report import TIMES
from services.bench.study import Load, Search, Study
from services.bench.target import Target, meet

INTERRUPTED = 130
DEFAULT_RATE, DEFAULT_HIGHEST = 1.0, 1e4


def bench(options: Options) -> int:
    """Measure and print. Returns the exit status. Interrupted, it reports the runs that it has.

    Raises:
        ConfigError: the options, the workload or the address are wrong.
        StartError: nobody answers there, or no request of a run is answered; what was seen before is reported.
    """
    slo = options.slo
    ended: BaseException | None = None
    _allow_sockets()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, Live(slo) as live:
        target = runner.run(meet(options.url, options.api_key, options.model, options.endpoint))
        plan = Plan(slo, 0.0, options.timeout_s, options.max_concurrency)
        load, cut = _load(options, target)
        study = Study(target, load, plan, live.told, live.watch)
        runner.run(study.prepare())
        found = None
        try:
            if options.search:
                found = _search(options, study, lambda rate, seed: runner.run(study.attained(rate, seed)))
            else:
                runner.run(study.curve(_rates(options), range(options.seeds)))
        except (KeyboardInterrupt, StartError) as error:
            ended = error
        target.client.close()
    if study.runs:
        _publish(options, target, study, found, cut, load.whole)
    if isinstance(ended, StartError):
        raise ended
    return INTERRUPTED if ended is not None else 0


def _allow_sockets() -> None:
    """An open loop may have thousands of requests open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _load(options: Options, target: Target) -> tuple[Load, str]:
    """What is sent: the workload, cut to what the server takes; and what is told of requests that are cut."""
    workload, most = named(options.workload), options.context or target.context_tokens
    if options.fit:
        workload = workload.fitted()
    cut = ""
    if most is not None and (found := workload.longer(most, options.shrink)).longer:
        cut = f"{found} are longer than {most:,} tokens, and are cut to that"
    if options.shrink != 1.0 or most is not None:
        workload = workload.shrunk(options.shrink, most or 1 << 20)
    cv = options.cv if options.cv is not None else 1.0
    load = Load(
        workload, options.arrivals == REPLAY, cv, options.seconds, options.num_requests, options.warmup_s
    )
    return load, cut


def _rates(options: Options) -> Sequence[float | None]:
    if options.rates:
        return options.many
    return [options.rate if options.rate or options.arrivals == REPLAY else DEFAULT_RATE]


def _search(options: Options, study: Study, attained: Callable[[float, int], float]) -> Goodput:
    search = Search(attained, options.attainment, options.width)
    start, highest = options.rate or DEFAULT_RATE, options.max_rate or DEFAULT_HIGHEST
    return search.goodput(range(options.seeds), start, highest, study.size)


def _publish(
    options: Options, target: Target, study: Study, found: Goodput | None, cut: str, trace: int | None
) -> None:
    points = study.points()
    told = report.whole(target, {"asked": options.told()}, options.slo, points, found, trace)
    if cut:
        told["cut"] = cut
    if options.save is not None:
        _write(options.save, b"".join(msgspec.json.encode(row) + b"\n" for row in report.rows(study.runs)))
    if options.plot is not None:
        draw = importlib.import_module("services.bench.drawing").draw
        told["plot"] = [str(path) for path in draw(options.plot, target.model, points, options.slo)]
    if options.json:
        print(json.dumps(told))
    else:
        show(told)


def _write(path: Path, lines: bytes) -> None:
    try:
        path.write_bytes(lines)
    except OSError as error:
        raise ConfigError("--save cannot be written", f"{path}: {error.strerror}", "another file") from None


def show(told: dict[str, Any]) -> None:
    """The report for a reader."""
    console = Console()
    heads = [f"{name.upper()} ms p50/p90/p99" for name in ("ttft", "tpot")]
    grid = _grid("rate/s", "attained", "95 %", *heads, "failed")
    for figures in told["points"]:
        low, high = figures["attainment_interval"]
        kept = f"{'≤ ' * figures['given_up']}{figures['attainment']:.1%}"
        spans = (
            "/".join(_short(figures[f"{name}_ms"][at]) for at in ("p50", "p90", "p99"))
            for name in ("ttft", "tpot")
        )
        failed = ", ".join(f"{count} {kind}" for kind, count in figures["errors"].items()) or "0"
        grid.add_row(f"{figures['rate']:.4g}", kept, f"{low:.1%}-{high:.1%}", *spans, failed)
    console.print(grid)
    if len(told["points"]) == 1:
        (figures,) = told["points"]
        every = _grid("ms", *figures["ttft_ms"])
        for name in TIMES:
            every.add_row(name.upper(), *map(_short, figures[f"{name}_ms"].values()))
        console.print(every)
    for line in _remarks(told):
        console.print(line, highlight=False, markup=False)


def _grid(*heads: str) -> Table:
    grid = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for column in grid.columns:
        column.overflow = "fold"
    return grid


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _remarks(told: dict[str, Any]) -> list[str]:
    lines = []
    if "goodput" in told:
        found = told["goodput"]
        interval = found["interval"]
        doubt = f", 95 % {interval[0]:.4g} to {interval[1]:.4g}" if interval else ", of one seed"
        lines.append(f"goodput {found['rate']:.4g} requests/s{doubt}; {found['requests']} requests a run")
    clients = [one["client"] for one in told["points"]]
    late = max((one["late_ms"]["p99"] or 0.0 for one in clients), default=0.0)
    share = max((one["cpu_share"] for one in clients), default=0.0)
    waited = ", waiting for --max-concurrency included" if told["asked"]["max_concurrency"] else ""
    lines.append(
        f"the client used at most {share:.0%} of a core, and sent {_short(late)} ms late (p99{waited})"
    )
    if busy := sum(one["began_busy"] for one in told["points"]):
        lines.append(f"{busy} runs began although the server had not come to rest")
    if "cut" in told:
        lines.append(f"the workload {told['asked']['workload']}: {told['cut']}")
    if short := report.cut(told):
        lines.append(short)
    if not told["lengths_forced"]:
        fewer = sum(one["short_answers"] for one in told["points"])
        lines.append(f"the server takes no ignore_eos: {fewer} answers are shorter than asked for")
    if not told["prompts_counted"]:
        lines.append("the server does not count prompts: a word was taken for a token")
    return lines
