"""The rows about the machinery: hand-off, pools, faults, planner, and the gateway's process."""

from __future__ import annotations

from dataclasses import replace

from services.dashboard.panels import (
    RATE_WINDOW,
    PanelSpec,
    Query,
    RowSpec,
    quantile_queries,
    rate_by,
    sum_rate,
)


def handoff_row() -> RowSpec:
    """How KV moves from prefill to decode workers."""
    moved = f"sum(rate(diptych:transfer_part_seconds_total[{RATE_WINDOW}]))"
    hidden = f'sum(rate(diptych:transfer_part_seconds_total{{part="hidden"}}[{RATE_WINDOW}])) / {moved}'
    gb = f"sum by (transport) (rate(diptych:transfer_bytes_total[{RATE_WINDOW}])) / 1e9"
    link = "{{source}} to {{target}} ({{transport}})"
    return RowSpec(
        "Hand-off",
        "handoff",
        (
            PanelSpec("KV moved", (Query(gb, "{{transport}}"),), "GBs", "Gigabytes per second, by transport."),
            PanelSpec(
                "Hidden and exposed", (rate_by("diptych:transfer_part_seconds_total", "part"),), "s",
                "Seconds of moving KV per second. Hidden: while the prompt was still being prefilled. Exposed: the "
                "answer waited for it.", "stacked",
            ),
            PanelSpec("Share that is hidden", (Query(hidden, "hidden"),), "percentunit", "Higher is better."),
            PanelSpec(
                "Time of a hand-off", quantile_queries("diptych:transfer_seconds", (0.5, 0.99)), "s",
                "Moving and verifying one request's KV.",
            ),
            PanelSpec(
                "Links, GB/s", (Query("diptych:link_gb_per_s", link),), "GBs",
                "From each prefill worker (rows) to each decode worker (columns), measured when the link was opened.",
                "table",
            ),
            PanelSpec(
                "Links, latency", (Query("diptych:link_latency_us", link),), "µs",
                "Of one small read, measured at the same time.", "table",
            ),
            PanelSpec(
                "Links, KV moved",
                (Query(f"rate(diptych:link_bytes_total[{RATE_WINDOW}])", link),), "Bps",
                "Bytes per second over each link.", "table",
            ),
            PanelSpec(
                "Leases", (Query("diptych:leases", "{{worker}}"),), "short",
                "Requests whose KV waits to be pulled. 0 at rest.",
            ),
            PanelSpec(
                "KV on its way", (Query("diptych:staging_bytes", "{{worker}}"),), "bytes",
                "Bytes that are being moved to each worker. 0 at rest.",
            ),
            PanelSpec(
                "Pulled in vain", (rate_by("diptych:wasted_bytes_total", "worker"),), "Bps",
                "KV that was pulled ahead of its ticket and had to be pulled again.",
            ),
        ),
    )  # fmt: skip


