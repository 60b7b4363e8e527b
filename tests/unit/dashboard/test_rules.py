"""Rules and alerts, run by promtool on series of which it is known what should fire. Skipped without promtool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.dashboard.burn_rates import burn_alerts
from services.dashboard.panels import select_job
from services.dashboard.rules import OBJECTIVES, alerts, rule_file
from services.dashboard.write import list_dashboards

TARGETS = (0.9, 0.95, 0.99, 0.999)
MINUTES = 1445  # a day, the longest window, and some evaluations
PER_MINUTE = 1000

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)"
)

Series = dict[str, str]

# What makes each alert fire, beside those on burn rates: series by minute.
CAUSES: dict[str, Series] = {
    "DiptychDown": {'up{job="d"}': "0x30"},
    "DiptychNotReady": {'diptych:ready{job="d"}': "0x30"},
    "DiptychPoolShort": {
        'diptych:worker_up{job="d",role="decode",worker="decode-0"}': "1x30",
        'diptych:wanted_workers{job="d",role="decode"}': "2x30",
    },
    "DiptychPoolDead": {
        'diptych:worker_up{job="d",role="prefill",worker="prefill-0"}': "1x30",
        'diptych:wanted_workers{job="d",role="prefill"}': "1x30",
        'diptych:wanted_workers{job="d",role="decode"}': "1x30",
        'diptych:worker_up{job="d",role="decode",worker="decode-0"}': "1x5 stale",
    },
    "DiptychWorkersLost": {'diptych:workers_lost_total{job="d"}': "0+1x30"},
    "DiptychQuarantine": {'diptych:quarantined_requests_total{job="d"}': "0x10 1x20"},
    "DiptychRefusing": {
        'diptych:refused_requests_total{job="d",code="queue_full"}': "0+20x30",
        'diptych:offered_requests_total{job="d"}': "0+100x30",
    },
    "DiptychCorruptKv": {'diptych:integrity_failures_total{job="d",worker="decode-0"}': "0x20 1x10"},
    "DiptychLeasesExpired": {'diptych:leases_expired_total{job="d",worker="prefill-0"}': "0x20 1x10"},
    "DiptychKvHeldAtRest": {
        'diptych:leases{job="d",worker="prefill-0"}': "1x30",
        'diptych:open_requests{job="d"}': "0x30",
    },
    "DiptychNoPrefill": {
        'diptych:local_prefills_total{job="d",reason="no_prefill_worker"}': "0+5x30",
    },
    "DiptychPoolFull": {'vllm:kv_cache_usage_perc{job="d",engine="decode-0"}': "0.97x30"},
    "DiptychWorkerStuck": {'diptych:worker_stuck_seconds{job="d",worker="decode-0"}': "25x30"},
    "DiptychRequestLogDrops": {'diptych:request_log_lines_total{job="d",outcome="dropped"}': "0+5x30"},
    "DiptychBelowPlan": {
        'diptych:replan_expected_attainment{job="d"}': "0.95x30",
        'diptych:slo_requests_total{job="d",objective="all",met="false"}': "0+20x30",
        'diptych:slo_requests_total{job="d",objective="all",met="true"}': "0+80x30",
    },
    "DiptychOtherTarget": {'diptych:slo_target_ratio{job="d",objective="all"}': "0.8x30"},
}
# The same parts in good health.
HEALTHY: Series = {
    'up{job="d"}': "1x30",
    'diptych:ready{job="d"}': "1x30",
    'diptych:worker_up{job="d",role="decode",worker="decode-0"}': "1x30",
    'diptych:wanted_workers{job="d",role="decode"}': "1x30",
    'diptych:workers_lost_total{job="d"}': "1x30",
    'diptych:quarantined_requests_total{job="d"}': "2x30",
    'diptych:refused_requests_total{job="d",code="queue_full"}': "0+1x30",
    'diptych:offered_requests_total{job="d"}': "0+100x30",
    'diptych:integrity_failures_total{job="d",worker="decode-0"}': "1x30",
    'diptych:leases_expired_total{job="d",worker="prefill-0"}': "1x30",
    'diptych:leases{job="d",worker="prefill-0"}': "1x30",
    'diptych:kv_slabs_used{job="d",worker="prefill-0"}': "4x30",
    'diptych:open_requests{job="d"}': "1x30",
    'vllm:kv_cache_usage_perc{job="d",engine="decode-0"}': "0.9x30",
    'diptych:worker_stuck_seconds{job="d",worker="decode-0"}': "0x30",
    'diptych:request_log_lines_total{job="d",outcome="written"}': "0+5x30",
    'diptych:replan_expected_attainment{job="d"}': "0.95x30",
    'diptych:slo_requests_total{job="d",objective="all",met="false"}': "0+5x30",
    'diptych:slo_requests_total{job="d",objective="all",met="true"}': "0+95x30",
    'diptych:slo_target_ratio{job="d",objective="all"}': "0.9x30",
}


def promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=300)


def check_fires(folder: Path, target: float, cases: list[dict[str, Any]], every: str = "1m") -> None:
    """Let promtool run `cases` on the rules of a target, and evaluate the rules `every` so often."""
    (folder / "rules.yml").write_text(yaml.safe_dump(rule_file(target)))
    tests = {"rule_files": ["rules.yml"], "evaluation_interval": every, "tests": cases}
    (folder / "tests.yml").write_text(yaml.safe_dump(tests))
    done = promtool("test", "rules", "tests.yml", folder=folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[:3000]


def case(series: Series, at: str, **fires: int) -> dict[str, Any]:
    """After `at`, each of these alerts fires this many times; PromQL counts them, so labels and texts do not matter."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": count}],
            }
            for name, count in fires.items()
        ],
    }


