"""`diptych bench` on the command line: its options are the fields of `services.bench.options.BenchOptions`."""

from __future__ import annotations

from services.bench.options import BenchOptions
from services.cli.option_fields import options_command


@options_command(BenchOptions)
def bench(options: BenchOptions) -> int:
    """Measure a served model under load: requests come when they are due, whether others are answered or not.

    \b
      diptych bench --rate 4 --slo-ttft-ms 500 --slo-tpot-ms 50
      diptych bench --search --workload longbench --shrink 4 --slo-ttft-ms 500 --slo-tpot-ms 50
    """
    # Imported only here, since the import is slow and `--help` does not need it.
    from services.bench.command import run_bench

    return run_bench(options)
