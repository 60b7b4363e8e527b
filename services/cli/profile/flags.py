"""`diptych profile`: what this machine's workers cost, measured, as a file that the planner reads."""

from __future__ import annotations

from diptych.extras import require_extra
from services.cli.option_fields import options_command, refuse_flags
from services.cli.profile.options import ProfileOptions

HELP = """Measure this machine's workers for the planner: step costs, room for KV, and what a request costs beside.

\b
  diptych profile --out P.json                    the embedded model
  diptych profile ./my-model --out P.json --workload trace.jsonl --seconds 120
  diptych profile ./my-model --out P.json --bulk          what blocks of bulk work cost, for `diptych plan --bulk`
"""

BULK_FLAGS = {"bulk_folder", "bulk_threads"}
# What --bulk uses of the other flags.
SHARED_FLAGS = {"model", "out", "as_json", "bulk"}


@options_command(ProfileOptions)
def profile(options: ProfileOptions) -> int:
    """Runs `diptych profile`, and returns its exit status. What the user reads is `HELP`."""
    require_extra("plan", "diptych profile")
    # What runs is imported only here, since the imports are slow and `--help` does not need them.
    if options.bulk:
        unused, why = options.given - SHARED_FLAGS - BULK_FLAGS, "bulk work is measured without a load"
        refuse_flags(
            options, unused, " with --bulk", why, "leave it out, or measure twice with the same --out"
        )
        from services.cli.profile.offload import run_bulk_profile

        return run_bulk_profile(options)
    refuse_flags(options, options.given & BULK_FLAGS, "", "it is for bulk work", "add --bulk")
    from services.cli.profile.command import run_profile

    return run_profile(options)
