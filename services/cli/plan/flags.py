"""`diptych plan` on the command line: its options are the fields of `services.cli.plan.options.PlanOptions`."""

from __future__ import annotations

from diptych.extras import require_extra
from services.cli.option_fields import options_command, refuse_flags
from services.cli.plan.options import PlanOptions

HELP = """Find the deployment with the highest goodput within the SLOs: how many instances, how parallel, which kind.

\b
  diptych plan --model OPT-66B --device A100-80G --gpus 8 --workload sharegpt --slo-ttft-ms 2500 --slo-tpot-ms 150
  diptych plan --model Llama-3.1-70B --device H100 --nodes 2 --gpus-per-node 8 --rate 20 --workload requests.jsonl \\
      --slo-ttft-ms 500 --slo-tpot-ms 50 --explain --what-if ttft=0.3 --what-if gpus=-2 --out plan.json
"""


@options_command(PlanOptions)
def plan(options: PlanOptions) -> int:
    """Runs `diptych plan`, and returns its exit status. What the user reads is `HELP`."""
    # Imported only here, since the import is slow and `--help` does not need it.
    from services.cli.plan.command import run_plan

    if options.bulk is not None:
        require_extra("plan", "--bulk")
        from services.cli.plan.offload import run_bulk_plan

        return run_bulk_plan(options)
    unused = {name for name in options.given if name.startswith("bulk_")}
    refuse_flags(options, unused, "", "it is for bulk work", "add --bulk 512:64, or leave it out")
    return run_plan(options)
