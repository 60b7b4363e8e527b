"""Every metric of the gateway, defined once, in a registry of its own.

Names and meanings are vLLM's (`vllm:`) where the meaning is the same, so that existing dashboards and autoscalers work
unchanged; buckets are finer below 10 ms, and each objective (SLO) is an exact bucket bound. The rest is `diptych:`.
Labels are bounded: models served, workers present, and words from closed lists. Nothing here holds a prompt, a key or
a request id.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from diptych.books import Books, FleetBooks, LinkSpeed

# fmt: off
TTFT_MS = (1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 250, 300, 400, 500, 750, 1e3, 2.5e3, 5e3, 7.5e3, 1e4, 2e4, 4e4,
           8e4, 1.6e5, 6.4e5)
ITL_MS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 25, 30, 40, 50, 60, 75, 100, 150, 200, 300, 400, 500, 750, 1e3, 2.5e3, 5e3,
          7.5e3, 1e4, 2e4, 4e4, 8e4)
REQUEST_MS = (5, 10, 20, 50, 100, 200, 300, 500, 800, 1e3, 1.5e3, 2e3, 2.5e3, 5e3, 1e4, 1.5e4, 2e4, 3e4, 4e4, 5e4, 6e4,
              1.2e5, 2.4e5, 4.8e5, 9.6e5, 1.92e6, 7.68e6)
STAGE_MS = (.05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 6e4, 6e5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
# fmt: on
COUNTS = (1, 2, 3, 5, 8, 10, 20, 50, 100, 128)

TTFT_STAGES = ("admission", "retry", "prefill_queue", "prefill", "deliver", "write")
TRANSFER_PARTS = ("hidden", "exposed")
HANDOFF_STAGES = ("decode_admission", "transfer", "first_decode")
SLO_WINDOW = 1000  # requests over which attainment is told


@dataclass(frozen=True, slots=True)
class Objectives:
    """What the operator promises; None is no promise."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(slots=True)
class Lived:
    """One answered sequence, as the client saw it. Moments are in seconds on one clock."""

    model: str
    prompt_tokens: int
    cached_tokens: int = 0
    tokens: int = 0
    arrived_s: float = 0.0
    token_s: float | None = None  # the first token reached the gateway
    last_s: float | None = None  # the last one did
    first_s: float | None = None  # the first was written to the client
    ended_s: float = 0.0
    finish: str = "stop"
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        return self.decode_s / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def decode_s(self) -> float:
        return self.last_s - self.token_s if self.last_s is not None and self.token_s is not None else 0.0


class Listener(Protocol):
    """Whoever wants to hear of each sequence, besides the metrics."""

    def arrived(self, prompt_tokens: int) -> None: ...

    def ended(self, lived: Lived, good: bool) -> None: ...

    def failed(self, lived: Lived) -> None: ...

    def refused(self) -> None: ...


def seconds_of(milliseconds: Iterable[float], *bounds_s: float | None) -> list[float]:
    """Bucket bounds in seconds, with each of `bounds_s` as an exact one."""
    merged = [bound / 1000 for bound in milliseconds]
    for bound in bounds_s:
        if bound is not None and bound not in merged:
            insort(merged, bound)
    return merged