def slo_series(
    target: float, bad: float, good: float, objective: str = "all", minutes: int = MINUTES
) -> Series:
    """Requests with an SLO, so many bad and good ones in a minute."""
    name = f'diptych:slo_requests_total{{job="d",objective="{objective}",met='
    return {
        f'{name}"false"}}': f"0+{bad:g}x{minutes}",
        f'{name}"true"}}': f"0+{good:g}x{minutes}",
        f'diptych:slo_target_ratio{{job="d",objective="{objective}"}}': f"{target:g}x{minutes}",
    }


def share_missed(target: float, share: float) -> Series:
    return slo_series(target, PER_MINUTE * share, PER_MINUTE * (1 - share))


@needs_promtool
@pytest.mark.parametrize("target", TARGETS)
def test_rules_are_right_for_promtool(target: float, tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule_file(target)))
    done = promtool("check", "rules", "rules.yml", folder=tmp_path)
    assert done.returncode == 0 and "SUCCESS" in done.stdout and "duplicate" not in done.stdout


@needs_promtool
@pytest.mark.parametrize("target", TARGETS)
def test_each_burn_alert_fires_above_its_threshold_and_not_below(target: float, tmp_path: Path) -> None:
    fast, slow, ticket = (burn.threshold * (1 - target) for burn in burn_alerts(target))
    none = {"DiptychBurnFast": 0, "DiptychBurnSlow": 0, "DiptychBurnTicket": 0}
    every = dict.fromkeys(none, 1)
    check_fires(
        tmp_path,
        target,
        [
            case(share_missed(target, 1.0), "30m", **every),
            case(share_missed(target, fast * 1.01), "1d", **every),
            case(share_missed(target, fast * 0.99), "1d", **every | {"DiptychBurnFast": 0}),
            case(share_missed(target, slow * 0.99), "1d", **none | {"DiptychBurnTicket": 1}),
            case(share_missed(target, ticket * 0.99), "1d", **none),
            case(share_missed(target, 0.0), "1d", **none),
        ],
        every="30m",
    )


