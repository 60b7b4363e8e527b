"""What each KV codec costs: perplexity, agreement and recall of the embedded model and its twin.

    python -m benchmarks.kv_quality [--json] [--plot FILE] [--parts perplexity recall eviction ...] [--only nuq4-1% tq4]

The model is that of transformers, in float32. Every key and value that attention reads, prompts and the token itself
included, has gone through `encode_rows` and `expand_page` of `kvcache/codecs/` (`engine/calibration/kv_quality.py`).
With `--through engine` it is the CPU engine with a pool of the codec, as it serves. Codecs with calibration are
calibrated here, on 16 sequences of 2,048 tokens of the training text. Text that is measured on was never seen, and is
cut into windows; each begins at position 0, whose KV is exact (sinks).

The twin computes the same function as the model to the last bit, but its keys and values have outliers, as those of
large models do (`models/twin.py`).

    bits              mean bits of a stored number, scales and outliers included
    bytes_per_token   in the pool and on the wire, over all layers
    ppl_delta_pct     by how many percent perplexity grows, with the 95 % interval over windows (bootstrap, pairs)
    agreement_pct     at how many percent of the places the most likely token is that of the model with exact KV
    nuq_over_tq       loss of nuq-1% / loss of tq at the same code bits; on the embedded model both take the same bytes
    prefill           the same loss of the second half of each window, once with all of it coded (`coded`, as Diptych
                      does) and once with the first half attending to exact keys and values (`exact`, as the paper does)
    calibration       nuq3-1% calibrated on less text of the same kind, and on prose (pages of `docs/`, which
                      change with every commit): processor seconds of all calibrated codecs, `ppl_delta_pct`, and
                      `over_own_pct`: the same against the usual calibration
    recall            percent of questions that are answered exactly, values of several tokens with the newline after
                      them (`models/recall.py`): first questions after a table, and later ones after earlier answers
    eviction          what heads keep, and what that costs (`benchmarks/kv_eviction.py`)

Rows in brackets are baselines and ablations (`benchmarks/kv_schemes.py`). `int4@` is `int4` with factors per channel.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM

import benchmarks.script_path  # noqa: F401
from benchmarks.kept_policies import measure_same
from benchmarks.kv_eviction import ANSWER_TOKENS, Surrogate, measure_eviction, print_eviction
from benchmarks.kv_schemes import HEAD_DIM, LAYERS, WIDTH, fit_sample_factors, fit_samples, list_schemes
from diptych.eviction_spec import FASTGEN, ZAP
from engine.calibration.keep_fit import fit_surrogate
from engine.calibration.kv_capture import capture_layers
from engine.calibration.kv_quality import (
    CodingScheme,
    Forward,
    build_scheme,
    coded_attention,
    compare_losses,
    complete_id,
    model_forward,
    score_windows,
)
from engine.model.checkpoint import Checkpoint
from engine.model.rope import rope_frequencies
from engine.model.tokenizer import ModelTokenizer, read_token_kinds
from kvcache.codecs.calibration import CALIBRATED_NAMES, Calibration
from kvcache.codecs.codec_id import CODE_BITS
from models.calibration import calibration_sequences, held_out_windows
from models.evaluate import HeldOutText
from models.recall import RecallSeries, recall_series
from models.tokenizer import END_OF_TEXT, load_tokenizer, token_id
from models.twin import make_twin
from tests.support.engine_model import EngineModel, save_folder

FOLDER = Path(__file__).parents[1] / "models" / "tiny"
CALIBRATION_SEQUENCES, CALIBRATION_TOKENS = 16, 2048
PARTS = ("perplexity", "prefill", "recall", "calibration", "eviction")
SIMULATION = "simulation"
EMBEDDED = "embedded"
# Codecs whose recall and prefill are measured.
COMPARED = ("int8", "nuq4-1%", "nuq3-1%", "nuq2-1%", "tq4", "tq3")
# Recall: distances in tokens, questions after each table, and kinds of values, all of several tokens.
DISTANCES = (256, 512, 1024)
QUESTIONS = 6
VALUE_KINDS = ("number", "pair")


def prose_sequences(count: int, tokens: int) -> list[torch.Tensor]:
    """Sequences of token ids of this repository's documents, `count` of [tokens]: no program text."""
    end, stream = token_id(load_tokenizer(FOLDER), END_OF_TEXT), list[int]()
    for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md")):
        stream += [end, *HeldOutText(FOLDER).encode(path.read_text())]
    assert len(stream) >= count * tokens, f"the documents have {len(stream)} tokens"
    return list(torch.tensor(stream[: count * tokens]).reshape(count, tokens))


