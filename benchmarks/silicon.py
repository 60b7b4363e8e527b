"""How near the analytic cost model comes to published measurements on H100 and H200.

    python -m benchmarks.silicon [--json] [--rows FILE] [--fit]

`data/silicon.csv` holds 44 measurements of Llama-3.1-70B (FP8) behind vLLM and TensorRT-LLM, colocated, each with a
fixed number of clients: facts from InferenceMAX as collected by AIConfigurator (ai-dynamo/aiconfigurator @ 095f58a,
systems/silicon_sample.csv, Apache-2.0), all its rows with 4 or 64 clients, prompts of 1,024 or 8,192 tokens and answers
of 1,024, rounded to three digits. `--rows FILE` takes that whole file instead: all its dense, colocated rows with a
stated load on the two devices.

Nothing is fitted: costs are `planner.costs.roofline` with the shares of `planner.hardware`. A closed loop of clients is
played through continuous batching as those engines do it: prompts in pieces of up to 8,192 tokens beside all rows,
decided one step ahead, KV of the room that `planner.costs.capacity` gives, the newest row computed again
where it runs out. Lengths are uniform in 80 to 100 % of the nominal, 10 requests a client, all clients at
once at the beginning, as InferenceMAX does it; a request takes 10 ms to and from the engine, which is assumed.

    <device>_<engine>   rows; relative error of mean TTFT and mean TPOT: mean, median and largest, and the median with
                        its sign (bias)
    all                 the same over all rows
    disaggregated       published rows of Qwen3-32B name no load: how many TPOT lie between one row and a full batch,
                        how many TTFT above that of a lone prompt
    fitted              `--fit`: shares fitted on the H100 rows, errors on the H200 rows, which the fit has not seen
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from scipy.optimize import minimize

import benchmarks.script_path  # noqa: F401
from planner.costs.capacity import kv_capacity_tokens
from planner.costs.model import ModelDims, find_model
from planner.costs.roofline import roofline_cost
from planner.hardware import Efficiency, find_device
from planner.types import CostModel, Parallelism, StepBatch

ROWS = Path(__file__).resolve().parent / "data" / "silicon.csv"
BUDGET = 8192  # tokens of a step: the engines' setting in those runs
USE = 0.9  # of memory: likewise
GATE_S = 0.010  # from a client to the engine and back, an assumption: HTTP, tokens to text
DENSE = ("Llama-3.1", "Qwen3-32B")


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement. Bytes are of one number in weights and KV; lengths nominal, in tokens."""

    device: str
    engine: str
    model: str
    tp: int
    prompt: int
    output: int
    clients: int
    kv_bytes: float
    ttft_s: float
    tpot_s: float
    spread: float = 0.8  # shortest length / nominal

    @property
    def shape(self) -> ModelDims:
        return replace(find_model(self.model), kv_bytes=self.kv_bytes)


# Qwen3-32B FP8 on H100, prompts of 4,000 tokens, answers of 1,000: (engine, decode tp, decode batch, TTFT s, TPOT ms).
# Same source. Prefill workers are TP1. The number of clients is not published.
DISAGGREGATED = (
    ("sglang", 1, 48, 0.567, 22.3),
    ("sglang", 4, 256, 9.11, 112.0),
    ("sglang", 8, 424, 16.1, 113.0),
    ("sglang", 2, 128, 8.50, 560.0),
    ("vllm", 4, 224, 0.368, 8.75),
)


@dataclass(slots=True)
class Asked:
    """A request in the loop: `need` prompt tokens of which `done` are computed, `left` of `output` tokens to write."""

    at_s: float
    need: int
    output: int
    left: int
    done: int = 0
    first_s: float = -1.0


