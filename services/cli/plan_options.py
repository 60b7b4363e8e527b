"""The flags of `diptych plan`. What it does is in `services.cli.planning`, which is imported when it runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

HELP = """Which deployment keeps the promises best: how many instances, how parallel, whether to disaggregate at all.

\b
  diptych plan --model OPT-66B --device A100-80G --gpus 8 --workload sharegpt --slo-ttft-ms 2500 --slo-tpot-ms 150
  diptych plan --model Llama-3.1-70B --device H100 --nodes 2 --gpus-per-node 8 --rate 20 --workload requests.jsonl \\
      --slo-ttft-ms 500 --slo-tpot-ms 50 --explain --what-if ttft=0.3 --what-if gpus=-2 --out plan.json
"""

DEFAULT_WORKLOAD = "sharegpt"
HARDWARE, TRAFFIC, SEARCH, ANSWER = "Hardware", "Traffic and objectives", "Search", "Answer"


def plan(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="A built-in name, or a folder with a config.json")],
    device: Annotated[
        str | None,
        typer.Option(
            help="Such as H100; default: the profile's", rich_help_panel=HARDWARE, show_default=False
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices in all, on nodes of --gpus-per-node",
            rich_help_panel=HARDWARE,
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Instead of --gpus", rich_help_panel=HARDWARE, show_default=False),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, help="Default: as the device comes", rich_help_panel=HARDWARE, show_default=False
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE:NODESxGPUS", help="More, of another kind: H200:1x8", rich_help_panel=HARDWARE
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Between nodes, per instance: 25Gbps", rich_help_panel=HARDWARE, show_default=False
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Of `diptych profile`; default: built in", rich_help_panel=HARDWARE, show_default=False
        ),
    ] = None,
    profiled_only: Annotated[
        bool,
        typer.Option(
            "--profiled-only", help="No tensor parallelism that was not measured", rich_help_panel=HARDWARE
        ),
    ] = False,
    workload: Annotated[
        str | None,
        typer.Option(
            help=f"sharegpt, humaneval, longbench, or a trace's file; default: {DEFAULT_WORKLOAD}",
            rich_help_panel=TRAFFIC,
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TTFT_MS:TPOT_MS",
            help="Of a kind of --workload's trace, its promise; NAME=WORKLOAD:SHARE:TTFT_MS:TPOT_MS brings its own",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Draw from lognormals fitted to the trace, not from its requests",
            rich_help_panel=TRAFFIC,
        ),
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests/s to carry as cheaply as may be; without: the highest goodput",
            rich_help_panel=TRAFFIC,
            show_default=False,
        ),
    ] = None,
    cv: Annotated[
        float, typer.Option(min=0.0, help="Burstiness of arrivals; 1 is Poisson", rich_help_panel=TRAFFIC)
    ] = 1.0,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="Time to first token", rich_help_panel=TRAFFIC, show_default=False)
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="Time per further token", rich_help_panel=TRAFFIC, show_default=False)
    ] = None,
    attainment: Annotated[
        float, typer.Option(help="Share of requests that keep both", rich_help_panel=TRAFFIC)
    ] = 0.9,
    affinity: Annotated[
        str,
        typer.Option(
            help="KV moves anywhere (high), within nodes (low), or what is better (auto)",
            rich_help_panel=SEARCH,
        ),
    ] = "auto",
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="colocated, disaggregated or hybrid; default: all",
            rich_help_panel=SEARCH,
            show_default=False,
        ),
    ] = None,
    chunk_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Colocated instances cut prompts into slices of so many tokens; 0: whole prompts first",
            rich_help_panel=SEARCH,
        ),
    ] = 2048,
    verify: Annotated[
        bool,
        typer.Option(
            help="Let the product's scheduler and router have the last word, in virtual time",
            rich_help_panel=SEARCH,
        ),
    ] = True,
    seeds: Annotated[
        int, typer.Option(min=1, help="Samples that count together", rich_help_panel=SEARCH)
    ] = 2,
    horizon: Annotated[
        int,
        typer.Option(
            min=20,
            help="Requests of a run at least; the last runs have three times as many",
            rich_help_panel=SEARCH,
        ),
    ] = 600,
    span_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds of traffic of a run at least; 0: as short as --horizon",
            rich_help_panel=SEARCH,
        ),
    ] = 60.0,
    explain: Annotated[bool, typer.Option("--explain", help="Why this one", rich_help_panel=ANSWER)] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="ttft=0.3, tpot, gpus=-2, nodes, link=25Gbps, rate=x2, cv, attainment, device",
            rich_help_panel=ANSWER,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Plots, as PNG and JSON", rich_help_panel=ANSWER, show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All of it as JSON", rich_help_panel=ANSWER)
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the plan goes that `diptych serve --plan` reads",
            rich_help_panel=ANSWER,
            show_default=False,
        ),
    ] = None,
) -> None:
    raise typer.Exit(importlib.import_module("services.cli.planning").plan(ctx.params))
