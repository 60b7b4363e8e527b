"""The flags of `diptych simulate`. What it does is in `services.cli.simulate`, which is imported when it runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.config import Config
from diptych.settings import settings

USUAL = Config()  # what `diptych serve` does if it is told nothing else
LOCAL = next(one for one in settings(Config) if one.name == "local_prefill")

HELP = """Requests through a deployment that is only numbers, in virtual time.

\b
  diptych simulate --model facebook/opt-13b --device A100-80G \\
      --placement "2P TP2 + 1D TP1" --workload sharegpt --rate 6 \\
      --slo-ttft-ms 250 --slo-tpot-ms 100
  diptych simulate --compat simdistserve --profile fits.json \\
      --backend distserve --model facebook/opt-13b --tp-prefill 2 --pp-prefill 1 \\
      --tp-decode 1 --pp-decode 1 --trace in.csv --out out.csv

Roles in a placement: P reads prompts, D decodes, C does both; TP and PP are 1 unless said, and @DEVICE names another
device for a pool. The real scheduler, router and hand-off decide, with the settings of `diptych serve`; --compat is the
paper's own simulator instead.
"""


def _flag(*names: str, help: str, compat: bool = False, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="With --compat" if compat else None, **more)


Unset: dict[str, Any] = {"show_default": False}


def simulate(
    ctx: typer.Context,
    model: Annotated[str, _flag(help="A built-in name, or a folder with a config.json")],
    placement: Annotated[str | None, _flag(help='Such as "2P TP2 + 1D TP1", or "4C"', **Unset)] = None,
    device: Annotated[str, _flag(help="Such as H100; with --profile that one's own")] = "A100-80G",
    profile: Annotated[
        Path | None, _flag(help="What steps cost; else built in, or from data sheets", **Unset)
    ] = None,
    workload: Annotated[
        str | None, _flag(help="sharegpt, humaneval, longbench, or a trace to draw from", **Unset)
    ] = None,
    kind: Annotated[
        list[str] | None,
        _flag(
            metavar="NAME=TTFT_MS:TPOT_MS",
            help="Of a kind of the trace, its promise; NAME=WORKLOAD:SHARE:TTFT_MS:TPOT_MS brings its own",
        ),
    ] = None,
    trace: Annotated[Path | None, _flag(help="A trace to replay, request by request", **Unset)] = None,
    rate: Annotated[float | None, _flag(help="Requests a second; a trace has its own", **Unset)] = None,
    cv: Annotated[float, _flag(help="Of the gaps between arrivals: 1 is Poisson", min=0.0)] = 1.0,
    requests: Annotated[int, _flag(help="Of each seed", min=1)] = 2000,
    warmup: Annotated[int, _flag(help="The first of them, which do not count", min=0)] = 0,
    seeds: Annotated[int, _flag(help="Samples of the workload", min=1)] = 3,
    slo_ttft_ms: Annotated[float | None, _flag(help="Promised time to the first token", **Unset)] = None,
    slo_tpot_ms: Annotated[float | None, _flag(help="Promised time per further token", **Unset)] = None,
    link: Annotated[
        str | None,
        _flag(help="KV goes over this, per instance: 25Gbps; default: measured, or the device's", **Unset),
    ] = None,
    max_num_seqs: Annotated[
        int, _flag(help="Requests running at once per instance", min=1)
    ] = USUAL.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, _flag(help="Token budget of one step", min=1)
    ] = USUAL.max_num_batched_tokens,
    enable_chunked_prefill: Annotated[
        bool, _flag(help="Split long prompts over steps")
    ] = USUAL.enable_chunked_prefill,
    enable_prefix_caching: Annotated[
        bool, _flag(help="Keep and share prefixes that the trace names")
    ] = USUAL.enable_prefix_caching,
    local_prefill: Annotated[
        str, _flag(metavar=LOCAL.kind.metavar, help="Whether decode instances read prompts")
    ] = USUAL.local_prefill,
    tpot_budget_ms: Annotated[
        float | None,
        _flag(help="Of steps that read and write; default the least promise, as in serve", **Unset),
    ] = None,
    as_json: Annotated[bool, _flag("--json", help="The figures as JSON")] = False,
    out: Annotated[Path | None, _flag(help="CSV of every request (of the first seed)", **Unset)] = None,
    compat: Annotated[str | None, _flag(help="simdistserve", **Unset)] = None,
    backend: Annotated[str, _flag(help="distserve or vllm", compat=True)] = "distserve",
    tp_prefill: Annotated[int, _flag(help="Devices of a layer", compat=True, min=1)] = 1,
    pp_prefill: Annotated[int, _flag(help="Stages", compat=True, min=1)] = 1,
    tp_decode: Annotated[int, _flag(help="Not looked at by vllm", compat=True, min=0)] = 1,
    pp_decode: Annotated[int, _flag(help="Not looked at by vllm", compat=True, min=0)] = 1,
) -> None:
    given = {
        name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    raise typer.Exit(importlib.import_module("services.cli.simulate").simulate(ctx.params, given))