@needs_promtool
def test_a_burn_alert_ends_with_the_fire_and_needs_traffic(tmp_path: Path) -> None:
    # An hour of misses, then none: the long window still burns, the short one does not.
    over = {
        'diptych:slo_requests_total{job="d",objective="all",met="false"}': "0+100x60 6000x60",
        'diptych:slo_requests_total{job="d",objective="all",met="true"}': "0x60 0+100x60",
        'diptych:slo_target_ratio{job="d",objective="all"}': "0.9x120",
    }
    little = slo_series(0.9, bad=0.5, good=0.0, minutes=60)
    only_ttft = slo_series(0.9, bad=100, good=0, objective="ttft", minutes=60)
    check_fires(
        tmp_path,
        0.9,
        [
            case(over, "59m", DiptychBurnFast=1),
            case(over, "75m", DiptychBurnFast=0, DiptychBurnSlow=1),
            case(little, "60m", DiptychBurnFast=0, DiptychBurnSlow=1),
            case(only_ttft, "60m", DiptychBurnFast=1),
            case(slo_series(0.9, 100, 0, minutes=60) | only_ttft, "60m", DiptychBurnFast=2),
        ],
    )


def pool_of(num_workers: int, values: str = "") -> Series:
    """A pool of decode workers that all have these samples; without them it is only wanted."""
    wanted = {'diptych:wanted_workers{job="d",role="decode"}': f"{num_workers}x300"}
    return wanted | {decode_up(number): values for number in range(num_workers) if values}


def decode_up(number: int) -> str:
    return f'diptych:worker_up{{job="d",role="decode",worker="decode-{number}"}}'


def dead_pools(series: Series, interval: str, at: str, fires: int) -> dict[str, Any]:
    """Scraped every `interval`: so many pools are dead after `at`."""
    return case(series, at, DiptychPoolDead=fires) | {"interval": interval}


@needs_promtool
def test_a_pool_whose_workers_come_up_for_moments_is_dead(tmp_path: Path) -> None:
    """Scraped every second. Who crashes whenever it starts is not up; who restarts once, or starts, is not dead."""
    wanted, up = pool_of(2), decode_up(0)
    once = wanted | {up: "1x100 stale _x15 1x100"}
    short, long = (wanted | {up: f"{start} 1x200"} for start in ("_x20", "_x100"))
    cases = [
        (pool_of(2, "1x180"), "120s", 0),
        (once, "116s", 0),
        (short, "20s", 0),
        (short, "40s", 0),
        (short, "80s", 0),
        (long, "60s", 0),
        (long, "85s", 1),
        (long, "140s", 0),
        (wanted | {up: "1x100 stale"}, "135s", 1),
    ]
    check_fires(
        tmp_path, 0.9, [dead_pools(series, "1s", at, fires) for series, at, fires in cases], every="1s"
    )


@needs_promtool
@pytest.mark.parametrize("num_workers", [2, 4, 16])
def test_a_pool_of_any_size_whose_workers_all_crash_at_start_is_dead(
    num_workers: int, tmp_path: Path
) -> None:
    """Each worker is up for 1 s of 14, at a moment of its own: of 16 there is always one up, but none stays up."""
    moments = " ".join(["stale", "_x12", "1"] * 12)
    crashing = pool_of(num_workers) | {
        decode_up(number): f"1x100 {f'_x{number % 14}' if number % 14 else ''} {moments}"
        for number in range(num_workers)
    }
    one_stays = crashing | {decode_up(0): "1x300"}
    cases = [(crashing, "100s", 0), (crashing, "150s", 1), (crashing, "215s", 1), (one_stays, "215s", 0)]
    check_fires(
        tmp_path, 0.9, [dead_pools(series, "1s", at, fires) for series, at, fires in cases], every="1s"
    )