def pools_row() -> RowSpec:
    """How busy the workers are, and what their memory holds."""
    used, cached = (
        "sum by (role) (diptych:kv_slabs_used)",
        "sum by (role) (diptych:kv_slabs_cached)",
    )
    free = f"sum by (role) (diptych:kv_slabs) - {used} - {cached}"
    tokens = (
        f"rate(diptych:engine_step_tokens_total[{RATE_WINDOW}])"
        f" / rate(diptych:engine_steps_total[{RATE_WINDOW}])"
    )
    hits = (
        f"sum(rate(vllm:prefix_cache_hits_total[{RATE_WINDOW}]))"
        f" / sum(rate(vllm:prefix_cache_queries_total[{RATE_WINDOW}]))"
    )
    busy = f"rate(diptych:engine_step_seconds_total[{RATE_WINDOW}])"
    return RowSpec(
        "Pools",
        "pools",
        (
            PanelSpec("Busy", (Query(busy, "{{worker}}"),), "percentunit", "Share of the time in engine steps."),
            PanelSpec("Tokens per step", (Query(tokens, "{{worker}}"),), "short", "Batch sizes."),
            PanelSpec(
                "Parts of steps", (rate_by("diptych:step_seconds_total", "role, part", "{{role}} {{part}}"),), "s",
                "Seconds per second, by role and part.", "stacked",
            ),
            PanelSpec(
                "KV slabs",
                (Query(used, "{{role}} used"), Query(cached, "{{role}} cached"), Query(free, "{{role}} free")),
                "short", "Used by requests, kept for prefixes, and free.", "stacked",
            ),
            PanelSpec(
                "Running and waiting",
                (
                    Query("vllm:num_requests_running", "{{engine}} running"),
                    Query("vllm:num_requests_waiting_by_reason", "{{engine}} waiting ({{reason}})"),
                ),
                "short", "Sequences at each worker. deferred: their KV has not arrived.",
            ),
            PanelSpec(
                "Prompt tokens waiting", (Query("diptych:waiting_tokens", "{{worker}}"),), "short",
                "In the queue of each worker.",
            ),
            PanelSpec("Prefix cache hits", (Query(hits, "hits"),), "percentunit", "Share of the tokens looked up."),
            PanelSpec(
                "Preemptions",
                (
                    sum_rate("vllm:num_preemptions_total", "all ways"),
                    rate_by("diptych:preemptions_total", "way"),
                ),
                "ops", "Running requests that had to make room.",
            ),
            *_eviction_panels(),
            PanelSpec(
                "Prefilled by decode workers", (rate_by("diptych:local_prefills_total", "reason"),), "ops",
                "By reason: no prefill worker, no link, or predicted to be sooner.",
            ),
        ),
    )  # fmt: skip


def _eviction_panels() -> tuple[PanelSpec, ...]:
    """The panels about sequences that evict."""
    return (
            PanelSpec(
                "KV freed by eviction",
                (
                    sum_rate("diptych:kv_pruned_freed_bytes_total", "freed"),
                    rate_by("diptych:kv_pruned_bytes_total", "outcome"),
                ),
                "Bps",
                "Of answered sequences that evict. Freed: how much less of the pool they held, in whole slabs.",
            ),
            PanelSpec(
                "Heads by policy", (rate_by("diptych:kv_pruned_heads_total", "policy"),), "ops",
                "Of answered sequences that evict: what each head kept. full: everything.", "stacked",
            ),
    )  # fmt: skip


def faults_row() -> RowSpec:
    """What went wrong, and what was done about it."""
    return RowSpec("Faults", "faults", (*_lost_workers(), *_lost_work()))


def _lost_workers() -> tuple[PanelSpec, ...]:
    """The panels about workers that are down or stand still, and requests that failed or were begun again."""
    return (
            PanelSpec(
                "Workers up and wanted",
                (
                    Query("sum by (role) (diptych:worker_up)", "{{role}} up"),
                    Query("diptych:wanted_workers", "{{role}} wanted"),
                ),
                "short", "By role.",
            ),
            PanelSpec(
                "Failures", (rate_by("diptych:request_failures_total", "code"),), "reqps",
                "Sequences that ended in an error, by its code.",
            ),
            PanelSpec(
                "Second attempts",
                (
                    rate_by("diptych:request_retries_total", "code", "{{code}}"),
                    rate_by("diptych:migrated_streams_total", "code", "{{code}}, after the first token"),
                ),
                "reqps", "Attempts given up for another one, by cause. Their clients saw no error.",
            ),
            PanelSpec(
                "Workers lost", (Query("increase(diptych:workers_lost_total[15m])", "last 15 minutes"),), "short",
                "They are started again.",
            ),
            PanelSpec(
                "Stuck and draining",
                (
                    Query("diptych:worker_stuck_seconds", "{{worker}} stuck for (s)"),
                    Query("diptych:worker_draining", "{{worker}} draining"),
                ),
                "short", "Workers that make no progress, and workers that take no new work.",
            ),
    )  # fmt: skip


