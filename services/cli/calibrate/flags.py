"""`diptych calibrate`: what KV codecs need to know of a model, as a file beside it."""

from __future__ import annotations

from services.cli.calibrate.options import CalibrateOptions
from services.cli.option_fields import options_command

HELP = """Fit the KV codecs nuq*, factors for int* and tq*, and evictions to a model; measure what each codec costs.

\b
  diptych calibrate ./my-model --text sample.txt
  diptych calibrate Qwen/Qwen2.5-0.5B-Instruct --text chats.jsonl --out kvquant.safetensors
"""


@options_command(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> int:
    """Runs `diptych calibrate`, and returns its exit status. What the user reads is `HELP`."""
    # Imported only here, since the import is slow and `--help` does not need it.
    from services.cli.calibrate.command import run_calibration

    return run_calibration(options)
