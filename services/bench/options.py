"""The options of `diptych bench`, declared once: the command line is made from these fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diptych.config.fields import URL_ENV, option_field
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """How `diptych bench` was called. Raises ConfigError for what cannot be, or would have no effect."""

    url: str = option_field("http://127.0.0.1:8000", "Any server with OpenAI's API", SERVER, envvar=URL_ENV)
    api_key: str | None = option_field(None, "Bearer key", SERVER, envvar="DIPTYCH_API_KEY")
    model: str | None = option_field(None, "Served model; default: the first one", SERVER)
    endpoint: str = option_field("auto", "completions, chat, or auto: what the server has", SERVER)
    workload: str = option_field(
        "sharegpt",
        "sharegpt, humaneval, longbench, or a trace: Azure's CSV, Mooncake's or other JSON lines, a request log",
        REQUESTS,
        metavar="NAME|FILE",
    )
    shrink: float = option_field(1.0, "Divide all lengths by this, for a small model", REQUESTS, min=1e-3)
    context: int | None = option_field(
        None, "Most tokens of prompt and answer; default: what the server takes", REQUESTS, min=2
    )
    arrivals: str = option_field(
        POISSON, "poisson; gamma, with --cv; replay: a trace's times, or its shape at --rate", REQUESTS
    )
    fit: bool = option_field(
        False,
        "Draw from lognormals fitted to the trace, for a trace too short to have long prompts",
        REQUESTS,
    )
    cv: float | None = option_field(
        None, "Coefficient of variation of the gaps between arrivals; above 1 is bursty", REQUESTS, min=0.0
    )
    rate: float | None = option_field(
        None, "Requests per second (1); with --search, the rate to begin with", RUNS
    )
    rates: str = option_field("", "Several rates, for a curve", RUNS, metavar="A,B,…")
    search: bool = option_field(False, "Find the largest rate that meets the SLOs", RUNS)
    max_rate: float | None = option_field(None, "Search no higher than this rate", RUNS)
    width: float | None = option_field(
        None, "Search to this many requests per second (5 % of the rate)", RUNS
    )
    duration_s: float | None = option_field(
        None,
        f"Seconds of arrivals in a run ({DEFAULT_RUN_S:g}; a replay: the whole trace)",
        RUNS,
        flag="--duration",
        min=0.1,
    )
    num_requests: int | None = option_field(None, "Requests of a run, instead of --duration", RUNS, min=1)
    warmup_s: float | None = option_field(
        None,
        "Seconds at the beginning of a run that do not count (a tenth of it)",
        RUNS,
        flag="--warmup",
        min=0.0,
    )
    seeds: int = option_field(1, "Number of runs, with other arrivals and lengths", RUNS, min=1)
    max_concurrency: int | None = option_field(
        None, "Most open requests; those that wait for this are late", RUNS, min=1
    )
    timeout_s: float = option_field(
        600.0, "Seconds after which a request has failed", RUNS, flag="--timeout", min=0.1
    )
    slo_ttft_ms: float | None = option_field(None, "SLO of the time to first token", SLOS, min=0.0)
    slo_tpot_ms: float | None = option_field(None, "SLO of the time per output token", SLOS, min=0.0)
    attainment: float = option_field(0.9, "Share of requests that must meet both SLOs", SLOS)
    json: bool = option_field(False, "Print one JSON object", OUTPUT)
    save: Path | None = option_field(None, "Write every request's times here, one JSON object a line", OUTPUT)
    plot: Path | None = option_field(None, "Draw attainment against rate: PNG, and JSON beside it", OUTPUT)

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
