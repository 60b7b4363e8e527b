"""Defines every metric of the gateway once, in a Prometheus registry of its own.

A metric that means the same as one of vLLM's has vLLM's name (`vllm:`), so existing dashboards and autoscalers work
unchanged. Its buckets are finer below 10 ms, and each SLO is an exact bucket bound. All other names begin with
`diptych:`. Label values are bounded: served models, present workers, and words from closed lists. No metric holds a
prompt, a key or a request id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from prometheus_client import (
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from diptych.failure_statuses import RATE_REASONS, RULES, TOO_MANY_REQUESTS
from diptych.slo import Slo
from services.gateway.metrics.buckets import (
    COUNT_BUCKETS,
    ITL_BUCKETS_MS,
    LAG_BUCKETS_MS,
    REQUEST_BUCKETS_MS,
    STAGE_BUCKETS_MS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS_MS,
    bucket_bounds_s,
)
from services.gateway.metrics.bulk import BulkCounters
from services.gateway.metrics.deployment import PooledHistogram, ReplanCounters
from services.gateway.metrics.kv_counters import KvCounters
from services.gateway.metrics.metric_registry import MetricRegistry
from services.gateway.metrics.recent_history import RecentHistory
from services.gateway.metrics.vllm_transfers import NixlHistograms
from services.gateway.metrics.workers import LinkSpeed, WorkerCollector, WorkerSnapshot
from services.gateway.outcomes import (
    BOTH,
    CheckedSequence,
    EndedSequence,
    Ending,
    Outcome,
    OutcomeSink,
    SequenceRecord,
    known_outcomes,
)

TTFT_STAGES = ("admission", "retry", "restore", "prefill_queue", "prefill", "deliver", "write")
TRANSFER_PARTS = ("hidden", "exposed")
HANDOFF_STAGES = ("decode_admission", "transfer", "first_decode")
# Attainment is measured over this many of the latest requests.
SLO_WINDOW = 1000


class SloCounters:
    """SLOs, attainment and goodput. Without SLOs only goodput is counted."""

    def __init__(self, registry: MetricRegistry, slo: Slo) -> None:
        counter, limits_s = registry.counter, slo.limits_s()
        self._has_slo = any(limit_s is not None for limit_s in limits_s.values())
        self._attained: dict[str, deque[bool]] = {
            name: deque(maxlen=SLO_WINDOW) for name in ("ttft", "tpot", BOTH)
        }
        self.attainment = Gauge(
            "diptych:slo_attainment",
            f"Share of the last {SLO_WINDOW} within the SLO",
            ["objective"],
            registry=registry,
        )
        self.objective = Gauge("diptych:slo_objective_seconds", "The SLO", ["objective"], registry=registry)
        self.target = Gauge(
            "diptych:slo_target_ratio",
            "Share that shall meet the SLO (--slo-target)",
            ["objective"],
            registry=registry,
        )
        self.checked = counter(
            "diptych:slo_requests", "Sequences that met (true) or missed (false) it", "objective", "met"
        )
        self.outcomes = counter(
            "diptych:slo_outcomes",
            (
                "Ended sequences; with open ones they sum to diptych:offered_requests_total. Reason: "
                "answered, answered_late, left_early, left_late, short_deadline (the client's), "
                "slow_reader, an error code"
            ),
            "outcome",
            "reason",
        )
        self.good_requests = counter(
            "diptych:goodput_requests", "Sequences that met all SLOs; without SLOs all answered"
        )
        self.good_tokens = counter("diptych:goodput_tokens", "New tokens of sequences that met all SLOs")
        for name, bound in limits_s.items():
            if bound is not None:
                self.objective.labels(name).set(bound)
                for objective in (name, BOTH):
                    self.target.labels(objective).set(slo.attainment)
                    # From 0 on: what a series begins with is no increase to Prometheus.
                    self.checked.labels(objective, "true")
                    self.checked.labels(objective, "false")
        if self._has_slo:
            for outcome, why in sorted(known_outcomes()):
                self.outcomes.labels(outcome.value, why)

    def count_goodput(self, num_tokens: int) -> None:
        """Count a sequence of `num_tokens` new tokens that met all SLOs."""
        self.good_requests.inc()
        self.good_tokens.inc(num_tokens)

    def count_outcome(self, checked: CheckedSequence) -> None:
        """Count one sequence that ended: what it counts as, and by SLO whether it was met."""
        if not self._has_slo:
            return
        self.outcomes.labels(checked.outcome.value, checked.reason).inc()
        for name, is_met in checked.slos.items():
            window = self._attained[name]
            window.append(is_met)
            self.checked.labels(name, str(is_met).lower()).inc()
            self.attainment.labels(name).set(sum(window) / len(window))


class GatewayMetrics(OutcomeSink):
    """All metrics of the gateway. `render_text` returns the body of `/metrics`."""

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo or Slo()
        self.history = RecentHistory()
        self._limits_s = self.slo.limits_s()
        self.registry = MetricRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._define_requests()
        self._define_tokens()
        self._define_stages()
        self._define_service()
        self.slos = SloCounters(self.registry, self.slo)
        self._define_failures()
        self.replan = ReplanCounters(self.registry)

    def watch_workers(
        self,
        snapshots: Callable[[], Iterable[WorkerSnapshot]],
        links: Callable[[], Iterable[LinkSpeed]],
        model: str,
        prefix_caching: bool = True,
    ) -> None:
        """Add metrics of workers and links, which are collected whenever `/metrics` is requested."""
        self.registry.register(WorkerCollector(snapshots, links, model, prefix_caching))

    def render_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _define_requests(self) -> None:
        """Metrics that vLLM has too."""
        ttft = bucket_bounds_s(TTFT_BUCKETS_MS, self._limits_s["ttft"])
        tpot = bucket_bounds_s(ITL_BUCKETS_MS, self._limits_s["tpot"])
        request = bucket_bounds_s(REQUEST_BUCKETS_MS)
        seconds = self.registry.histogram
        self.ttft = seconds(
            "vllm:time_to_first_token_seconds", "From arrival until the first token was written", ttft
        )
        self.itl = seconds(
            "vllm:inter_token_latency_seconds", "Between consecutive tokens, at the gateway", tpot
        )
        # What `itl` has for each served name.
        self._gaps: dict[str, Histogram] = {}
        self.tpot = seconds(
            "vllm:request_time_per_output_token_seconds", "A sequence's mean after the first token", tpot
        )
        self.e2e = seconds(
            "vllm:e2e_request_latency_seconds", "From arrival until the end was written", request
        )
        self.queue = seconds("vllm:request_queue_time_seconds", "Waiting at a worker before prefill", request)
        self.prefill = seconds(
            "vllm:request_prefill_time_seconds", "Prefill, until the first token was sampled", request
        )
        self.decode = seconds("vllm:request_decode_time_seconds", "From the first to the last token", request)
        self.inference = seconds("vllm:request_inference_time_seconds", "Prefill and decode", request)

    def _define_tokens(self) -> None:
        """Tokens of requests and sequences, and what became of these."""
        counter, tokens = self.registry.counter, self.registry.histogram
        self.request_prompt = tokens(
            "vllm:request_prompt_tokens", "Prompt tokens of a sequence", TOKEN_BUCKETS
        )
        self.request_generation = tokens(
            "vllm:request_generation_tokens", "New tokens of a sequence", TOKEN_BUCKETS
        )
        self.max_generation = tokens(
            "vllm:request_max_num_generation_tokens",
            "New tokens of a request's longest sequence",
            TOKEN_BUCKETS,
        )
        self.params_n = tokens("vllm:request_params_n", "The parameter n, per request", COUNT_BUCKETS)
        self.params_max = tokens(
            "vllm:request_params_max_tokens", "The most tokens a sequence may have", TOKEN_BUCKETS
        )
        self.prompt_tokens = counter(
            "vllm:prompt_tokens",
            "Prompt tokens of answered sequences, cached ones included",
            "model_name",
        )
        self.cached_tokens = counter(
            "vllm:prompt_tokens_cached",
            "Prompt tokens of answered sequences found in the prefix cache",
            "model_name",
        )
        self.generation_tokens = counter(
            "vllm:generation_tokens", "New tokens of answered sequences", "model_name"
        )
        self.success = counter(
            "vllm:request_success", "Answered sequences: stop or length", "model_name", "finished_reason"
        )
        self.kv = KvCounters(self.registry.counter)
        self.bulk = BulkCounters(self.registry)
        self.rejections = counter(
            "vllm:admission_rejections", "What failed with 429 or 503, by code", "reason"
        )
        self.pooled = PooledHistogram(self.registry)

    def _define_stages(self) -> None:
        """How long the stages of a sequence take. The stages up to the first token add up to TTFT."""
        counter, histogram, plain_histogram = (
            self.registry.counter,
            self.registry.histogram,
            self.registry.plain_histogram,
        )
        self.ttft_stage = histogram(
            "diptych:ttft_stage_seconds",
            "Stages of TTFT; they sum to it",
            bucket_bounds_s(STAGE_BUCKETS_MS),
            "stage",
        )
        self.handoff_stage = histogram(
            "diptych:handoff_stage_seconds",
            "Stages from the first to the second token; not colocated",
            bucket_bounds_s(STAGE_BUCKETS_MS),
            "stage",
        )
        self.transfer_seconds = histogram(
            "diptych:transfer_seconds",
            "Moving and verifying a request's KV, canaries included",
            bucket_bounds_s(STAGE_BUCKETS_MS),
            "transport",
        )
        self.nixl = NixlHistograms(self.registry)
        self.transfer_bytes = counter("diptych:transfer_bytes", "Bytes of (coded) KV moved", "transport")
        self.transfer_parts = counter(
            "diptych:transfer_part_seconds",
            "Seconds of moving KV: hidden by prefill, exposed after the ticket",
            "part",
        )
        self.queue_wait = plain_histogram(
            "diptych:queue_wait_seconds", "Waiting in the gateway, for room or for workers", STAGE_BUCKETS_MS
        )
        self.loop_lag = plain_histogram(
            "diptych:event_loop_lag_seconds",
            "How late the gateway's event loop was, 50 times a second",
            LAG_BUCKETS_MS,
        )
        self.loop_work = plain_histogram(
            "diptych:event_loop_work_seconds",
            "CPU time of the event loop itself within that lag; above 0.1 s a task is too slow",
            LAG_BUCKETS_MS,
        )
        for part in TRANSFER_PARTS:
            self.transfer_parts.labels(part)
        for stage in TTFT_STAGES:
            self.ttft_stage.labels(stage)
        for stage in HANDOFF_STAGES:
            self.handoff_stage.labels(stage)

    def _define_service(self) -> None:
        """HTTP requests, failures, open requests and readiness."""
        counter, gauge = self.registry.counter, self.registry.gauge
        self.http = counter(
            "diptych:http_requests", "HTTP answers begun; unknown paths are other", "route", "status"
        )
        self.failures = counter("diptych:request_failures", "Sequences that ended in an error", "code")
        self.retries = counter(
            "diptych:request_retries", "Attempts given up for another one, by cause", "code"
        )
        self.cancelled = counter("diptych:requests_cancelled", "Sequences whose client left")
        self.cut = counter("diptych:slow_readers_cut", "Answers ended because the client read too slowly")
        self.lost = counter("diptych:workers_lost", "Workers that went down, for whatever reason")
        self.open = gauge("diptych:open_requests", "HTTP requests being generated")
        self.fronts_lost = counter("diptych:fronts_lost", "Processes of --gateways that were lost")
        self.ready = gauge("diptych:ready", "1 if a canary or request recently went through both pools")
        self.offered = counter(
            "diptych:offered_requests", "Sequences asked for with valid keys; an early refusal counts as one"
        )
        self.refused = counter(
            "diptych:refused_requests", "Sequences asked for and refused because of load (429, 503)", "code"
        )
        for reason, rule in RULES.items():
            if rule.status == TOO_MANY_REQUESTS and reason not in RATE_REASONS:
                self.refused.labels(rule.code or reason.value)

    def _define_failures(self) -> None:
        """The gateway's queue, and the outcome of requests whose workers failed."""
        counter, gauge = self.registry.counter, self.registry.gauge
        self.queued = gauge("diptych:queued_requests", "Sequences that wait in the gateway")
        self.unprefilled_tokens = gauge(
            "diptych:unread_prompt_tokens", "Prompt tokens of admitted requests that are not prefilled yet"
        )
        self.foreseen = gauge(
            "diptych:predicted_wait_seconds",
            "Predicted TTFT of a request that arrives now; above --max-queue-wait-s it gets 429",
        )
        self.migrated = counter(
            "diptych:migrated_streams", "Attempts given up after tokens were sent", "code"
        )
        self.local = counter(
            "diptych:local_prefills",
            "Prompts prefilled by decode workers: no_prefill_worker, no_link, sooner",
            "reason",
        )
        self.overdrafts = counter(
            "diptych:decode_overdrafts",
            "Prompts computed before their decode room was free: in_time or late, when they were done",
            "outcome",
        )
        self.overdrawn = gauge(
            "diptych:overdrawn_requests", "Requests that began before their decode room was free, without it"
        )
        self.quarantined = counter(
            "diptych:quarantined_requests", "Sequences refused because they crashed workers"
        )
        self.suspects = gauge(
            "diptych:suspected_requests", "Requests that were open at a crash and are not cleared yet"
        )
        self.late = counter("diptych:gateway_late_messages", "Messages about ended attempts, dropped", "kind")
        self.links_given_up = counter("diptych:links_given_up", "Links given up because KV arrived corrupt")
        self.log_lines = counter(
            "diptych:request_log_lines", "Lines of --request-log: written, dropped, failed", "outcome"
        )
        self.traces = counter(
            "diptych:traces", "Traced requests: sent, dropped (too many waiting), failed", "outcome"
        )

    def on_arrived(self, record: SequenceRecord, now_s: float) -> None:
        """A sequence was handed to the backend."""
        self.offered.inc()

    def on_ended(self, ended: EndedSequence) -> None:
        """Count how a sequence ended, and what it counts as. A refused request was offered too."""
        record, failure, checked = ended.record, ended.failure, ended.checked
        if record is None:
            self.offered.inc()
        if failure is not None:
            if record is not None:
                self.failures.labels(failure.code).inc()
            if failure.is_overload:
                self.rejections.labels(failure.code).inc()
            if ended.is_refused:
                self.refused.labels(failure.code).inc()
        if record is not None and ended.ending is Ending.ANSWERED:
            self._observe_answer(record)
        if record is not None and checked.outcome is Outcome.MET:
            self.slos.count_goodput(record.tokens)
        self.slos.count_outcome(checked)

    def observe_gap(self, model: str, seconds: float, num_tokens: int) -> None:
        """Record `num_tokens` new tokens of a sequence, `seconds` after the step before: one gap per token."""
        histogram = self._gaps.get(model)
        if histogram is None:
            # There are as many as served names. Looking for labels takes longer than observing.
            histogram = self._gaps[model] = self.itl.labels(model)
        for _ in range(num_tokens):
            histogram.observe(max(0.0, seconds) / num_tokens)

    def on_first_token(self, record: SequenceRecord) -> None:
        """`first_written_s` is known: observe TTFT, and the stages that add up to it."""
        if record.ttft_s is None or record.pooled:
            return
        self.ttft.labels(record.model).observe(record.ttft_s)
        for stage, seconds in ttft_breakdown(record).items():
            self.ttft_stage.labels(stage).observe(seconds)

    def _observe_answer(self, record: SequenceRecord) -> None:
        """Observe the lengths and times of a sequence that was answered completely."""
        model = record.model
        self.success.labels(model, record.finish).inc()
        self.kv.count_answer(record.kv, record.prompt_tokens + record.tokens)
        self.prompt_tokens.labels(model).inc(record.prompt_tokens)
        self.cached_tokens.labels(model).inc(record.cached_tokens)
        self.generation_tokens.labels(model).inc(record.tokens)
        self.request_prompt.labels(model).observe(record.prompt_tokens)
        self.request_generation.labels(model).observe(record.tokens)
        self.e2e.labels(model).observe(record.ended_s - record.arrived_s)
        prefill_s = record.stages.get("prefill", 0.0)
        self.queue.labels(model).observe(record.stages.get("prefill_queue", 0.0))
        self.prefill.labels(model).observe(prefill_s)
        self.decode.labels(model).observe(record.decode_s)
        self.inference.labels(model).observe(prefill_s + record.decode_s)
        if record.tpot_s is not None:
            self.tpot.labels(model).observe(record.tpot_s)


def ttft_breakdown(record: SequenceRecord) -> dict[str, float]:
    """The stages of the time to first token, in seconds by name; they add up to it.

    The relay's stages end when the token reached the gateway. The rest is "write", until it was written to the client.
    The stages of the hand-off are among them if a decode worker drew the first token.
    """
    stages = {stage: record.stages.get(stage, 0.0) for stage in TTFT_STAGES[:-1]}
    stages |= {stage: record.stages[stage] for stage in HANDOFF_STAGES if stage in record.stages}
    return {**stages, "write": (record.ttft_s or 0.0) - sum(stages.values())}
