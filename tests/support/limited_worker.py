"""A worker that cannot continue what another one has begun, and says so: `python -m tests.support.limited_worker`.

Where an answer has begun, its sampler takes the tokens so far for a part of the prompt, and draws other noise: a
request with a grammar, a penalty or a seed that is continued here all the same gets other tokens.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from diptych.process import SupervisorPipe, configure_and_report, run_supervised
from engine.torch_import import import_torch

if __name__ == "__main__":
    configure_and_report()
    import_torch()

import msgspec

from diptych.messages import Hello
from diptych.specs import WorkerSpec
from engine.sampling.sampler import Sampler, SamplerRow
from services.worker import role_lifecycle
from services.worker.__main__ import main as run_real_worker

real_open, make_hello = Sampler.open, role_lifecycle.make_hello


def open_as_prompt(self: Sampler, seq: Any) -> SamplerRow:
    """`Sampler.open` of a sequence without output, whose prompt ends with that output."""
    if not seq.output:
        return real_open(self, seq)
    done, asked = len(seq.output), seq.sampling
    sampling = msgspec.structs.replace(asked, seed=asked.seed + 1, min_tokens=max(0, asked.min_tokens - done))
    return real_open(
        self, replace(seq, prompt=seq.prompt + seq.output, output=[], sampling=sampling, matcher=None)
    )


def make_limited_hello(*arguments: Any) -> Hello:
    """The introduction of a worker without traits."""
    return msgspec.structs.replace(make_hello(*arguments), traits=(), keep_classes=[])


def main(spec: WorkerSpec, supervisor: SupervisorPipe) -> int:
    """Run a worker as it is, but for its traits."""
    Sampler.open = open_as_prompt  # type: ignore[method-assign]
    role_lifecycle.make_hello = make_limited_hello  # type: ignore[assignment]
    return run_real_worker(spec, supervisor)


if __name__ == "__main__":
    sys.exit(run_supervised(main))
