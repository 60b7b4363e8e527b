"""The options of `diptych bench`, declared once: the command line is made from these fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diptych.config.fields import URL_ENV
from diptych.errors import ConfigError
from diptych.slo import Slo, read_slo
from services.host.output_paths import unwritable_reason

POISSON, GAMMA, REPLAY = "poisson", "gamma", "replay"
# Seconds of arrivals in a run whose requests are drawn, if no duration is given.
DEFAULT_RUN_S = 60.0
ENDPOINTS = ("auto", "completions", "chat")
EXAMPLES = {
    "--duration": "60", "--warmup": "5", "--timeout": "600", "--shrink": "4", "--cv": "2",
}  # fmt: skip
SERVER, REQUESTS, RUNS, SLOS, OUTPUT = "Server", "Requests", "Runs", "SLOs", "Output"


def _bench_option(default: Any, flag: str, panel: str, help: str, **more: Any) -> Any:
    """`more` is typer's."""
    return field(default=default, metadata={"flag": flag, "rich_help_panel": panel, "help": help, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """How `diptych bench` was called. Raises ConfigError for what cannot be, or would have no effect."""

    url: str = _bench_option(
        "http://127.0.0.1:8000", "--url", SERVER, "Any server with OpenAI's API", envvar=URL_ENV
    )
    api_key: str | None = _bench_option(None, "--api-key", SERVER, "Bearer key", envvar="DIPTYCH_API_KEY")
    model: str | None = _bench_option(None, "--model", SERVER, "Default: the first one served")
    endpoint: str = _bench_option(
        "auto", "--endpoint", SERVER, "completions, chat, or auto: what the server has"
    )
    workload: str = _bench_option(
        "sharegpt",
        "--workload",
        REQUESTS,
        "sharegpt, humaneval, longbench, or a trace: Azure's CSV, Mooncake's or other JSON lines, a request log",
        metavar="NAME|FILE",
    )
    shrink: float = _bench_option(
        1.0, "--shrink", REQUESTS, "Divide all lengths by this, for a small model", min=1e-3
    )
    context: int | None = _bench_option(
        None, "--context", REQUESTS, "Most tokens of prompt and answer; default: what the server takes", min=2
    )
    arrivals: str = _bench_option(
        POISSON,
        "--arrivals",
        REQUESTS,
        "poisson; gamma, with --cv; replay: a trace's times, or its shape at --rate",
    )
    fit: bool = _bench_option(
        False,
        "--fit",
        REQUESTS,
        "Draw from lognormals fitted to the trace, for a trace too short to have long prompts",
    )
    cv: float | None = _bench_option(
        None, "--cv", REQUESTS, "Gaps' deviation over their mean; above 1 is bursty", min=0.0
    )
    rate: float | None = _bench_option(
        None, "--rate", RUNS, "Requests per second (1); with --search, where it begins"
    )
    rates: str = _bench_option("", "--rates", RUNS, "Several rates, for a curve", metavar="A,B,…")
    search: bool = _bench_option(False, "--search", RUNS, "Find the largest rate that meets the SLOs")
    max_rate: float | None = _bench_option(None, "--max-rate", RUNS, "Search no higher")
    width: float | None = _bench_option(
        None, "--width", RUNS, "Find it to so many requests per second (5 % of it)"
    )
    duration_s: float | None = _bench_option(
        None,
        "--duration",
        RUNS,
        f"Seconds of arrivals in a run ({DEFAULT_RUN_S:g}; a replay: the whole trace)",
        min=0.1,
    )
    num_requests: int | None = _bench_option(
        None, "--num-requests", RUNS, "Requests of a run, instead of --duration", min=1
    )
    warmup_s: float | None = _bench_option(
        None, "--warmup", RUNS, "Seconds at the begin of a run that do not count (a tenth of it)", min=0.0
    )
    seeds: int = _bench_option(1, "--seeds", RUNS, "Repeat with other arrivals and lengths", min=1)
    max_concurrency: int | None = _bench_option(
        None,
        "--max-concurrency",
        RUNS,
        "Most requests open at a time; those that wait for it are late",
        min=1,
    )
    timeout_s: float = _bench_option(
        600.0, "--timeout", RUNS, "Seconds after which a request has failed", min=0.1
    )
    slo_ttft_ms: float | None = _bench_option(
        None, "--slo-ttft-ms", SLOS, "SLO of the time to first token", min=0.0
    )
    slo_tpot_ms: float | None = _bench_option(
        None, "--slo-tpot-ms", SLOS, "SLO of the time per output token", min=0.0
    )
    attainment: float = _bench_option(0.9, "--attainment", SLOS, "Share of requests that must meet both")
    json: bool = _bench_option(False, "--json", OUTPUT, "Print one JSON object")
    save: Path | None = _bench_option(
        None, "--save", OUTPUT, "Write every request's times, one JSON object a line"
    )
    plot: Path | None = _bench_option(
        None, "--plot", OUTPUT, "Draw attainment against rate: PNG, and JSON beside it"
    )

    def __post_init__(self) -> None:
        for what, why, fix in (*self._invalid_values(), *self._check_contradictions()):
            raise ConfigError(what, why, fix)

    def _invalid_values(self) -> Iterator[tuple[str, str, str]]:
        """The options whose value is wrong by itself: what is wrong, why, and the fix, as `ConfigError` takes them."""
        if self.endpoint not in ENDPOINTS:
            yield (
                f"there is no endpoint {self.endpoint!r}",
                "known: " + ", ".join(ENDPOINTS),
                "--endpoint auto",
            )
        if self.arrivals not in (POISSON, GAMMA, REPLAY):
            yield (
                f"there are no {self.arrivals!r} arrivals",
                "known: poisson, gamma, replay",
                "--arrivals poisson",
            )
        numbers = {
            "--duration": self.duration_s, "--warmup": self.warmup_s, "--timeout": self.timeout_s,
            "--shrink": self.shrink, "--cv": self.cv,
        }  # fmt: skip
        for name, number in numbers.items():
            least = 0.0 if name in ("--warmup", "--cv") else 1e-9
            if number is not None and not least <= number < math.inf:
                bound = "above 0" if least else "of at least 0"
                yield f"{name} is a number {bound}", f"given: {number:g}", "such as " + EXAMPLES[name]
        given = (*self.rate_list, self.rate, self.max_rate, self.width)
        if any(one is not None and not 0 < one < math.inf for one in given):
            shown = ", ".join(f"{one:g}" for one in given if one is not None)
            yield "a rate is a number above 0", f"given: {shown}", "--rate 2"
        saved = [("--save", self.save)] if self.save is not None else []
        plot = self.plot
        folder = plot is not None and (not plot.name or plot.is_dir())
        if folder:
            yield "--plot cannot be written", f"{plot} is a folder", "name another file"
        plotted = (
            [("--plot", plot.with_suffix(end)) for end in (".png", ".json")] if plot and not folder else []
        )
        for name, path in (*saved, *plotted):
            if why := unwritable_reason(path):
                yield f"{name} cannot be written", why, "name another file"
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            yield (
                "--api-key is no bearer key",
                "it has characters that a header cannot carry",
                "--api-key KEY",
            )

    def _check_contradictions(self) -> Iterator[tuple[str, str, str]]:
        """Values that would have no effect, or contradict others."""
        if self.rates and (self.search or self.rate is not None):
            fix = "--rates 1,2,4, or --rate 2, or --search [--rate START]"
            yield "rates are given in two ways", "--rates is a list of its own", fix
        # The SLO is read, and so checked, with and without a search.
        if not self.slo.has_limits and self.search:
            fix = "--slo-ttft-ms 500 --slo-tpot-ms 50, or one of them"
            yield "there is nothing to search for", "without an SLO every rate is good", fix
        if not self.search and (self.max_rate is not None or self.width is not None):
            yield "nothing is searched", "--max-rate and --width are of a search", "--search"
        if (self.cv is not None) != (self.arrivals == GAMMA):
            why = "the coefficient of variation is that of gamma arrivals"
            yield "--cv and --arrivals gamma go together", why, "--arrivals gamma --cv 2"
        if self.arrivals == REPLAY and self.fit:
            yield "--fit has no effect", "a replay sends the trace's own requests", "leave out one of them"
        if self.duration_s is not None and self.num_requests is not None:
            why = "--num-requests says how long a run is, too"
            yield "--duration has no effect", why, "leave out one of them"
        if self.arrivals == REPLAY and self.seeds > 1:
            why = "every run sends the same requests at the same times"
            yield "a replay has no seeds", why, "--seeds 1, or --arrivals poisson"

    @property
    def rate_list(self) -> tuple[float, ...]:
        """`rates` as numbers. Raises ConfigError."""
        try:
            return tuple(float(part) for part in self.rates.split(",")) if self.rates else ()
        except ValueError:
            raise ConfigError(
                "--rates is a list of numbers", f"given: {self.rates}", "--rates 1,2,4"
            ) from None

    @property
    def seconds(self) -> float | None:
        """Seconds of arrivals in a run; None where --num-requests, or the end of the trace, ends it."""
        if self.num_requests is not None or self.arrivals == REPLAY:
            return self.duration_s
        return DEFAULT_RUN_S if self.duration_s is None else self.duration_s

    @property
    def slo(self) -> Slo:
        """The SLO of all requests; a limit that is not given is infinite. Raises ConfigError."""
        return read_slo(self.slo_ttft_ms, self.slo_tpot_ms, self.attainment)

    def report_fields(self) -> dict[str, Any]:
        """How requests were made, for the report: not where to, and nothing secret."""
        kept = [
            name for name, one in self.__dataclass_fields__.items() if _option_panel(one) in (REQUESTS, RUNS)
        ]
        every = asdict(self) | {"duration_s": self.seconds}
        return {name: every[name] for name in kept}


def _option_panel(one: Any) -> str:
    return str(one.metadata["rich_help_panel"])
