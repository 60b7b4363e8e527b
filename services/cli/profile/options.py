"""The options of `diptych profile`, declared once: the command line is made from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.chunks import RAW_CLASS
from diptych.config.fields import option_field

MEASUREMENT, BULK = "Measurement", "Bulk work"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How `diptych profile` was called. `given` has the names of the fields whose flags were typed."""

    model: str = option_field("", "A folder or a hub id; default: the embedded model", flag="")
    out: Path = option_field(Path("profile.json"), "Write the profile here (JSON)", metavar="FILE")
    workload: str = option_field(
        "sharegpt", "Requests to measure with, as in `diptych bench`", MEASUREMENT, metavar="NAME|FILE"
    )
    shrink: float = option_field(1.0, "Divide the lengths of requests by this", MEASUREMENT, min=0.001)
    colocated: int = option_field(
        0, "Measure this many colocated workers, instead of one of each kind", MEASUREMENT, min=0
    )
    seconds: float = option_field(40.0, "Seconds of load, about", MEASUREMENT, min=1.0, max=86_400.0)
    depths: str = option_field(
        "1,2,4,8,16",
        "Requests open at a time; afterwards they come at 0.4, 0.6 and 0.8 of the best pace",
        MEASUREMENT,
        metavar="N,…",
    )
    device: str = option_field(
        "cpu", "Where workers compute, as in `diptych serve`: cpu or cuda", MEASUREMENT, metavar="NAME"
    )
    engine: str = option_field(
        "diptych",
        "What computes the model, as in `diptych serve`: diptych or vllm",
        MEASUREMENT,
        metavar="NAME",
    )
    vllm_python: Path | None = option_field(
        None, "Python interpreter that has vLLM, for --engine vllm", MEASUREMENT, metavar="FILE"
    )
    vllm_args: str = option_field(
        "", "Arguments of `vllm serve`, for --engine vllm", MEASUREMENT, metavar="'--FLAG …'"
    )
    kv_cache_codec: str = option_field(
        RAW_CLASS, "How workers store KV, as in `diptych serve`", MEASUREMENT, metavar="CODEC"
    )
    kv_cache_calibration: Path | None = option_field(
        None,
        "Calibration of the codec, as in `diptych serve`; default: the model's",
        MEASUREMENT,
        metavar="FILE",
        exists=True,
        dir_okay=False,
    )
    kv_keep: float = option_field(
        1.0, "Also measure requests that evict KV at this threshold", MEASUREMENT, metavar="SHARE"
    )
    seed: int = option_field(1, "Seed of the requests", MEASUREMENT)
    bulk: bool = option_field(
        False, "Measure what blocks of bulk work cost, and add it to --out; nothing is served", BULK
    )
    bulk_folder: Path | None = option_field(
        None, "Folder whose disk is measured; default: that of --out", BULK, metavar="FOLDER"
    )
    bulk_threads: int = option_field(1, "Threads that compute", BULK, min=1)
    as_json: bool = option_field(False, "Print the profile's figures as JSON", flag="--json")
    given: frozenset[str] = frozenset()
