"""What `diptych calibrate` does, once its options are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from diptych.errors import ConfigError, ModelError
from engine.calibration.keep_fit import FIT_SEQUENCES, fit_surrogate
from engine.calibration.kv_calibration import MAX_SAMPLE_BYTES, calibrate_model
from engine.calibration.kv_quality import measure_quality
from engine.model.architecture import ModelConfig
from engine.model.calibration_file import identify_model
from engine.model.checkpoint import Checkpoint
from engine.model.memory_plan import FLOAT_BYTES, available_memory, format_bytes
from engine.model.rope import rope_frequencies
from engine.model.tokenizer import ModelTokenizer
from kvcache.codecs.calibration import FILE_NAME, CalibratedModel, Calibration, write_calibration
from kvcache.eviction.zap import KeepSurrogate, surrogate_path, write_surrogate
from services.bench.signals import interrupt_on_sigterm
from services.cli.calibrate.options import CalibrateOptions
from services.cli.calibrate.text import SplitText, split_text
from services.host.model_probe import EMBEDDED_MODEL, resolve_embedded
from services.host.output_paths import require_writable

DEFAULT_TOKENS = 2048
# Tokens of a window of held-out text, where the context has room for them.
WINDOW_TOKENS = 1024
DEVICES = ("auto", "cpu", "cuda")

Say = Callable[[str], None]


def run_calibration(options: CalibrateOptions) -> int:
    """Calibrate, measure, write. Returns the exit status. An interrupt leaves no file behind.

    Raises:
        ConfigError: an option does not fit the model or this machine, or the text is too short.
        ModelError: the model is not found, not supported or does not fit.
    """
    checkpoint = Checkpoint.resolve(resolve_embedded(options.model), options.revision)
    out = options.out or checkpoint.path / FILE_NAME
    for path in (out, surrogate_path(out)):
        _check_output(path, options.force)
    group, tokens = (
        choose_group(checkpoint.config, options.group),
        choose_tokens(checkpoint.config, options.tokens),
    )
    device = choose_device(options.device)
    _check_memory(checkpoint, device)
    text = _read_text(options, checkpoint, tokens)
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    with interrupt_on_sigterm():
        calibration, surrogate = _calibrate(checkpoint, text, group, device, say)
        _write_files(calibration, surrogate, out)
    if options.as_json:
        print(json.dumps(calibration_figures(calibration, surrogate) | {"file": str(out)}))
    else:
        _print_figures(Console(), calibration, out)
        _print_surrogate(Console(), surrogate, out)
    return 0


def _check_output(out: Path, force: bool) -> None:
    flag = "--out"
    if out.is_file() and not force:
        raise ConfigError(
            f"{out} is there already",
            "pages of one calibration are no use to another, so it is not replaced unasked",
            "--force replaces it, --out FILE writes another",
        )
    require_writable(out, flag)


def choose_group(config: ModelConfig, group: int | None) -> int:
    """Values that share a scale: what was asked for, or those of all KV heads.

    Raises:
        ConfigError: it is not a whole number of heads that divides the KV heads evenly.
    """
    fitting = [
        config.head_dim * heads for heads in range(1, config.kv_heads + 1) if config.kv_heads % heads == 0
    ]
    if group is not None and group not in fitting:
        raise ConfigError(
            f"--group {group} does not fit this model",
            f"groups are whole heads of {config.head_dim} values that divide {config.kv_heads} KV heads evenly",
            f"use one of {', '.join(map(str, fitting))}",
        )
    return group or fitting[-1]


def choose_tokens(config: ModelConfig, tokens: int | None) -> int:
    """Tokens of a sequence: what was asked for, or 2,048 as far as the model's context has room.

    Raises:
        ConfigError: the context is shorter.
    """
    if tokens is not None and tokens > config.context:
        raise ConfigError(
            f"--tokens {tokens} is more than the model's context", f"it has {config.context} tokens"
        )
    return tokens or min(DEFAULT_TOKENS, config.context)


def choose_device(device: str) -> torch.device:
    """The device to run the model on.

    Raises:
        ConfigError: it is not known, or not there.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device} is not known", f"use one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda cannot be used", "torch sees no GPU here", "use --device cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def _check_memory(checkpoint: Checkpoint, device: torch.device) -> None:
    """Weights in float32 and samples must fit; activations come on top and depend on the length of sequences."""
    weights, available = FLOAT_BYTES * checkpoint.config.parameters, available_memory()
    needed = MAX_SAMPLE_BYTES + (0 if device.type == "cuda" else weights)
    if device.type == "cuda" and weights > torch.cuda.mem_get_info()[0]:
        needed, available = weights, torch.cuda.mem_get_info()[0]
    if needed > available:
        raise ModelError(
            f"{checkpoint.name} is too large to be calibrated here",
            f"gradients need its weights in float32, {format_bytes(weights)}, and samples "
            f"{format_bytes(MAX_SAMPLE_BYTES)}; {format_bytes(available)} are free",
            "calibrate it on a larger machine, or use a codec that needs no calibration, for example tq4",
        )