def show_progress(text: str) -> None:
    """A line beside the output, since a run takes minutes."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with KV of one kind: its forward pass, and how it answers questions (first ones, later ones)."""

    forward: Forward
    count_answers: Callable[[RecallSeries], tuple[int, int]]


# Makes the model with KV as a scheme codes it; None: exact KV.
MakeSubject = Callable[[CodingScheme | None], AbstractContextManager[Subject]]


def simulated_subjects(model: Any) -> MakeSubject:
    """The model of transformers, with simulated quantisation."""

    @contextmanager
    def make(scheme: CodingScheme | None) -> Iterator[Subject]:
        forward = model_forward(model)
        with coded_attention(model, scheme) if scheme is not None else nullcontext():
            yield Subject(forward, partial(count_answers, forward))

    return make


def engine_subjects(model: Any, calibration: Calibration, folder: Path) -> MakeSubject:
    """The same model in the CPU engine, with real pages. Its weights are written to `folder`."""
    save_folder(model, FOLDER, folder)

    @contextmanager
    def make(scheme: CodingScheme | None) -> Iterator[Subject]:
        name = "raw" if scheme is None else scheme.name
        codec = "" if name == "raw" else str(complete_id(name, calibration))
        engine = EngineModel(folder, codec, calibration)
        yield Subject(engine.forward, engine.count_answers)

    return make


def measure_perplexity(
    make: MakeSubject, windows: Sequence[torch.Tensor], schemes: Sequence[CodingScheme]
) -> dict[str, Any]:
    """Growth of perplexity, and how often the most likely token is the same, of each scheme."""
    rows = dict[str, Any]()
    with make(None) as subject:
        exact = score_windows(subject.forward, windows)
    for scheme in schemes:
        with make(scheme) as subject:
            coded = score_windows(subject.forward, windows)
        delta, interval = compare_losses(coded.losses, exact.losses)
        rows[scheme.name] = {
            "bits": round(scheme.bits, 3),
            "bytes_per_token": round(2 * LAYERS * WIDTH * scheme.bits / 8, 1),
            "ppl_delta_pct": delta,
            "interval": interval,
            "agreement_pct": round(100 * float((coded.choices == exact.choices).mean()), 2),
        }
        show_progress(f"{scheme.name}: {rows[scheme.name]}")
    return {"perplexity": round(math.exp(exact.losses.mean()), 4), "codecs": rows} | loss_ratios(rows)


def measure_prefill(
    model: Any, windows: Sequence[torch.Tensor], schemes: Sequence[CodingScheme]
) -> dict[str, Any]:
    """Loss of the second half of each window, with the first half coded for itself or not."""
    half, rows, forward = len(windows[0]) // 2, dict[str, Any](), model_forward(model)
    exact = score_windows(forward, windows, half)
    for scheme in schemes:
        if scheme.name not in COMPARED:
            continue
        rows[scheme.name] = {}
        for way, exact_tokens in (("coded", 0), ("exact", half)):
            with coded_attention(model, scheme, exact_tokens):
                found = score_windows(forward, windows, half)
            delta, interval = compare_losses(found.losses, exact.losses)
            rows[scheme.name][way] = {"ppl_delta_pct": delta, "interval": interval}
        show_progress(f"{scheme.name}, prefill: {rows[scheme.name]}")
    return {"prefill": rows}


@torch.no_grad()
def count_answers(forward: Forward, series: RecallSeries) -> tuple[int, int]:
    """How many of the first question, and of the later ones, are answered exactly by greedy decoding.

    Greedy decoding gives an answer exactly when each token of it is the most likely one after those before it, and what
    attention reads does not depend on how the tokens were grouped into steps. So one forward pass decides.
    """
    choices = forward(torch.tensor(series.ids)).argmax(-1).tolist()
    right = [choices[start - 1 : stop - 1] == series.ids[start:stop] for start, stop in series.answers]
    return int(right[0]), sum(right[1:])