@needs_promtool
@pytest.mark.parametrize("interval_s", [5, 10, 60])
def test_a_dead_pool_alerts_without_a_break_at_any_scrape_interval(interval_s: int, tmp_path: Path) -> None:
    """Prometheus' own default is a minute: the alert neither ends between scrapes, nor comes at the start."""
    samples = 180 // interval_s
    dead_s = (samples + 1) * interval_s

    def at_all(series: Series, begin_s: int, fires: int) -> dict[str, Any]:
        """The same after each 10 s of three minutes."""
        asked = [dead_pools(series, f"{interval_s}s", f"{begin_s + s}s", fires) for s in range(0, 180, 10)]
        return asked[0] | {"promql_expr_test": [test for one in asked for test in one["promql_expr_test"]]}

    cases = [
        at_all(pool_of(4, f"1x{samples} stale"), dead_s + 30, 1),
        at_all(pool_of(4, "_ 1x300"), 0, 0),  # they come up between the first two scrapes
        at_all(pool_of(4, "1x300"), 0, 0),
    ]
    check_fires(tmp_path, 0.9, cases, every="10s")


@needs_promtool
def test_without_any_miss_the_share_is_0_and_not_unknown(tmp_path: Path) -> None:
    series = slo_series(0.9, 0, 100, minutes=30)
    del series['diptych:slo_requests_total{job="d",objective="all",met="false"}']
    one = case(series, "30m")
    one["promql_expr_test"] = [
        {
            "expr": "diptych:slo_burn:rate5m",
            "eval_time": "30m",
            "exp_samples": [
                {"labels": 'diptych:slo_burn:rate5m{job="d", objective="all"}', "value": 0},
            ],
        }
    ]
    check_fires(tmp_path, 0.9, [one])


@needs_promtool
def test_every_other_alert_fires_for_its_cause_alone(tmp_path: Path) -> None:
    burning = {f"DiptychBurn{burn.name}" for burn in burn_alerts(0.9)}
    assert CAUSES.keys() == {one.name for one in alerts(0.9)} - burning
    check_fires(tmp_path, 0.9, [case(HEALTHY | CAUSES[name], "30m", **{name: 1}) for name in CAUSES])
    quiet = dict.fromkeys((*CAUSES, *burning), 0)
    check_fires(tmp_path, 0.9, [case(HEALTHY, "30m", **quiet)])


@needs_promtool
def test_other_programs_in_the_same_prometheus_alert_nobody(tmp_path: Path) -> None:
    theirs = {
        'up{job="node",instance="a"}': "0x30",
        'vllm:kv_cache_usage_perc{job="vllm",engine="0"}': "1x30",
    }
    lost = {
        'up{job="mine",instance="b"}': "1x10 0x20",
        'diptych:ready{job="mine",instance="b"}': "1x10 stale",
    }
    never_seen = {'up{job="diptych-2",instance="c"}': "0x30"}
    check_fires(
        tmp_path,
        0.9,
        [
            case(theirs, "30m", DiptychDown=0, DiptychPoolFull=0),
            case(theirs | lost | never_seen, "30m", DiptychDown=2),
        ],
    )


def test_a_target_keeps_all_its_digits() -> None:
    (other,) = [one for one in alerts(0.9999999) if one.name == "DiptychOtherTarget"]
    assert "- 0.9999999)" in other.expr and other.summary.endswith(" 0.9999999")


@needs_promtool
def test_a_broken_threshold_is_seen(tmp_path: Path) -> None:
    """The check itself can fail: with a threshold that is out of reach nothing fires."""
    with pytest.raises(AssertionError, match="DiptychBurnFast"):
        check_fires(tmp_path, 0.99, [case(share_missed(0.9, 1.0), "10m", DiptychBurnFast=1)])


@needs_promtool
def test_every_query_of_the_dashboards_parses(tmp_path: Path) -> None:
    exprs = [
        query.expr
        for board in list_dashboards()
        for row in board.rows
        for panel in row.panels
        for query in panel.queries
    ]
    rules = [
        {
            "record": f"q:{index}",
            "expr": select_job(expr).replace("$__rate_interval", "1m").replace("$__range", "1h"),
        }
        for index, expr in enumerate(exprs)
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", "rules.yml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_objectives_that_a_deployment_lacks_are_not_watched() -> None:
    chosen = [one.expr for one in alerts(0.9, ("tpot", "all")) if "Burn" in one.name]
    assert all('"tpot|all"' in expr and "ttft" not in expr for expr in chosen) and len(chosen) == 3
    assert OBJECTIVES == ("ttft", "tpot", "all")