class Loop:
    """Clients that each ask again as soon as they are answered, before one engine; `play` gives mean TTFT and TPOT."""

    def __init__(
        self, cost: CostModel, room: int, lengths: Sequence[tuple[int, int]], clients: int, gate_s: float
    ) -> None:
        self.cost, self.room, self.gate_s = cost, room, gate_s
        self.todo = list(reversed(lengths))
        self.now_s = self.begun_s = 0.0
        self.waiting: list[Asked] = []
        self.prefilling: list[Asked] = []
        self.decoding: list[Asked] = []
        self.ttft_s: list[float] = []
        self.tpot_s: list[float] = []
        for _ in range(clients):
            self._ask()

    def play(self) -> tuple[float, float]:
        """Until all are answered: mean seconds to the first token, and per further token."""
        while self.waiting or self.prefilling or self.decoding:
            self._admit(self.begun_s)  # what came before the step now ending began
            self.begun_s = self.now_s
            if not self.prefilling and not self.decoding:
                self.now_s = self.begun_s = max(self.now_s, self.waiting[0].at_s + self.gate_s)
                self._admit(self.now_s)
            self._evict()
            if self.prefilling:
                self._mixed()
            else:
                self._write()
        return fmean(self.ttft_s), fmean(self.tpot_s)

    def _ask(self) -> None:
        if self.todo:
            prompt, output = self.todo.pop()
            self.waiting.append(Asked(self.now_s, prompt, output, output))

    @property
    def _context(self) -> int:
        return sum(one.done for one in self.decoding)

    def _admit(self, by_s: float) -> None:
        used = self._context + sum(one.need for one in self.prefilling)
        while self.waiting and self.waiting[0].at_s + self.gate_s <= by_s:
            if used + self.waiting[0].need > self.room and used:
                return
            used += self.waiting[0].need
            self.prefilling.append(self.waiting.pop(0))

    def _evict(self) -> None:
        """The newest rows go back to the head of the queue until the next token of each has room."""
        held = sum(one.need for one in self.prefilling)
        while len(self.decoding) > 1 and self._context + len(self.decoding) + held > self.room:
            last = self.decoding.pop()
            last.need, last.done = last.done, 0
            self.waiting.insert(0, last)

    def _mixed(self) -> None:
        left, tokens, squares = BUDGET - len(self.decoding), 0, 0.0
        for one in self.prefilling:
            take = min(left, one.need - one.done)
            squares += (one.done + take) ** 2 - one.done**2
            one.done += take
            tokens, left = tokens + take, left - take
        batch = StepBatch(tokens, squares, len(self.decoding), self._context)
        self.now_s += self.cost.step_s(batch)
        self._wrote(1)
        for one in [one for one in self.prefilling if one.done == one.need]:
            self.prefilling.remove(one)
            self.decoding.append(one)
            if one.first_s < 0:
                one.first_s, one.left = self.now_s, one.left - 1
                self.ttft_s.append(self.now_s - one.at_s)

    def _write(self) -> None:
        """As many steps of rows alone as change nothing: to the next end, arrival or shortage of room."""
        rows, context = len(self.decoding), self._context
        steps = min(min(one.left for one in self.decoding), max(1, (self.room - context) // rows))
        if self.waiting:
            due_s = self.waiting[0].at_s + self.gate_s - self.now_s
            if due_s > 0:
                steps = min(steps, math.ceil(due_s / self.cost.step_s(StepBatch(0, 0.0, rows, context))))
            elif context + self.waiting[0].need <= self.room:
                steps = 1
        each_s = self.cost.step_s(StepBatch(0, 0.0, rows, context + rows * (steps - 1) // 2))
        self.now_s += steps * each_s
        self.begun_s = self.now_s - each_s
        self._wrote(steps)

    def _wrote(self, steps: int) -> None:
        for one in self.decoding:
            one.done, one.left = one.done + steps, one.left - steps
        for one in [one for one in self.decoding if one.left <= 0]:
            self.decoding.remove(one)
            self.tpot_s.append((self.now_s - one.first_s) / max(1, one.output - 1))
            self._ask()


def predict(row: Row, gets: Efficiency | None = None, seed: int = 0) -> tuple[float, float]:
    """Mean TTFT and TPOT of a row in seconds, from data sheets (or with other shares of them)."""
    draw = random.Random(seed)
    lengths = [
        (
            draw.randint(int(row.prompt * row.spread), row.prompt),
            draw.randint(int(row.output * row.spread), row.output),
        )
        for _ in range(10 * row.clients)
    ]
    on, split = find_device(row.device), Parallelism(row.tp)
    cost = roofline_cost(row.shape, split, replace(on, gets=gets) if gets else on)
    room = kv_capacity_tokens(row.shape, split, on.memory_bytes, use=USE)
    return Loop(cost, room, lengths, row.clients, GATE_S).play()


def read(path: Path) -> list[Row]:
    """Rows of our file, or of AIConfigurator's: its dense, colocated ones on H100 and H200 with a stated load."""
    with path.open(newline="") as file:
        raw = list(csv.DictReader(file))
    if raw and "silicon_ttft_ms" in raw[0]:
        return [_foreign(one) for one in raw if _usable(one)]
    return [
        Row(
            one["device"], one["engine"], one["model"], int(one["tp"]), int(one["prompt"]), int(one["output"]),
            int(one["clients"]), float(one["kv_bytes"]), float(one["ttft_s"]), float(one["tpot_ms"]) / 1e3,
        )
        for one in raw
    ]  # fmt: skip


def _usable(one: Mapping[str, str]) -> bool:
    source, model = one["silicon_data_source"], one["model_path"]
    if (
        one["system"] not in ("h100_sxm", "h200_sxm")
        or one["mode"] != "agg"
        or "silicon_concurrency=" not in source
    ):
        return False
    return any(name in model for name in DENSE) and one["pp_size"] == "1"


def _foreign(one: Mapping[str, str]) -> Row:
    eight = "fp8" in one["gemm_quant_mode"]
    name = one["model_path"].rsplit("/", 1)[-1].removesuffix("-FP8") + ("-FP8" if eight else "")
    source = one["silicon_data_source"]
    inferencemax = not source.startswith("source_file=/")
    # NVIDIA's FP8 checkpoint asks for an 8-bit cache, which TensorRT-LLM takes and vLLM then did not.
    narrow = eight and inferencemax and one["backend"] == "trtllm"
    return Row(
        one["system"][:4], one["backend"], name, int(one["tp_size"]), int(one["isl"]), int(one["osl"]),
        int(source.split("silicon_concurrency=")[1].split(";")[0]), 1.0 if narrow else 2.0,
        float(one["silicon_ttft_ms"]) / 1e3, float(one["silicon_tpot_ms"]) / 1e3, 0.8 if inferencemax else 1.0,
    )  # fmt: skip


def errors(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Relative errors of (predicted, measured): mean, median and largest size, and the median with its sign."""
    off = [predicted / measured - 1 for predicted, measured in pairs]
    size = [abs(one) for one in off]
    found = {"mean": fmean(size), "median": median(size), "largest": max(size), "bias": median(off)}
    return {name: round(value, 3) for name, value in found.items()}


def compare(rows: Iterable[Row], gets: Efficiency | None = None) -> dict[str, object]:
    """By device, model and engine, and over all: how many rows, errors of TTFT and of TPOT."""
    rows = list(rows)
    models = {row.model for row in rows}
    found: dict[str, list[tuple[Row, tuple[float, float]]]] = {}
    for row in rows:
        name = f"{row.device}_{row.engine}" + (f"_{row.model}" if len(models) > 1 else "")
        pair = (row, predict(row, gets))
        found.setdefault(name, []).append(pair)
        found.setdefault("all", []).append(pair)
    return {
        name: {
            "rows": len(part),
            "ttft": errors([(times[0], row.ttft_s) for row, times in part]),
            "tpot": errors([(times[1], row.tpot_s) for row, times in part]),
        }
        for name, part in sorted(found.items())
    }


def bracket() -> dict[str, object]:
    """Disaggregated rows without a stated load: what is measured must lie between an idle and a full deployment."""
    shape, on = find_model("Qwen3-32B-FP8"), find_device("h100")
    lone_s = roofline_cost(shape, Parallelism(), on).step_s(StepBatch(4000, 4000.0**2))
    tpot = ttft = 0
    shown = []
    for engine, tp, batch, ttft_s, tpot_ms in DISAGGREGATED:
        cost = roofline_cost(shape, Parallelism(tp), on)
        low, high = (1e3 * cost.step_s(StepBatch(rows=rows, context=rows * 4500)) for rows in (1, batch))
        tpot += low <= tpot_ms <= high
        ttft += ttft_s >= lone_s
        shown.append(
            {
                "engine": engine,
                "tp": tp,
                "tpot_ms": tpot_ms,
                "idle_ms": round(low, 2),
                "full_ms": round(high, 2),
            }
        )
    return {
        "rows": len(shown),
        "tpot_inside": tpot,
        "ttft_above_lone": ttft,
        "lone_ttft_s": round(lone_s, 3),
        "each": shown,
    }


def fit(rows: Sequence[Row]) -> Efficiency:
    """Shares and constants that bring the mean size of log(predicted / measured) of `rows` to a minimum."""
    first = find_device("h100").gets
    names = ("flops", "bytes", "layer_s", "step_s", "reduce_s")

    def made(logs: Iterable[float]) -> Efficiency:
        values = {name: getattr(first, name) * math.exp(log) for name, log in zip(names, logs, strict=True)}
        return replace(first, **values | {name: min(0.95, values[name]) for name in ("flops", "bytes")})

    def wrong(logs: Iterable[float]) -> float:
        pairs = [(predict(row, made(logs)), row) for row in rows]
        return fmean(
            abs(math.log(times[0] / row.ttft_s)) + abs(math.log(times[1] / row.tpot_s))
            for times, row in pairs
        )

    return made(minimize(wrong, [0.0] * len(names), method="Nelder-Mead", options={"maxfev": 120}).x)


def figures(rows: Sequence[Row], fitting: bool) -> dict[str, object]:
    """All figures of this benchmark."""
    found = compare(rows) | {"disaggregated": bracket()}
    if fitting:
        gets = fit([row for row in rows if row.device == "h100"])
        shares = {
            name: float(f"{getattr(gets, name):.3g}")
            for name in ("flops", "bytes", "layer_s", "step_s", "reduce_s")
        }
        found["fitted"] = compare([row for row in rows if row.device == "h200"], gets) | {"shares": shares}
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rows", type=Path, default=ROWS, help="other measurements, as CSV")
    parser.add_argument("--fit", action="store_true", help="also fit on H100 and predict H200")
    arguments = parser.parse_args()
    found = figures(read(arguments.rows), arguments.fit)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<16} {json.dumps(value)}")


if __name__ == "__main__":
    main()
