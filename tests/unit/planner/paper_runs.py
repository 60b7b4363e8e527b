"""The paper's models, traffic and SLOs, and its simulator's fits."""

from __future__ import annotations

import csv
import functools
import json

from planner.types import Job, Parallelism
from planner.workload.workload import Workload
from tests.unit.planner.paper_data import distserve

SMALL, LARGE = "facebook/opt-13b", "facebook/opt-66b"
SEEDS = range(5)


@functools.cache
def fits(backend: str) -> dict[str, dict[str, object]]:
    file = distserve(f"profile_data/profiler-a100-80g.{backend}.json")
    found: dict[str, dict[str, object]] = json.loads(file.read_text())
    return found


@functools.cache
def lengths(name: str) -> Workload:
    """Of a CSV with prompt_len and output_len."""
    with distserve(name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return Workload.of([Job(0.0, int(row["prompt_len"]), int(row["output_len"])) for row in rows])


CHAT, CODING, LONG = (f"synth_lengths/{name}_like.csv" for name in ("sharegpt", "humaneval", "longbench"))
PAPER_SMALL = (Parallelism(2), Parallelism(1))
PAPER_LARGE = (Parallelism(4), Parallelism(2, 2))