class Metrics:
    """All metrics; `text()` is what `/metrics` answers."""

    def __init__(self, objectives: Objectives | None = None) -> None:
        self.objectives = objectives or Objectives()
        self.listener: Listener | None = None
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests()
        self._stages()
        self._service()
        self._survival()
        self._replanning()
        self._attained: dict[str, deque[bool]] = {
            name: deque(maxlen=SLO_WINDOW) for name in ("ttft", "tpot", "all")
        }

    def watch(
        self, books: Callable[[], Iterable[Books]], links: Callable[[], Iterable[LinkSpeed]], model: str
    ) -> None:
        """Read workers' books and links whenever metrics are asked for."""
        self.registry.register(FleetBooks(books, links, model))

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(
        self, name: str, told: str, buckets: Iterable[float], label: str = "model_name"
    ) -> Histogram:
        return Histogram(name, told, [label], registry=self.registry, buckets=list(buckets))

    def _plain_histogram(self, name: str, told: str, buckets_ms: Iterable[float]) -> Histogram:
        return Histogram(name, told, registry=self.registry, buckets=seconds_of(buckets_ms))

    def _gauge(self, name: str, told: str) -> Gauge:
        return Gauge(name, told, registry=self.registry)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(name, told, labels, registry=self.registry)

    def _requests(self) -> None:
        """What vLLM has too."""
        slo = self.objectives
        ttft, tpot = seconds_of(TTFT_MS, slo.ttft_s), seconds_of(ITL_MS, slo.tpot_s)
        request = seconds_of(REQUEST_MS)
        seconds = self._histogram
        self.ttft = seconds(
            "vllm:time_to_first_token_seconds", "From arrival until the first token was written", ttft
        )
        self.itl = seconds("vllm:inter_token_latency_seconds", "Between consecutive tokens, per token", tpot)
        self.tpot = seconds(
            "vllm:request_time_per_output_token_seconds", "Mean after the first, per request", tpot
        )
        self.e2e = seconds(
            "vllm:e2e_request_latency_seconds", "From arrival until the end was written", request
        )
        self.queue = seconds("vllm:request_queue_time_seconds", "Waiting for a prefill worker", request)
        self.prefill = seconds("vllm:request_prefill_time_seconds", "Reading the prompt", request)
        self.decode = seconds("vllm:request_decode_time_seconds", "From the first to the last token", request)
        self.inference = seconds("vllm:request_inference_time_seconds", "Prefill and decode", request)
        self.request_prompt = seconds("vllm:request_prompt_tokens", "Prompt tokens per sequence", TOKENS)
        self.request_generation = seconds("vllm:request_generation_tokens", "New tokens per sequence", TOKENS)
        self.params_n = seconds("vllm:request_params_n", "The parameter n", COUNTS)
        self.params_max = seconds(
            "vllm:request_params_max_tokens", "The most tokens a sequence may have", TOKENS
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens read", "model_name")
        self.cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in a cache", "model_name"
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated", "model_name")
        self.success = self._counter(
            "vllm:request_success", "Answered sequences", "model_name", "finished_reason"
        )
        self.rejections = self._counter("vllm:admission_rejections", "Refused for load", "reason")

    def _stages(self) -> None:
        """Where the time goes; the stages of one sequence sum to the whole."""
        self.ttft_stage = self._histogram(
            "diptych:ttft_stage_seconds",
            "Stages of the time to first token; they sum to it",
            seconds_of(STAGE_MS),
            "stage",
        )
        self.handoff_stage = self._histogram(
            "diptych:handoff_stage_seconds",
            "Stages between the first token and the second",
            seconds_of(STAGE_MS),
            "stage",
        )
        self.transfer_seconds = self._histogram(
            "diptych:transfer_seconds", "Moving one request's KV", seconds_of(STAGE_MS), "transport"
        )
        self.transfer_bytes = self._counter("diptych:transfer_bytes", "KV moved", "transport")
        self.transfer_parts = self._counter(
            "diptych:transfer_part_seconds", "Moving KV, before and after it was complete", "part"
        )
        self.queue_wait = self._plain_histogram(
            "diptych:queue_wait_seconds", "Waiting in the gateway, for room or for workers", STAGE_MS
        )
        for part in TRANSFER_PARTS:
            self.transfer_parts.labels(part)
        for stage in TTFT_STAGES:
            self.ttft_stage.labels(stage)
        for stage in HANDOFF_STAGES:
            self.handoff_stage.labels(stage)

    def _service(self) -> None:
        self.http = self._counter("diptych:http_requests", "HTTP requests answered", "route", "status")
        self.failures = self._counter("diptych:request_failures", "Sequences that failed", "code")
        self.retries = self._counter("diptych:request_retries", "Attempts given up for another", "code")
        self.cancelled = self._counter("diptych:requests_cancelled", "Sequences whose client left")
        self.cut = self._counter("diptych:slow_readers_cut", "Streams cut because nobody read them")
        self.lost = self._counter("diptych:workers_lost", "Lives of workers that ended")
        self.open = self._gauge("diptych:open_requests", "HTTP requests being generated")
        self.ready = self._gauge("diptych:ready", "1 when a canary went through every stage")
        self.attainment = Gauge(
            "diptych:slo_attainment",
            f"Share of the last {SLO_WINDOW} within the objective",
            ["objective"],
            registry=self.registry,
        )
        self.objective = Gauge(
            "diptych:slo_objective_seconds", "The objectives given", ["objective"], registry=self.registry
        )
        self.judged = self._counter("diptych:slo_requests", "Sequences judged", "objective", "met")
        self.good_requests = self._counter("diptych:goodput_requests", "Sequences within all objectives")
        self.good_tokens = self._counter(
            "diptych:goodput_tokens", "Tokens of sequences within all objectives"
        )
        for name, bound in (("ttft", self.objectives.ttft_s), ("tpot", self.objectives.tpot_s)):
            if bound is not None:
                self.objective.labels(name).set(bound)

    def _survival(self) -> None:
        """The gateway's queue, and what became of requests whose workers failed."""
        self.queued = self._gauge("diptych:queued_requests", "Sequences waiting in the gateway")
        self.unread_tokens = self._gauge("diptych:unread_prompt_tokens", "Prompt tokens not read yet")
        self.foreseen = self._gauge("diptych:predicted_wait_seconds", "For a first token, of who comes now")
        self.migrated = self._counter(
            "diptych:migrated_streams", "Continued after tokens had gone out", "code"
        )
        self.local = self._counter("diptych:local_prefills", "Prompts read by decode workers", "reason")
        self.quarantined = self._counter("diptych:quarantined_requests", "Taken for causes of crashes")
        self.suspects = self._gauge("diptych:suspected_requests", "Open at a crash, and not cleared yet")
        self.late = self._counter("diptych:gateway_late_messages", "Of attempts that had ended", "kind")
        self.links_given_up = self._counter("diptych:links_given_up", "For KV that came out corrupt")
        self.log_lines = self._counter("diptych:request_log_lines", "Lines of the request log", "outcome")

    def _replanning(self) -> None:
        """What the replanner of `diptych serve --replan` tells of itself."""
        self.replan_decisions = self._counter("diptych:replan_decisions", "Looks at the plan", "trigger")
        self.replan_alarms = self._counter("diptych:replan_alarms", "Changes of traffic noticed", "what")
        self.replan_actions = self._counter(
            "diptych:replan_actions", "Changes of the fleet", "action", "outcome"
        )
        self.replan_target = Gauge(
            "diptych:replan_target_workers", "As last decided", ["role"], registry=self.registry
        )
        self.replan_expected = self._gauge("diptych:replan_expected_attainment", "Of the fleet last decided")
        self.replan_unheard = self._counter("diptych:replan_unheard_events", "Of traffic, not heard in time")

    def came(self, lived: Lived) -> None:
        """A sequence is handed to the backend."""
        if self.listener is not None:
            self.listener.arrived(lived.prompt_tokens)

    def refused(self, code: str) -> None:
        """A request was turned away before it was read."""
        self.rejections.labels(code).inc()
        if self.listener is not None:
            self.listener.refused()

    def gap(self, model: str, seconds: float, num_tokens: int) -> None:
        """A step brought `num_tokens` tokens of one sequence, `seconds` after the one before: one gap per token."""
        histogram = self.itl.labels(model)
        for _ in range(num_tokens):
            histogram.observe(max(0.0, seconds) / num_tokens)

    def first(self, lived: Lived) -> None:
        """The first token was written to the client: its waterfall, which sums to the time to first token."""
        if lived.ttft_s is None:
            return
        self.ttft.labels(lived.model).observe(lived.ttft_s)
        for stage, seconds in waterfall(lived).items():
            self.ttft_stage.labels(stage).observe(seconds)

    def ended(self, lived: Lived) -> None:
        """A sequence was answered whole."""
        model = lived.model
        self.success.labels(model, lived.finish).inc()
        self.prompt_tokens.labels(model).inc(lived.prompt_tokens)
        self.cached_tokens.labels(model).inc(lived.cached_tokens)
        self.generation_tokens.labels(model).inc(lived.tokens)
        self.request_prompt.labels(model).observe(lived.prompt_tokens)
        self.request_generation.labels(model).observe(lived.tokens)
        self.e2e.labels(model).observe(lived.ended_s - lived.arrived_s)
        prefill_s = lived.stages.get("prefill", 0.0)
        self.queue.labels(model).observe(lived.stages.get("prefill_queue", 0.0))
        self.prefill.labels(model).observe(prefill_s)
        self.decode.labels(model).observe(lived.decode_s)
        self.inference.labels(model).observe(prefill_s + lived.decode_s)
        if lived.tpot_s is not None:
            self.tpot.labels(model).observe(lived.tpot_s)
        self._judge(lived)

    def missed(self, lived: Lived | None = None) -> None:
        """A sequence failed: it met no objective."""
        self._verdicts({"ttft": False, "tpot": False})
        if self.listener is not None and lived is not None:
            self.listener.failed(lived)

    def _judge(self, lived: Lived) -> None:
        met: dict[str, bool] = {}
        for name, bound, value in (
            ("ttft", self.objectives.ttft_s, lived.ttft_s),
            ("tpot", self.objectives.tpot_s, lived.tpot_s),
        ):
            if bound is not None:
                met[name] = value is None or value <= bound
        self._verdicts(met)
        if all(met.values()):
            self.good_requests.inc()
            self.good_tokens.inc(lived.tokens)
        if self.listener is not None:
            self.listener.ended(lived, all(met.values()))

    def _verdicts(self, met: dict[str, bool]) -> None:
        bounds = {"ttft": self.objectives.ttft_s, "tpot": self.objectives.tpot_s}
        asked = {name: verdict for name, verdict in met.items() if bounds[name] is not None}
        if not asked:
            return
        for name, verdict in {**asked, "all": all(asked.values())}.items():
            window = self._attained[name]
            window.append(verdict)
            self.judged.labels(name, str(verdict).lower()).inc()
            self.attainment.labels(name).set(sum(window) / len(window))


def waterfall(lived: Lived) -> dict[str, float]:
    """The stages of the time to first token in seconds; their sum is that time.

    The relay's stages end when the token reached the gateway; what is left is "write": until the client took it.
    """
    stages = {stage: lived.stages.get(stage, 0.0) for stage in TTFT_STAGES[:-1]}
    return {**stages, "write": (lived.ttft_s or 0.0) - sum(stages.values())}