def measure_recall(make: MakeSubject, schemes: Sequence[CodingScheme], tables: int) -> dict[str, Any]:
    """Percent of right answers by distance, of the model with exact KV and of each scheme."""
    encode, rows = HeldOutText(FOLDER).encode, dict[str, Any]()
    series = {
        distance: list(recall_series(2, tables, encode, distance, QUESTIONS, VALUE_KINDS))
        for distance in DISTANCES
    }
    for scheme in (None, *schemes):
        if scheme is not None and scheme.name not in COMPARED:
            continue
        name = scheme.name if scheme is not None else "exact"
        rows[name] = {}
        with make(scheme) as subject:
            for distance, some in series.items():
                first, later = map(sum, zip(*map(subject.count_answers, some), strict=True))
                rows[name][str(distance)] = {
                    "questions": QUESTIONS * tables,
                    "right_pct": round(100 * (first + later) / (QUESTIONS * tables), 2),
                    "first_pct": round(100 * first / tables, 2),
                    "later_pct": round(100 * later / ((QUESTIONS - 1) * tables), 2),
                }
        show_progress(f"{name}, recall: {rows[name]}")
    return {"recall": rows}


def measure_calibration(model: Any, windows: Sequence[torch.Tensor]) -> dict[str, Any]:
    """What `nuq3-1%` loses by the text of its calibration, and the processor seconds of all calibrations."""
    few = CALIBRATION_TOKENS // 8
    texts = {
        f"own {CALIBRATION_TOKENS}": calibration_sequences(FOLDER, CALIBRATION_SEQUENCES, CALIBRATION_TOKENS),
        f"own {few}": calibration_sequences(FOLDER, CALIBRATION_SEQUENCES, few),
        f"prose {CALIBRATION_TOKENS}": prose_sequences(CALIBRATION_SEQUENCES, CALIBRATION_TOKENS),
    }
    forward, rows, own = model_forward(model), dict[str, Any](), None
    exact = score_windows(forward, windows)
    for name, sequences in texts.items():
        start = time.process_time()
        samples = capture_layers(model, sequences, range(LAYERS))
        full = fit_samples(samples, CALIBRATED_NAMES)
        full = replace(full, factors=fit_sample_factors(model, samples, sequences))
        cpu_s = time.process_time() - start
        with coded_attention(model, build_scheme(complete_id("nuq3-1%", full), full)):
            found = score_windows(forward, windows)
        own = own or found
        (delta, interval), (over, around) = (compare_losses(found.losses, to.losses) for to in (exact, own))
        rows[name] = {"cpu_s": round(cpu_s, 1), "ppl_delta_pct": delta, "interval": interval}
        rows[name] |= {"over_own_pct": over, "over_own_interval": around}
        show_progress(f"calibrated on {name}: {rows[name]}")
    return {"calibration": rows}


def measure_model(
    model: Any, windows: Sequence[torch.Tensor], given: argparse.Namespace, name: str
) -> dict[str, Any]:
    """The figures of one model."""
    show_progress("calibrating")
    sequences = calibration_sequences(FOLDER, CALIBRATION_SEQUENCES, CALIBRATION_TOKENS)
    samples = capture_layers(model, sequences, range(LAYERS))
    full = fit_samples(samples, CALIBRATED_NAMES)
    full = replace(full, factors=fit_sample_factors(model, samples, sequences))
    schemes = [
        scheme
        for scheme in list_schemes(full, samples)
        if (not given.only or scheme.name in given.only)
        and (given.through == SIMULATION or scheme.name in CODE_BITS)
    ]
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        make = (
            simulated_subjects(model)
            if given.through == SIMULATION
            else engine_subjects(model, full, Path(folder))
        )
        if "perplexity" in given.parts:
            figures |= measure_perplexity(make, windows, schemes)
        if "prefill" in given.parts and given.through == SIMULATION:
            figures |= measure_prefill(model, windows, schemes)
        if "recall" in given.parts:
            figures |= measure_recall(make, schemes, given.tables)
        if "calibration" in given.parts and given.through == SIMULATION:
            figures |= measure_calibration(model, windows)
    if "eviction" in given.parts:
        figures["eviction"] = measure_kept(model, full, given, name)
    return figures


def measure_kept(
    model: Any, calibration: Calibration, given: argparse.Namespace, name: str
) -> dict[str, Any]:
    """The part `eviction`: prompts of `--tokens` tokens, and tables at all distances."""
    held_out = HeldOutText(FOLDER)
    series = [
        one
        for distance in DISTANCES
        for one in recall_series(2, given.kept_tables, held_out.encode, distance, QUESTIONS, VALUE_KINDS)
    ]
    windows = held_out_windows(FOLDER, given.windows, given.tokens + ANSWER_TOKENS)
    kinds = read_token_kinds(ModelTokenizer.load(FOLDER), model.config.vocab_size)
    config = Checkpoint.resolve(str(FOLDER)).config
    frequencies = rope_frequencies(config.rope, config.head_dim).double().numpy()
    texts = calibration_sequences(FOLDER, CALIBRATION_SEQUENCES, CALIBRATION_TOKENS)
    weights = fit_surrogate(model, texts, calibration.model, frequencies)
    figures = measure_eviction(
        model, windows, series, calibration, kinds, held_out.stream, show_progress,
        Surrogate(weights, frequencies),
    )  # fmt: skip
    figures[ZAP]["r2"] = round(weights.r2, 4)
    if name == EMBEDDED:
        figures[FASTGEN]["same"] = measure_same(FOLDER, model, kinds, held_out.stream)
    return figures


