"""What `diptych bench` does, once its options are read."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from diptych.errors import ConfigError, StartError
from diptych.extras import require_extra
from diptych.file_limits import raise_open_file_limit
from planner.workload.workload import find_workload
from services.bench import report
from services.bench.goodput import GoodputEstimate
from services.bench.load_generator import RunOptions
from services.bench.options import REPLAY, BenchOptions
from services.bench.progress import BenchProgress
from services.bench.rate_search import BenchLoad, GoodputSearch, RateStudy
from services.bench.report import TIMES
from services.bench.server import BenchServer, probe_server

INTERRUPTED = 130
DEFAULT_RATE, DEFAULT_HIGHEST = 1.0, 1e4


def run_bench(options: BenchOptions) -> int:
    """Measure and print. Returns the exit status. Interrupted, it reports the runs that it has.

    Raises:
        ConfigError: the options, the workload or the address are wrong.
        StartError: nobody answers there, or no request of a run is answered; what was seen before is reported.
    """
    if options.plot is not None:
        require_extra("plan", "--plot", ", or leave out --plot")
    slo = options.slo
    ended: BaseException | None = None
    # An open loop may have thousands of requests open.
    raise_open_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, BenchProgress(slo) as live:
        server = runner.run(probe_server(options.url, options.api_key, options.model, options.endpoint))
        run_options = RunOptions(slo, 0.0, options.timeout_s, options.max_concurrency)
        load, cut = _make_load(options, server)
        study = RateStudy(server, load, run_options, live.run_ended, live.show_progress)
        runner.run(study.measure_idle_latency())
        estimate = None
        try:
            if options.search:
                estimate = _run_search(
                    options, study, lambda rate, seed: runner.run(study.measure_attainment(rate, seed))
                )
            else:
                runner.run(study.run_rates(_chosen_rates(options), range(options.seeds)))
        except (KeyboardInterrupt, StartError) as error:
            ended = error
        server.client.close_idle()
    if study.runs:
        _publish_report(options, server, study, estimate, cut, load.trace_requests)
    if isinstance(ended, StartError):
        raise ended
    return INTERRUPTED if ended is not None else 0


def _make_load(options: BenchOptions, server: BenchServer) -> tuple[BenchLoad, str]:
    """What is sent: the workload, cut to what the server takes; and a remark on the requests that are cut."""
    workload, most = find_workload(options.workload), options.context or server.max_model_len
    if options.fit:
        workload = workload.fitted()
    cut = ""
    if most is not None and (found := workload.longer(most, options.shrink)).longer:
        cut = f"{found} are longer than {most:,} tokens, and are cut to that"
    if options.shrink != 1.0 or most is not None:
        workload = workload.shrunk(options.shrink, most or 1 << 20)
    cv = options.cv if options.cv is not None else 1.0
    load = BenchLoad(
        workload, options.arrivals == REPLAY, cv, options.seconds, options.num_requests, options.warmup_s
    )
    return load, cut


def _chosen_rates(options: BenchOptions) -> Sequence[float | None]:
    if options.rates:
        return options.rate_list
    return [options.rate if options.rate or options.arrivals == REPLAY else DEFAULT_RATE]


def _run_search(
    options: BenchOptions, study: RateStudy, attained: Callable[[float, int], float]
) -> GoodputEstimate:
    search = GoodputSearch(attained, options.attainment, options.width)
    start, highest = options.rate or DEFAULT_RATE, options.max_rate or DEFAULT_HIGHEST
    return search.find_goodput(range(options.seeds), start, highest, study.run_size)


def _publish_report(
    options: BenchOptions,
    server: BenchServer,
    study: RateStudy,
    estimate: GoodputEstimate | None,
    cut: str,
    trace: int | None,
) -> None:
    points = study.rate_points()
    full = report.full_report(
        server, {"asked": options.report_fields()}, options.slo, points, estimate, trace
    )
    if cut:
        full["cut"] = cut
    if options.save is not None:
        _write_rows(
            options.save,
            b"".join(msgspec.json.encode(row) + b"\n" for row in report.request_rows(study.runs)),
        )
    if options.plot is not None:
        draw = importlib.import_module("services.bench.plot").draw_curve
        full["plot"] = [str(path) for path in draw(options.plot, server.model, points, options.slo)]
    if options.json:
        print(json.dumps(full))
    else:
        print_report(full)


def _write_rows(path: Path, lines: bytes) -> None:
    try:
        path.write_bytes(lines)
    except OSError as error:
        raise ConfigError("--save cannot be written", f"{path}: {error.strerror}", "another file") from None


def print_report(full: dict[str, Any]) -> None:
    """Print the report as text for a person."""
    console = Console()
    heads = [f"{name.upper()} ms p50/p90/p99" for name in ("ttft", "tpot")]
    grid = _make_grid("rate/s", "attained", "95 %", *heads, "failed")
    for figures in full["points"]:
        low, high = figures["attainment_interval"]
        kept = f"{'≤ ' * figures['given_up']}{figures['attainment']:.1%}"
        spans = (
            "/".join(_short_number(figures[f"{name}_ms"][at]) for at in ("p50", "p90", "p99"))
            for name in ("ttft", "tpot")
        )
        failed = ", ".join(f"{count} {kind}" for kind, count in figures["errors"].items()) or "0"
        grid.add_row(f"{figures['rate']:.4g}", kept, f"{low:.1%}-{high:.1%}", *spans, failed)
    console.print(grid)
    if len(full["points"]) == 1:
        (figures,) = full["points"]
        every = _make_grid("ms", *figures["ttft_ms"])
        for name in TIMES:
            every.add_row(name.upper(), *map(_short_number, figures[f"{name}_ms"].values()))
        console.print(every)
    for line in _report_remarks(full):
        console.print(line, highlight=False, markup=False)


def _make_grid(*heads: str) -> Table:
    grid = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for column in grid.columns:
        column.overflow = "fold"
    return grid


def _short_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _report_remarks(full: dict[str, Any]) -> list[str]:
    lines = []
    if "goodput" in full:
        found = full["goodput"]
        interval = found["interval"]
        doubt = f", 95 % {interval[0]:.4g} to {interval[1]:.4g}" if interval else ", of one seed"
        lines.append(f"goodput {found['rate']:.4g} requests/s{doubt}; {found['requests']} requests a run")
    clients = [one["client"] for one in full["points"]]
    late = max((one["late_ms"]["p99"] or 0.0 for one in clients), default=0.0)
    share = max((one["cpu_share"] for one in clients), default=0.0)
    waited = ", waiting for --max-concurrency included" if full["asked"]["max_concurrency"] else ""
    lines.append(
        f"the client used at most {share:.0%} of a core, and sent {_short_number(late)} ms late (p99{waited})"
    )
    if busy := sum(one["began_busy"] for one in full["points"]):
        lines.append(f"{busy} runs began although the server had not come to rest")
    if "cut" in full:
        lines.append(f"the workload {full['asked']['workload']}: {full['cut']}")
    if short := report.replay_cut_note(full):
        lines.append(short)
    if not full["lengths_forced"]:
        fewer = sum(one["short_answers"] for one in full["points"])
        lines.append(f"the server takes no ignore_eos: {fewer} answers are shorter than asked for")
    if not full["prompts_counted"]:
        lines.append("the server does not count prompts: a word was taken for a token")
    return lines