def _write_files(calibration: Calibration, surrogate: KeepSurrogate, out: Path) -> None:
    """Write both files. Raises ConfigError if that is not possible."""
    try:
        write_calibration(calibration, out)
        write_surrogate(surrogate, surrogate_path(out))
    except OSError as error:
        fix = "choose another place with --out"
        raise ConfigError(f"{out} cannot be written", error.strerror or str(error), fix) from error


def _read_text(options: CalibrateOptions, checkpoint: Checkpoint, tokens: int) -> SplitText:
    windows = (options.windows, min(WINDOW_TOKENS, tokens)) if not options.no_quality else (0, 0)
    if options.text is not None:
        backend = ModelTokenizer.load(checkpoint.path).backend
        backend.no_truncation()

        def encode(text: str) -> list[int]:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            return ids

        return split_text(
            options.text, encode, list(backend.encode("").ids), (options.samples, tokens), windows
        )
    if checkpoint.path != Path(resolve_embedded(EMBEDDED_MODEL)).resolve():
        raise ConfigError(
            f"calibrating {options.model} needs a text",
            "the constants follow from what the model computes for text like what it will serve",
            f"--text FILE with some {(options.samples * tokens + windows[0] * windows[1]):,} tokens or more",
        )
    return _embedded_text(checkpoint.path, (options.samples, tokens), windows)


def _embedded_text(folder: Path, samples: tuple[int, int], windows: tuple[int, int]) -> SplitText:
    # Imported only here: only the embedded model brings its text.
    from models.calibration import calibration_sequences, held_out_windows

    try:
        sequences = calibration_sequences(folder, *samples)
        held_out = held_out_windows(folder, *windows) if windows[0] else []
    except ValueError as error:
        raise ConfigError(
            "there is too little text", str(error), "use fewer --samples or --tokens"
        ) from error
    return SplitText([one.tolist() for one in sequences], [one.tolist() for one in held_out])


def _calibrate(
    checkpoint: Checkpoint, text: SplitText, group: int, device: torch.device, say: Say
) -> tuple[Calibration, KeepSurrogate]:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=torch.float32, local_files_only=True
        )
    except Exception as error:  # the libraries raise errors of many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(
            f"{checkpoint.name} cannot be read", reason, "check the files of the model"
        ) from error
    model.eval().to(device)
    sequences, total = _to_tensors(text.sequences), checkpoint.config.layers

    def tell(layers: range, done: int) -> None:
        say(f"layers {layers.start + 1} to {layers.stop} of {total}: {done} of {len(sequences)} sequences")

    calibration = calibrate_model(model, sequences, identify_model(checkpoint), group, progress=tell)
    surrogate = _fit_surrogate(model, sequences, checkpoint, calibration.model, say)
    if not text.held_out:
        return calibration, surrogate
    quality = measure_quality(
        model, _to_tensors(text.held_out), calibration, lambda name: say(f"measuring {name}")
    )
    return replace(calibration, quality=quality), surrogate


def _fit_surrogate(
    model: Any,
    sequences: Sequence[torch.Tensor],
    checkpoint: Checkpoint,
    calibrated: CalibratedModel,
    say: Say,
) -> KeepSurrogate:
    """What evictions need: the model reads each sequence twice within its context."""
    config = checkpoint.config
    texts = [one[: config.context // 2] for one in sequences[:FIT_SEQUENCES]]
    frequencies = rope_frequencies(config.rope, config.head_dim).double().numpy()
    say(f"evictions: {len(texts)} sequences, read twice")
    return fit_surrogate(model, texts, calibrated, frequencies)


def _to_tensors(sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    return [torch.tensor(ids) for ids in sequences]


def calibration_figures(calibration: Calibration, surrogate: KeepSurrogate) -> dict[str, Any]:
    """What `--json` prints of a calibration."""
    quality = calibration.quality
    return {
        "digest": calibration.digest,
        "group": calibration.group,
        "tokens": calibration.tokens,
        "codecs": list(calibration.constants),
        "factors": list(calibration.factors),
        "factors_digest": calibration.factors_digest if calibration.factors else None,
        "quality": None if quality is None else msgspec.to_builtins(quality),
        "zap": {"digest": surrogate.digest, "tokens": surrogate.tokens, "r2": round(surrogate.r2, 4)},
    }


def _print_surrogate(console: Console, surrogate: KeepSurrogate, out: Path) -> None:
    console.print(
        f"evictions {surrogate.digest}, R² {surrogate.r2:.2f} on {surrogate.tokens} tokens,"
        f" written to {surrogate_path(out)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _print_figures(console: Console, calibration: Calibration, out: Path) -> None:
    if (quality := calibration.quality) is not None:
        grid = Table("codec", "bits", "perplexity", "95 % interval", box=None, padding=(0, 2, 0, 0))
        for name, row in quality.codecs.items():
            low, high = row.interval
            grid.add_row(name, f"{row.bits:.3f}", f"{row.ppl_delta_pct:+.2f} %", f"{low:+.2f} to {high:+.2f}")
        console.print(grid)
        console.print(
            f"perplexity {quality.perplexity} on {quality.windows} held-out windows of {quality.tokens} tokens",
            highlight=False,
        )
    if calibration.factors:
        console.print(
            f"factors for {', '.join(calibration.factors)}: {calibration.factors_digest}", highlight=False
        )
    console.print(
        f"calibration {calibration.digest}, groups of {calibration.group} values, written to {out}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
