"""What the command line knows of a model, and how it finds out: it asks `services.cli.look`, another process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec

from diptych.config import Config
from diptych.errors import ModelError
from services.cluster.environment import child_environ
from services.cluster.supervisor import Told

EMBEDDED = "tiny"  # the name of the model that comes with the project


class Question(msgspec.Struct, frozen=True):
    model: str
    revision: str | None
    max_model_len: int | None
    kv_bytes: int | None
    num_workers: int  # that share this machine's memory
    splits: dict[str, tuple[int, int]] = {}  # (tp, pp) by role
    swap_bytes: int = 0  # that each worker may take besides
    step_tokens: int = 512  # the most of a step
    step_rows: int = 64  # of these with logits


class Model(msgspec.Struct, frozen=True):
    """A model that was found and fits: where it is, and what was decided about it."""

    path: str
    told: str  # in a few words, for a person
    chats: bool  # it has a chat template
    max_model_len: int
    kv_bytes: int  # of each worker's pool
    layers: int = 0


class Answer(msgspec.Struct, frozen=True):
    model: Model | None = None
    error: Told | None = None


async def find(config: Config, num_workers: int) -> Model:
    """The model of these settings.

    Raises:
        ModelError: not found, not complete, not supported, cannot be split so, or does not fit (with the arithmetic).
    """
    question = Question(
        config.model,
        config.revision,
        config.max_model_len,
        config.kv_cache_memory_bytes,
        num_workers,
        {
            "prefill": (config.prefill_tp, config.prefill_pp),
            "decode": (config.decode_tp, config.decode_pp),
        },
        config.swap_space,
        config.max_num_batched_tokens,
        config.max_num_seqs,
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli.look",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=child_environ(1, os.environ), start_new_session=True,
    )  # fmt: skip
    try:
        out, err = await process.communicate(msgspec.json.encode(question))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    try:
        answer = msgspec.json.decode(out.strip().rsplit(b"\n", 1)[-1], type=Answer)
    except msgspec.MsgspecError:
        last = err.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ModelError(f"the model {config.model} cannot be read", *(line[:300] for line in last)) from None
    if answer.model is None:
        error = answer.error or Told(f"the model {config.model} cannot be read")
        raise ModelError(error.what, error.why, error.fix)
    return answer.model