def loss_ratios(rows: dict[str, Any]) -> dict[str, Any]:
    """`nuq_over_tq` at 4 and 3 bits, where both were measured."""
    pairs = {bits: (rows.get(f"nuq{bits}-1%"), rows.get(f"tq{bits}")) for bits in (4, 3)}
    return {
        f"nuq{bits}_over_tq{bits}": round(nuq["ppl_delta_pct"] / tq["ppl_delta_pct"], 3)
        for bits, (nuq, tq) in pairs.items()
        if nuq and tq and tq["ppl_delta_pct"]
    }


def print_table(figures: dict[str, Any]) -> None:
    for model, table in figures["models"].items():
        print(f"{model}: perplexity {table.get('perplexity', 'not measured')}")
        for name, row in table.get("codecs", {}).items():
            low, high = row["interval"]
            delta = f"{row['ppl_delta_pct']:+9.3f} %  ({low:+.3f} to {high:+.3f})"
            size = f"{row['bits']:6.2f} bits {row['bytes_per_token']:7.0f} bytes a token"
            print(f"  {name:28} {size} {delta}  agreement {row['agreement_pct']:.1f} %")
        for name, ways in table.get("prefill", {}).items():
            losses = ", ".join(f"{way} {row['ppl_delta_pct']:+.3f} %" for way, row in ways.items())
            print(f"  {name:28} second half, prefill {losses}")
        for name, row in table.get("calibration", {}).items():
            print(f"  nuq3-1% calibrated on {name}: {row['ppl_delta_pct']:+.3f} %, {row['cpu_s']} s")
        for name, cells in table.get("recall", {}).items():
            shown = ", ".join(f"{distance}: {row['right_pct']:.1f} %" for distance, row in cells.items())
            print(f"  {name:28} recall at {shown}")
        if "eviction" in table:
            print_eviction(table["eviction"])
        print("  " + ", ".join(f"{name} {table[name]}" for name in table if "_over_" in name))


def draw_plot(figures: dict[str, Any], path: Path) -> None:
    """Growth of perplexity against bytes per token, one panel per model. Codecs that lose nothing are left out."""
    models = figures["models"]
    figure, panels = plt.subplots(1, len(models), figsize=(6 * len(models), 4.5), squeeze=False)
    for panel, (model, table) in zip(panels[0], models.items(), strict=True):
        for name, row in table["codecs"].items():
            if row["ppl_delta_pct"] > 0 and name in CODE_BITS:
                panel.scatter(row["bytes_per_token"], row["ppl_delta_pct"])
                panel.annotate(name, (row["bytes_per_token"], row["ppl_delta_pct"]), fontsize=8)
        panel.set(xlabel="bytes per token", ylabel="growth of perplexity, %", title=model, yscale="log")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--windows", type=int, default=24, help="windows of held-out text")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--models", nargs="+", choices=(EMBEDDED, "twin"), default=[EMBEDDED, "twin"])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows to measure; default: all")
    parser.add_argument(
        "--through",
        choices=(SIMULATION, "engine"),
        default=SIMULATION,
        help="the model of transformers, or the CPU engine with real pages (codecs and recall alone)",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--tables", type=int, default=50, help=f"tables per cell, with {QUESTIONS} questions each"
    )
    parser.add_argument("--kept-tables", type=int, default=16, help="the same for the part `eviction`")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw perplexity against bytes per token")
    given = parser.parse_args()
    torch.set_num_threads(1)
    windows = held_out_windows(FOLDER, given.windows, given.tokens)
    figures: dict[str, Any] = {"windows": given.windows, "tokens": given.tokens, "models": {}}
    for name in given.models:
        model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        model.eval()
        if name == "twin":
            make_twin(model, HEAD_DIM)
        figures["models"][name] = measure_model(model, windows, given, name)
    if given.plot is not None and "perplexity" in given.parts:
        draw_plot(figures, given.plot)
    print(json.dumps(figures)) if given.json else print_table(figures)


if __name__ == "__main__":
    main()
