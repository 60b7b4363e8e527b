"""`diptych bench` on the command line: its options are the fields of `services.bench.options.Options`."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from services.bench.options import Options


def bench(**given: Any) -> None:
    """Measure a served model under load: requests come when they are due, whether others are answered or not.

    \b
      diptych bench --rate 4 --slo-ttft-ms 500 --slo-tpot-ms 50
      diptych bench --search --workload longbench --shrink 4 --slo-ttft-ms 500 --slo-tpot-ms 50
    """
    options = Options(**given)
    raise typer.Exit(importlib.import_module("services.bench.command").bench(options))


def _parameters() -> list[inspect.Parameter]:
    kinds = get_type_hints(Options)
    made = []
    for one in fields(Options):
        more = dict(one.metadata)
        flag = more.pop("flag")
        info = typer.Option(flag, show_default=one.default not in (None, "", False), **more)
        of: Any = kinds[one.name]
        kind = Annotated[of, info]
        made.append(
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kind)
        )
    return made


bench.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
bench.__annotations__ = {one.name: one.annotation for one in _parameters()}
