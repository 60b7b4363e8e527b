"""Prometheus' rules: what is recorded of every SLO, and when somebody is told. Thresholds follow from the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.dashboard.burn_rates import BurnAlert, burn_alerts

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d")
OBJECTIVES = ("ttft", "tpot", "all")
EVALUATION = "30s"
# An alert on a burn rate needs this many requests in its short window: one miss among three at night is no news.
MIN_REQUESTS = 10
# How the names of recorded series begin.
RECORDED = "diptych:slo_"
# Where people read what to do.
RUNBOOK = "docs/dashboards.md#"


@dataclass(frozen=True, slots=True)
class AlertSpec:
    """One alert: it fires once `expr` has had results for `wait`. `action` is the line that says what to do."""

    name: str
    expr: str
    wait: str
    severity: str
    summary: str
    action: str


def recording_rules() -> list[dict[str, str]]:
    """For every window: the number of requests with an SLO, the share that missed it, and the burn rate."""
    return [rule for window in WINDOWS for rule in _rules_of_window(window)]


def _rules_of_window(window: str) -> list[dict[str, str]]:
    requests = "sum by (job, objective) (rate(diptych:slo_requests_total{0}[{1}]))"
    count = f"sum by (job, objective) (increase(diptych:slo_requests_total[{window}]))"
    # Without any miss there is no series of misses yet: then the share is 0, not unknown.
    missed = requests.format('{met="false"}', window)
    every = requests.format("", window)
    budget = "(1 - max by (job, objective) (diptych:slo_target_ratio))"
    return [
        {"record": f"diptych:slo_requests:increase{window}", "expr": count},
        {
            "record": f"diptych:slo_miss:ratio_rate{window}",
            "expr": f"({missed} or {every} * 0) / {every}",
        },
        {
            "record": f"diptych:slo_burn:rate{window}",
            "expr": f"diptych:slo_miss:ratio_rate{window} / on (job, objective) {budget}",
        },
    ]


def burn_alert_spec(burn: BurnAlert, objectives: Sequence[str], target: float) -> AlertSpec:
    """The alert on the burn rates of these objectives; it fires for each of them by itself."""
    chosen = f'{{objective=~"{"|".join(objectives)}"}}'
    long_rate, short_rate = (
        f"diptych:slo_burn:rate{window}{chosen} > {burn.threshold:g}"
        for window in (burn.long_window, burn.short_window)
    )
    traffic = f"diptych:slo_requests:increase{burn.short_window}{chosen} >= {MIN_REQUESTS}"
    return AlertSpec(
        f"DiptychBurn{burn.name}",
        f"{long_rate} and {short_rate} and {traffic}",
        "0s",
        burn.severity,
        f"The error budget of the SLO {{{{ $labels.objective }}}} (target {target:.12g}) burns "
        "{{ $value | humanize }} times as fast as it may",
        "Look at the row `Where the time goes`: admission or prefill_queue: add prefill workers, or refuse earlier "
        "(--max-queue-wait-s); decode or hand-off: add decode workers.",
    )


def alerts(target: float, objectives: Sequence[str] = OBJECTIVES) -> list[AlertSpec]:
    """All alerts of a deployment with these objectives (`ttft`, `tpot`, `all`) and this target, a share.

    Raises:
        ValueError: `target` is not between 0 and 1.
    """
    burning = [burn_alert_spec(burn, objectives, target) for burn in burn_alerts(target)]
    wrong_target = AlertSpec(
        "DiptychOtherTarget",
        f"max by (job) (abs(diptych:slo_target_ratio - {target:.12g})) > 1e-9",
        "10m",
        "ticket",
        f"The deployment has another target than these rules, which are for {target:.12g}",
        "Write the rules anew, with the deployment's settings: diptych dashboards --out DIR --config FILE",
    )
    return [*burning, *AVAILABILITY, *HAND_OFF, *ENGINE, wrong_target]


AVAILABILITY = (
    AlertSpec(
        "DiptychDown",
        # Other programs' jobs are none of ours: a job is if it had our metrics within a day, or says so by its name.
        'up == 0 and on (job, instance) last_over_time(diptych:ready[1d]) or up{job=~".*diptych.*"} == 0',
        "2m", "page", "Prometheus cannot read the gateway's metrics",
        "See whether the gateway runs (GET /health), and whether the scraper's key is the deployment's --metrics-key.",
    ),
    AlertSpec(
        "DiptychNotReady", "diptych:ready == 0", "2m", "page", "No canary comes through: requests are not served",
        "GET /ready with a key says why; `diptych status` shows workers and links.",
    ),
    AlertSpec(
        "DiptychPoolShort",
        "sum by (job, role) (diptych:worker_up) < on (job, role) max by (job, role) (diptych:wanted_workers)", "2m",
        "ticket", "{{ $labels.role }} workers are missing: {{ $value }} are up",
        "The worker's log says how it ended (--log-dir); after a drain by order, start the deployment with fewer.",
    ),
    AlertSpec(
        "DiptychPoolDead",
        # Workers that crash whenever they start are up for moments: they count as dead, unless one of them was up for
        # more than 6 of the last 30 s. Seconds are counted, not scrapes: so any interval of scrapes will do. Not in
        # the first 70 s of a deployment: its workers are starting, and by then two scrapes a minute apart are there.
        "max by (job, role) (diptych:wanted_workers) > 0 "
        "and on (job, role) max by (job, role) (diptych:wanted_workers offset 70s) >= 0 "
        "unless on (job, role) max by (job, role) (count_over_time((diptych:worker_up > 0)[30s:1s])) > 6",
        "0s", "page", "No {{ $labels.role }} worker stays up: in the last 30 s there was none most of the time",
        "The workers' logs say how they ended (--log-dir); requests wait for --recovery-s, then fail with 503.",
    ),
    AlertSpec(
        "DiptychWorkersLost", "increase(diptych:workers_lost_total[15m]) > 3", "0s", "ticket",
        "{{ $value | humanize }} workers were lost in 15 minutes",
        "Their logs say why: out of memory, a crash (see quarantined requests), or a machine that is too busy.",
    ),
    AlertSpec(
        "DiptychQuarantine", "increase(diptych:quarantined_requests_total[1h]) > 0", "0s", "ticket",
        "A request crashed workers and is refused from now on",
        "The gateway's log names the request; keep it, and report the crash.",
    ),
    AlertSpec(
        "DiptychRefusing",
        "sum by (job) (rate(diptych:refused_requests_total[5m])) "
        "/ sum by (job) (rate(diptych:offered_requests_total[5m])) > 0.1",
        "5m", "ticket", "{{ $value | humanizePercentage }} of the requests are refused",
        "More is asked than can be served: add workers, or let clients ask less.",
    ),
)  # fmt: skip

HAND_OFF = (
    AlertSpec(
        "DiptychCorruptKv", "sum by (job, worker) (increase(diptych:integrity_failures_total[15m])) > 0", "0s",
        "ticket", "KV arrived corrupt at {{ $labels.worker }}; it was not used",
        "Suspect memory or network of the two machines; `diptych status` shows which link was given up.",
    ),
    AlertSpec(
        "DiptychLeasesExpired", "sum by (job, worker) (increase(diptych:leases_expired_total[15m])) > 0", "0s",
        "ticket", "Leases of KV expired at {{ $labels.worker }}",
        "The gateway stood still, or messages are lost between it and the worker: look at the event loop's lag.",
    ),
    AlertSpec(
        "DiptychKvHeldAtRest",
        "(sum by (job) (diptych:leases) > 0 or sum by (job) (diptych:staging_bytes) > 0 or "
        "sum by (job) (diptych:kv_slabs_used) > 0) and on (job) (diptych:open_requests == 0)", "1m", "ticket",
        "KV is held though no request is open",
        "`diptych status` shows which worker holds it; drain that worker and start it again, and report it.",
    ),
    AlertSpec(
        "DiptychNoPrefill", 'sum by (job) (rate(diptych:local_prefills_total{reason="no_prefill_worker"}[5m])) > 0',
        "5m", "ticket", "Decode workers prefill the prompts, since no prefill worker is up",
        "See why prefill workers are down; until then answers are slower.",
    ),
)  # fmt: skip

ENGINE = (
    AlertSpec(
        "DiptychPoolFull", "vllm:kv_cache_usage_perc > 0.95 and on (job) diptych:ready", "10m", "ticket",
        "The KV pool of {{ $labels.engine }} is full",
        "Requests are preempted or wait: add workers of this role, or give each more memory "
        "(--kv-cache-memory-bytes), or a codec (--kv-cache-codec).",
    ),
    AlertSpec(
        "DiptychWorkerStuck", "diptych:worker_stuck_seconds > 0", "1m", "page",
        "The engine of {{ $labels.worker }} makes no progress",
        "Its requests were given to other workers; its log has the stacks of its threads.",
    ),
    AlertSpec(
        "DiptychRequestLogDrops", 'sum by (job) (rate(diptych:request_log_lines_total{outcome!="written"}[5m])) > 0',
        "5m", "ticket", "Lines of the request log are lost",
        "The disk of --request-log is full or too slow.",
    ),
    AlertSpec(
        "DiptychBelowPlan",
        "max by (job) (diptych:replan_expected_attainment > 0) "
        '- on (job) (1 - max by (job) (diptych:slo_miss:ratio_rate30m{objective="all"})) > 0.05', "15m", "ticket",
        "Attainment is more than 5 points below what the replanner expects of this fleet",
        "Its costs are not this machine's: measure them (diptych profile) and give them to --replan-profile.",
    ),
)  # fmt: skip


def rule_file(target: float, objectives: Sequence[str] = OBJECTIVES) -> dict[str, Any]:
    """The content of Prometheus' rule file for this target and these objectives.

    Raises:
        ValueError: `target` is not between 0 and 1.
    """
    every = alerts(target, objectives)
    # The rules of a group are evaluated in order: these alerts see what was recorded a moment before.
    on_recorded = [alert for alert in every if RECORDED in alert.expr]
    others = [alert for alert in every if alert not in on_recorded]
    slo_rules = [*recording_rules(), *map(_alert_rule, on_recorded)]
    return {
        "groups": [
            {"name": "diptych-slo", "interval": EVALUATION, "rules": slo_rules},
            {"name": "diptych", "interval": EVALUATION, "rules": [_alert_rule(alert) for alert in others]},
        ]
    }


def _alert_rule(alert: AlertSpec) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.wait,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "action": alert.action,
            "runbook": f"{RUNBOOK}{alert.name.lower()}",
        },
    }
