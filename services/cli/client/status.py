"""`diptych status`: what a gateway says of itself. Starts fast, so that scripts can ask often."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from services.cli.client.gateway_http import get_route

# Columns of the table of workers: the title, and the key in /status.
COLUMNS = {
    "worker": "worker",
    "role": "role",
    "state": "state",
    "running": "running",
    "waiting": "waiting",
    "KV used": "slabs_used",
    "KV cached": "slabs_cached",
    "KV slabs": "slabs_total",
    "leases": "leases",
}
HITS_TITLE, CLASS_TITLE = "prefix hits", "KV class"
MIB = 1 << 20
GREEN, RED, PLAIN = "\033[32m", "\033[31m", "\033[0m"


@dataclass(frozen=True, slots=True)
class GatewayState:
    """What `/status` says, as far as it is shown."""

    ready: bool
    # Why the deployment is not ready, or what is missing.
    reasons: list[str]
    workers: list[dict[str, Any]]
    links: list[str]
    body: dict[str, Any]


def parse_state(status: dict[str, Any]) -> GatewayState:
    """Read the body of `GET /status`."""
    links = [
        f"{one['source']} → {one['target']} {one['transport']} {one['gb_per_s']:.1f} GB/s {one['latency_us']:.0f} µs"
        + _format_classes(one.get("kv_classes", {}))
        for one in status.get("links", [])
        if one.get("transport")
    ]
    return GatewayState(
        bool(status.get("ready")),
        list(status.get("reasons", [])),
        list(status.get("workers", [])),
        links,
        status,
    )


def _format_classes(proven: dict[str, bool]) -> str:
    """The KV classes of a link, if there are several: which are proven, and which are not."""
    names = [name if state else f"{name} (not proven)" for name, state in proven.items()]
    return "  " + ", ".join(names) if len(names) > 1 else ""


def print_status(url: str, key: str | None, as_json: bool) -> int:
    """Print what the gateway says of itself; exit status 1 when it is not ready.

    Raises:
        StartError: nothing answers there, or it refuses.
    """
    now = parse_state(json.loads(get_route(url, key, "/status")))
    if as_json:
        print(json.dumps(now.body, indent=2))
    else:
        show_state(now)
    return 0 if now.ready else 1


def _prefix_hit_rate(stats: dict[str, Any]) -> str:
    """The part of the prompt tokens looked up in the prefix cache that was found there; empty before any was."""
    asked, found = stats.get("prefix_queries", 0), stats.get("prefix_hits", 0)
    return f"{found / asked:.0%}" if asked else ""


def show_state(now: GatewayState) -> None:
    """Print a state for a person."""
    colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    color, plain = (GREEN if now.ready else RED, PLAIN) if colored else ("", "")
    print(f"{color}{'ready' if now.ready else 'not ready'}{plain}")
    for reason in now.reasons:
        print(f"  {reason}")
    rows = []
    for one in now.workers:
        flat, classes = one | one.get("stats", {}), one.get("kv_classes", {})
        cells = [str(flat.get(key, "")) for key in COLUMNS.values()]
        rows.append([*cells, _prefix_hit_rate(flat), "" if len(classes) > 1 else "".join(classes)])
        if len(classes) > 1:
            rows += [_class_row(name, use) for name, use in classes.items()]
    for line in format_table([*COLUMNS, HITS_TITLE, CLASS_TITLE], rows):
        print(line)
    for one in now.workers:
        for line in (_format_buffer(one), *_format_tiers(one)):
            if line:
                print(line)
        if one.get("log_file"):
            print(f"{one['worker']} on {one['host']}, log {one['log_file']}")
    for link in now.links:
        print(link)
    for line in format_auto(now.body.get("kv_auto", {})):
        print(line)
    if eviction := _format_eviction(now.body.get("kv_keep", {})):
        print(eviction)
    for line in format_bulk_plan(now.body.get("bulk_plan")):
        print(line)
    for line in format_batches(now.body.get("batches", {})):
        print(line)


def _format_buffer(worker: dict[str, Any]) -> str:
    """The device of a worker that has one, and its transfer buffer; empty for a worker on the CPU."""
    stats = worker.get("stats", {})
    if not stats.get("buffer_slabs"):
        return ""
    return (
        f"{worker['worker']} on {worker['device']}: of {stats['buffer_slabs']} slabs of the transfer buffer"
        f" {stats['buffer_used']} are used, {stats['buffer_leased']} of them leased;"
        f" {stats['buffer_cached']} are cached"
    )


def _format_tiers(worker: dict[str, Any]) -> list[str]:
    """Lines about the tiers below the pool of a worker; none without tiers."""
    return [
        f"{worker['worker']}: {name} tier {one['used_bytes'] >> 20} of {one['capacity_bytes'] >> 20} MiB, "
        f"{one['stored_chunks']} chunks stored and {one['restored_chunks']} read back"
        + (", paused" if one["paused"] else "")
        for name, one in worker.get("stats", {}).get("tiers", {}).items()
    ]


BULK_SOURCES = {
    "profile": "the programme's choice for the rates in",
    "setting": "as asked for",
    "fit": "the largest block that fits; it is not predicted without --bulk-profile",
}


def format_bulk_plan(plan: dict[str, Any] | None) -> list[str]:
    """Lines about the policy of bulk workers: which is in force, why, and what it is predicted to bring."""
    if not plan:
        return []
    source = BULK_SOURCES.get(plan["source"], plan["source"])
    named = f" {plan['profile']}" if plan["source"] == "profile" else ""
    if plan["source"] == "fit" and plan["profile"]:
        source = f"the largest block that fits; with the rates in {plan['profile']} none is predicted to fit"
    lines = [f"bulk policy: {source}{named}"]
    for policy in sorted(set(plan["in_force"].values())):
        workers = ", ".join(name for name, one in plan["in_force"].items() if one == policy)
        smaller = plan["source"] == "profile" and policy != plan["policy"]
        note = " (planned a little larger than what fits)" if smaller else ""
        lines.append(f"  {workers}: {policy}{note}")
    if plan["tokens_per_s"] is not None:
        memory, disk = (f"{plan[name] / MIB:,.0f} MiB" for name in ("memory_bytes", "disk_bytes"))
        lines.append(
            f"  predicted: {plan['tokens_per_s']:.3g} tokens/s per worker; a decode step waits for: "
            f"{plan['waits_for']}; {memory} of memory, {disk} on disk"
        )
    return lines


def format_auto(auto: dict[str, Any]) -> list[str]:
    """Lines about the KV class that the router chooses: within which budget, and where it is the lighter one now."""
    if len(auto.get("classes", ())) < 2:
        return []
    lines = [f"KV class auto: {', '.join(auto['classes'])}, within {auto['budget_pct']:g} %"]
    for one in auto["lighter"]:
        pair = " → ".join(name for name in (one["source"], one["target"]) if name)
        lines.append(
            f"  {pair}: the lighter class for {one['since_s']:.0f} s, since the {one['reason']} binds"
        )
    return lines if auto["lighter"] else [f"{lines[0]}; the better class on all pairs"]


def _format_eviction(keep: dict[str, Any]) -> str:
    """What is evicted by default, and where it is possible; empty where it is not."""
    classes = ", ".join(keep.get("classes", []))
    threshold = keep.get("threshold", 1)
    default = f"--kv-keep {threshold}" if threshold < 1 else "none unless requests ask for 'keep'"
    measured = "".join(
        f"; {one['kv_class']} at {one['threshold']} by {one['rule'].partition('@')[0]} keeps {one['kept_share']:.0%}"
        for one in keep.get("measured", ())
    )
    return f"eviction: {default}; possible for KV of {classes}{measured}" if classes else ""


def format_batches(batches: dict[str, Any]) -> list[str]:
    """Lines about batches: how many have not ended, their lines, and why none runs, if that is so."""
    if not batches.get("enabled"):
        return [f"files and batches are off: {batches['off']}"] if batches.get("off") else []
    lines, ended = batches["lines"], ("failed", "completed", "expired", "cancelled")
    counts = {name: count for name, count in batches["by_status"].items() if count and name not in ended}
    shown = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    done = f"{lines['completed']} completed, {lines['failed']} failed"
    rows = [
        f"batches: {shown or 'none open'}; lines: {lines['waiting']} waiting, {lines['running']} running, {done}"
    ]
    if batches["stopped"]:
        rows.append(f"  no line is started: {batches['stopped']}")
    elif batches["line_share"] < 1 and counts:
        rows.append(
            f"  requests miss their SLOs: {100 * batches['line_share']:.0f} % of the lines may run at once"
        )
    return rows


def _class_row(name: str, use: dict[str, Any]) -> list[str]:
    """A row under that of its worker: the slabs of one of several KV classes."""
    shown = {"slabs_used": "used", "slabs_cached": "cached", "slabs_total": "slabs"}
    return [*[str(use.get(shown.get(key, ""), "")) for key in COLUMNS.values()], "", name]


def format_table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their widest word; titles of two words take two lines."""
    words = [title.split() for title in titles]
    height = max(map(len, words))
    heads = [[one[line] if line < len(one) else "" for one in words] for line in range(height)]
    widths = [max(map(len, column)) for column in zip(*heads, *rows, strict=True)]
    return [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [*heads, *rows]
    ]
