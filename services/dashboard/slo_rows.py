"""The rows about what clients were promised: SLOs, what clients see, where the time goes, what is refused."""

from __future__ import annotations

from services.dashboard.burn_rates import burn_alerts
from services.dashboard.panels import (
    RATE_WINDOW,
    PanelSpec,
    Query,
    RowSpec,
    quantile_queries,
    rate_by,
    sum_rate,
)

TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"
ITL, E2E = "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"


def slo_row(target: float) -> RowSpec:
    """Attainment, error budget, burn rates and goodput; thresholds for `target`, a share between 0 and 1."""
    windows = ("5m", "1h", "6h", "1d")
    burn = tuple(Query(f"diptych:slo_burn:rate{window}", f"{{{{objective}}}} {window}") for window in windows)
    limits = tuple(
        Query(f"vector({alert.threshold:g})", f"{alert.severity} ({alert.long_window}, {alert.short_window})")
        for alert in burn_alerts(target)
    )
    attained = (
        Query("1 - diptych:slo_miss:ratio_rate5m", "{{objective}}"),
        Query("max(diptych:slo_target_ratio)", "target"),
    )
    checked = "sum by (objective) (increase(diptych:slo_requests_total{0}[$__range]))"
    missed, every = checked.format('{met="false"}'), checked.format("")
    # Without any miss there is no series of misses yet.
    share = f"({missed} or {every} * 0) / {every}"
    budget = f"1 - ({share}) / on (objective) (1 - max by (objective) (diptych:slo_target_ratio))"
    return RowSpec(
        "SLO",
        "slo",
        (
            PanelSpec(
                "Attainment now", (Query("diptych:slo_attainment", "{{objective}}"),), "percentunit",
                "Share of the last 1,000 sequences that met the SLO. Refused requests have not met it.", "number",
            ),
            PanelSpec(
                "Error budget left", (Query(budget, "{{objective}}"),), "percentunit",
                "Of the misses that the target allows in the chosen time, the share that is left. Below 0 it is "
                "overdrawn.", "number",
            ),
            PanelSpec(
                "Objectives", (Query("diptych:slo_objective_seconds", "{{objective}}"),), "s",
                "The SLOs that the gateway was started with.", "number",
            ),
            PanelSpec("Attainment over 5 minutes", attained, "percentunit", "With the target."),
            PanelSpec(
                "Burn rate", (*burn, *limits), "short",
                "1: the error budget lasts exactly its period. An alert fires where the rate is above its threshold in "
                "both of its windows.",
            ),
            *_goodput_panels(),
        ),
    )  # fmt: skip


def _goodput_panels() -> tuple[PanelSpec, ...]:
    """What is answered within all SLOs, and why the rest is not."""
    return (
        PanelSpec(
            "Goodput",
            (
                sum_rate("diptych:goodput_requests_total", "within all SLOs"),
                sum_rate("vllm:request_success_total", "answered"),
                sum_rate("diptych:offered_requests_total", "offered"),
                sum_rate("diptych:refused_requests_total", "refused"),
            ),
            "reqps",
            "What is answered within all SLOs, out of what clients asked for.",
        ),
        PanelSpec(
            "Missed and not counted, by reason",
            (
                rate_by(
                    'diptych:slo_outcomes_total{outcome!="met"}', "outcome, reason", "{{outcome}}: {{reason}}"
                ),
            ),
            "reqps",
            "Misses are the service's; what clients brought about themselves is not counted.",
        ),
    )  # fmt: skip


