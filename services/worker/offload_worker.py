"""Runs a worker process that only does bulk work: a block engine under the worker's loop, until it is drained."""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import ExitStack
from functools import partial

from diptych.channel.keys import load_worker_keys
from diptych.channel.link import ChannelLink
from diptych.messages import Hello
from diptych.process import EXIT_RETIRED, SupervisorPipe, exit_fatally, pin_to_core
from diptych.specs import WorkerSpec
from engine.offload.policy import format_policy
from services.worker.offload_role import OffloadRole
from worker.build_offload import OffloadParts, build_offload_engine
from worker.loop import LatestStats, WorkerLoop
from worker.watchdog import EngineWatchdog

# Of what a block has room for, the share that may wait at the worker beside it, so that places are taken at once.
EXTRA_SHARE = 0.25


def run_offload_worker(spec: WorkerSpec, supervisor: SupervisorPipe) -> int:
    """Build the block, and serve the lines of batches until drained. Returns the exit status.

    Raises:
        ConfigError: a cap is too small, and the error names the least; or a setting is wrong.
        ModelError: the model is not found, or not supported.
        StartError: the files of bulk work cannot be made.
    """
    parts = build_offload_engine(spec, supervisor)
    fatal, runner = partial(exit_fatally, supervisor), parts.runner
    latest = LatestStats(EngineWatchdog(fatal, spec.worker, progress=lambda: runner.progress))
    with ExitStack() as owned:
        owned.callback(runner.close)
        link = ChannelLink(
            spec.gateway, load_worker_keys(spec.keys_dir), make_offload_hello(spec, parts), latest.read_stats
        )
        layout = runner.layout
        loop = WorkerLoop(
            link,
            parts.engine,
            OffloadRole(parts.engine),
            parts.schedule,
            latest,
            codecs={layout.kv_class: layout.codec},
            drain_s=spec.drain_s,
        )
        ending: list[bool] = []

        def end(*_: object) -> None:
            ending.append(True)
            loop.start_drain()

        signal.signal(signal.SIGTERM, end)
        supervisor.report_progress("link", 0)
        loop.welcomed = partial(supervisor.report_progress, "ready")
        link.open()
        owned.callback(link.close)
        pin_to_core(spec.core)
        loop.run_until_drained()
    return 0 if ending else EXIT_RETIRED


def make_offload_hello(spec: WorkerSpec, parts: OffloadParts) -> Hello:
    """The `Hello` by which the gateway learns of the worker: a decode worker with the room of its block."""
    layout, policy = parts.runner.layout, parts.schedule.policy
    fingerprint, identity = parts.checkpoint.fingerprint(weight_kind=policy.weight_kind)
    num_slabs = int((1 + EXTRA_SHARE) * parts.schedule.num_chunks)
    return Hello(
        worker=spec.worker,
        role="decode",
        incarnation=uuid.uuid4().hex,
        fingerprint=fingerprint,
        identity=identity,
        host=spec.host,
        pid=os.getpid(),
        num_slabs=num_slabs,
        chunk_bytes=layout.chunk_bytes,
        max_model_len=parts.schedule.max_model_len,
        endpoints={},
        ended=spec.ended,
        kv_classes={layout.kv_class: (num_slabs, layout.chunk_bytes)},
        raw_chunk_bytes=parts.checkpoint.layout().chunk_bytes,
        log_file=spec.log_file,
        block_sequences=policy.sequences,
        block_tokens=policy.sequences * policy.prompt_tokens,
        block_policy=format_policy(policy),
    )
