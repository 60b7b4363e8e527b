"""`diptych simulate` on the command line: its options are the fields of
`services.cli.simulate.options.SimulateOptions`.
"""

from __future__ import annotations

from services.cli.option_fields import options_command
from services.cli.simulate.options import SimulateOptions

HELP = """Requests through a deployment that is only numbers, in virtual time.

\b
  diptych simulate --model facebook/opt-13b --device A100-80G \\
      --placement "2P TP2 + 1D TP1" --workload sharegpt --rate 6 \\
      --slo-ttft-ms 250 --slo-tpot-ms 100
  diptych simulate --compat simdistserve --profile fits.json \\
      --backend distserve --model facebook/opt-13b --tp-prefill 2 --pp-prefill 1 \\
      --tp-decode 1 --pp-decode 1 --trace in.csv --out out.csv

Roles in a placement: P prefills, D decodes, C does both, B is a bulk worker; TP and PP are 1 unless said, and @DEVICE
names another device for a pool. --bulk is bulk work beside the requests, or that of bulk workers. The real scheduler,
router and hand-off decide, with the settings of `diptych serve`; --compat is the paper's own simulator instead.
"""


@options_command(SimulateOptions)
def simulate(options: SimulateOptions) -> int:
    """Runs `diptych simulate`, and returns its exit status. What the user reads is `HELP`."""
    # Imported only here, since the import is slow and `--help` does not need it.
    from services.cli.simulate.command import (
        run_simulate,
    )

    return run_simulate(options)