def _lost_work() -> tuple[PanelSpec, ...]:
    """The panels about KV and messages that could not be used, and requests that are suspected."""
    return (
            PanelSpec(
                "Corrupt KV",
                (
                    Query("sum by (worker) (increase(diptych:integrity_failures_total[15m]))", "{{worker}}"),
                    Query("diptych:links_given_up_total", "links given up"),
                ),
                "short", "Hand-offs whose KV did not match its digest, in 15 minutes. No answer was made from it.",
            ),
            PanelSpec(
                "Leases expired",
                (Query("sum by (worker) (increase(diptych:leases_expired_total[15m]))", "{{worker}}"),),
                "short", "In 15 minutes: KV that nobody fetched or released.",
            ),
            PanelSpec(
                "Quarantine",
                (
                    Query("diptych:suspected_requests", "suspected"),
                    Query("increase(diptych:quarantined_requests_total[1h])", "refused in the last hour"),
                ),
                "short", "Requests that were open when workers crashed.",
            ),
            PanelSpec(
                "Late messages",
                (
                    sum_rate("diptych:late_messages_total", "at workers"),
                    rate_by("diptych:gateway_late_messages_total", "kind", "at the gateway: {{kind}}"),
                ),
                "ops", "About attempts that had ended; dropped.",
            ),
    )  # fmt: skip


def planner_row() -> RowSpec:
    """What the replanner expected, and what came of it. Needs `--replan`, but for the first panel."""
    gain = (
        f'sum(rate(diptych:transfer_part_seconds_total{{part="exposed"}}[{RATE_WINDOW}]))'
        f" / sum(rate(diptych:transfer_seconds_count[{RATE_WINDOW}]))"
    )
    p99 = quantile_queries("vllm:inter_token_latency_seconds", (0.99,))
    slowest_tokens = tuple(replace(query, legend="inter-token latency, p99") for query in p99)
    return RowSpec(
        "Planner",
        "planner",
        (
            PanelSpec(
                "What disaggregation costs and brings",
                (
                    Query(gain, "exposed transfer per request"),
                    *slowest_tokens,
                    Query(
                        f"sum(rate(vllm:request_prefill_time_seconds_sum[{RATE_WINDOW}]))"
                        f" / sum(rate(vllm:request_prefill_time_seconds_count[{RATE_WINDOW}]))",
                        "mean prefill, which interrupts no answer",
                    ),
                ),
                "s",
                "Each request waits for the exposed transfer. In exchange no prefill stands in the way of its tokens: "
                "colocated, a token could wait for a whole prefill step.",
            ),
            PanelSpec(
                "Expected and attained",
                (
                    Query("diptych:replan_expected_attainment > 0", "expected"),
                    Query('1 - diptych:slo_miss:ratio_rate5m{objective="all"}', "attained"),
                ),
                "percentunit", "What the replanner predicted for this fleet, and what clients got.",
            ),
            PanelSpec(
                "Fleet",
                (
                    Query("diptych:replan_target_workers", "{{role}} decided"),
                    Query("sum by (role) (diptych:worker_up)", "{{role}} up"),
                ),
                "short", "Workers of the latest decision, and those that are up.",
            ),
            PanelSpec(
                "Alarms", (Query("sum by (what) (diptych:replan_alarms_total)", "{{what}}"),), "short",
                "Changes of traffic that were detected.",
            ),
            PanelSpec(
                "Decisions", (Query("sum by (trigger) (diptych:replan_decisions_total)", "{{trigger}}"),), "short",
                "Reviews of the plan, whether it changed or not.",
            ),
            PanelSpec(
                "Actions",
                (Query("sum by (action, outcome) (diptych:replan_actions_total)", "{{action}}: {{outcome}}"),),
                "short", "Changes of the fleet.",
            ),
        ),
    )  # fmt: skip


def gateway_row() -> RowSpec:
    """The gateway's process."""
    return RowSpec(
        "Gateway",
        "gateway",
        (
            PanelSpec("Ready", (Query("diptych:ready", "ready"),), "short", "1: canaries come through.", "number", 6),
            PanelSpec("Processor", (Query(f"rate(process_cpu_seconds_total[{RATE_WINDOW}])", "cores"),), "short",
                      "Of the event loop and its threads.", width=6),
            PanelSpec("Memory", (Query("process_resident_memory_bytes", "resident"),), "bytes",
                      "Of the gateway's process.", width=6),
            PanelSpec("Event loop lag", quantile_queries("diptych:event_loop_lag_seconds", (0.5, 0.99)), "s",
                      "How late the loop was.", width=6),
        ),
    )  # fmt: skip
