"""What both engines (`engine.loop`, `engine.offload.engine`) report of a sequence: tokens, its end, or its failure."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.eviction_report import KeptReport
from diptych.messages import Failed, Logprob, Output
from engine.protocols import Logits, SampledToken, SamplingState, StepSampler
from engine.sequence import Sequence
from engine.sequence_table import first_output_seconds
from engine.step_work import StepWork


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The message about one sequence after a step; `held` is the sequence if it leaves with its slabs."""

    message: Output | Failed
    held: Sequence | None = None


@dataclass(slots=True)
class LiveSequence:
    """A sequence that has started, and its sampling state. It stays so while it is preempted."""

    seq: Sequence
    sampling: SamplingState
    # Log-probabilities of the prompt's tokens so far; None if the request did not ask for them.
    logprobs: list[Logprob | None] | None
    # Failed steps of the offload engine that it was in.
    failures: int = 0
    # Of a prompt that is pooled: the sum of the hidden states so far, or its logits; None: there are none yet.
    pooled_row: Logits | None = None
    # What was pooled, when the prompt is complete.
    pooled: bytes = b""


def open_live(seq: Sequence, sampler: StepSampler) -> LiveSequence:
    """Start a sequence with a sampling state of its own. Raises GrammarError as `StepSampler.open`."""
    return LiveSequence(seq, sampler.open(seq), [None] if seq.scores_prompt else None)


def score_prompt(live: LiveSequence, start: int, count: int, logits: Logits, sampler: StepSampler) -> None:
    """Score a part of a prompt that asks for it, by the `logits` of `count` tokens from position `start` on.

    Row i predicts the token behind it, so the first token of a prompt has no score.
    """
    following = live.seq.prompt[start + 1 : start + 1 + count]
    if live.logprobs is not None and following:
        most = live.seq.sampling.prompt_logprobs or 0
        live.logprobs += sampler.score(logits[: len(following)], following, most)


def pool_step(live: LiveSequence, work: StepWork, rows: Logits, sampler: StepSampler) -> None:
    """Take what a step returned for a prompt that is pooled; rows of several steps are added up.

    Raises:
        ValueError: the numbers are not finite.
    """
    seq, pooling = live.seq, live.seq.sampling.pooling
    if work.wanted:
        live.pooled_row = rows if live.pooled_row is None else live.pooled_row + rows
    if pooling is not None and seq.pending == len(work.tokens):
        live.pooled = sampler.pool(live.pooled_row, pooling, len(seq.prompt))


def take_prompt_rows(live: LiveSequence, work: StepWork, rows: Logits, sampler: StepSampler) -> None:
    """Score or pool with what a step returned of a prompt, as far as the sequence asks for that.

    Raises:
        ValueError: the numbers are not finite.
    """
    if work.logits == "all":
        score_prompt(live, work.start, len(work.tokens), rows, sampler)
    elif live.seq.sampling.pooling is not None:
        pool_step(live, work, rows, sampler)


def forget_prompt_rows(live: LiveSequence) -> None:
    """Its prompt is computed again, with its log-probabilities and what is pooled of it."""
    live.pooled_row = None
    if live.logprobs is not None:
        live.logprobs = [None]


def append_token(live: LiveSequence, token: SampledToken) -> bool:
    """Append a sampled token to a sequence's output. Returns whether it ends the output: a stop token, or the grammar.

    Raises GrammarError if the grammar does not allow the token.
    """
    live.seq.output.append(token.token)
    if token.token in live.seq.sampling.stop_token_ids:
        return True
    live.sampling.push(token.token)
    return live.sampling.done


def build_output(
    live: LiveSequence,
    token: SampledToken | None,
    finish: str | None,
    now_s: float,
    cached_tokens: int = 0,
    kept: KeptReport | None = None,
) -> Output:
    """The message with a step's token, if it has one. The gateway leaves a final stop token out of the text."""
    seq, logprobs = live.seq, live.logprobs
    # The prompt's log-probabilities are sent once.
    live.logprobs = None
    return Output(
        request=seq.id,
        epoch=seq.epoch,
        tokens=[] if token is None else [token.token],
        logprobs=[token.logprob] if token is not None and token.logprob else None,
        prompt_logprobs=logprobs,
        finish=finish,
        seconds=first_output_seconds(seq, now_s),
        cached_tokens=cached_tokens,
        kept=kept,
        pooled=live.pooled,
    )


def build_failure(seq: Sequence, code: str, message: str) -> SequenceOutput:
    """The message that a sequence has failed."""
    return SequenceOutput(Failed(seq.id, seq.epoch, code, message))