def clients_row() -> RowSpec:
    """The times that clients see, as quantiles with the SLOs, and as heat maps."""

    def objective(name: str) -> Query:
        return Query(f'max(diptych:slo_objective_seconds{{objective="{name}"}})', "SLO")

    def heat_map(title: str, metric: str) -> PanelSpec:
        counts = Query(f"sum by (le) (rate({metric}_bucket[{RATE_WINDOW}]))", "{{le}}")
        return PanelSpec(title, (counts,), "s", "How many requests per second took how long.", "heat map", 12)

    return RowSpec(
        "What clients see",
        "clients",
        (
            PanelSpec(
                "Time to first token", (*quantile_queries(TTFT), objective("ttft")), "s",
                "From the arrival of the request until its first token was written.", width=6,
            ),
            PanelSpec(
                "Time per output token", (*quantile_queries(TPOT), objective("tpot")), "s",
                "Mean time per token after the first, per sequence.", width=6,
            ),
            PanelSpec(
                "Inter-token latency", (*quantile_queries(ITL), objective("tpot")), "s",
                "Between consecutive tokens, per token: pauses that a mean hides.", width=6,
            ),
            PanelSpec(
                "Whole answer", quantile_queries(E2E), "s",
                "From the arrival of the request until its end was written.", width=6,
            ),
            heat_map("TTFT, heat map", TTFT),
            heat_map("TPOT, heat map", TPOT),
            PanelSpec(
                "Answers by reason of their end", (rate_by("vllm:request_success_total", "finished_reason"),), "reqps",
                "length: the answer was cut at its limit of tokens.",
            ),
            PanelSpec(
                "Prompt tokens", quantile_queries("vllm:request_prompt_tokens", (0.5, 0.95)), "short",
                "Lengths of prompts.",
            ),
            PanelSpec(
                "New tokens", quantile_queries("vllm:request_generation_tokens", (0.5, 0.95)), "short",
                "Lengths of answers.",
            ),
        ),
    )  # fmt: skip


def time_row() -> RowSpec:
    """Where the time of the first two tokens goes."""
    stage = "sum by (stage) (rate({0}_sum[{1}])) / on () group_left () sum(rate({2}_count[{1}]))"
    ttft = stage.format("diptych:ttft_stage_seconds", RATE_WINDOW, TTFT)
    handoff = (
        f"sum by (stage) (rate(diptych:handoff_stage_seconds_sum[{RATE_WINDOW}]))"
        f" / sum by (stage) (rate(diptych:handoff_stage_seconds_count[{RATE_WINDOW}]))"
    )
    p95 = (
        "histogram_quantile(0.95, sum by (le, stage) "
        f"(rate(diptych:ttft_stage_seconds_bucket[{RATE_WINDOW}])))"
    )
    return RowSpec(
        "Where the time goes",
        "time",
        (
            PanelSpec(
                "Stages of the mean TTFT", (Query(ttft, "{{stage}}"),), "s",
                "The stages of every sequence sum to its time to first token, so these sum to the mean.", "stacked", 12,
            ),
            PanelSpec(
                "Stages of the mean hand-off", (Query(handoff, "{{stage}}"),), "s",
                "From the first token at the gateway to the second. Empty where workers are colocated.", "stacked", 12,
            ),
            PanelSpec(
                "Stages of TTFT, p95", (Query(p95, "{{stage}}"),), "s",
                "Each stage by itself: these do not add up.", width=12,
            ),
            PanelSpec(
                "Wait in the gateway", quantile_queries("diptych:queue_wait_seconds", (0.5, 0.95)), "s",
                "For room or for workers; only sequences that had to wait.", width=12,
            ),
        ),
    )  # fmt: skip


def admission_row() -> RowSpec:
    """What waits in the gateway, and what it refuses."""
    share = (
        f"sum(rate(diptych:refused_requests_total[{RATE_WINDOW}]))"
        f" / sum(rate(diptych:offered_requests_total[{RATE_WINDOW}]))"
    )
    return RowSpec(
        "Admission",
        "admission",
        (
            PanelSpec(
                "Open and queued",
                (
                    Query("diptych:open_requests", "open requests"),
                    Query("diptych:queued_requests", "queued sequences"),
                ),
                "short",
                "HTTP requests being answered, and sequences that wait for room or for workers.",
            ),
            PanelSpec(
                "Predicted wait", (Query("diptych:predicted_wait_seconds", "predicted TTFT"),), "s",
                "Of a request that arrives now. Above --max-queue-wait-s requests are refused with 429.",
            ),
            PanelSpec(
                "Prompt tokens without a first token", (Query("diptych:unread_prompt_tokens", "tokens"),), "short",
                "Work that prefill workers still have to do.",
            ),
            PanelSpec(
                "Refused, by code",
                (rate_by("diptych:refused_requests_total", "code"), Query(share, "share of what was offered")),
                "reqps",
                "Requests refused because of load, per second, and their share.",
            ),
            PanelSpec(
                "HTTP answers", (rate_by("diptych:http_requests_total", "route, status", "{{route}} {{status}}"),),
                "reqps", "By route and status.",
            ),
            PanelSpec(
                "Clients that left",
                (
                    sum_rate("diptych:requests_cancelled_total", "cancelled"),
                    sum_rate("diptych:slow_readers_cut_total", "read too slowly"),
                ),
                "reqps",
                "Sequences that were ended early.",
            ),
        ),
    )  # fmt: skip
