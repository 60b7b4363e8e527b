"""One sequence's answer while it is written: tokens in, pieces of text and log-probabilities out.

What was fed waits until somebody takes it; who takes seldom finds one larger piece, not more of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.messages import Logprob, Output
from services.gateway.text import Detokeniser, StopStrings
from services.gateway.tokens import Tokens
from services.gateway.validate import Ask, Prompt


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probability (None for the first of a prompt) and where its text begins in the answer."""

    token: int
    offset: int
    logprob: Logprob | None


@dataclass(slots=True)
class Piece:
    """What became known since the last piece."""

    text: str = ""
    scored: list[Scored] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.scored)


class Answer:
    """One sequence. Text offsets count characters from the beginning of the answer, an echoed prompt included."""

    def __init__(self, ask: Ask, index: int, prompt: Prompt, tokens: Tokens) -> None:
        self.index, self.prompt = index, prompt
        self.finish: str | None = None
        self.num_tokens = self.cached_tokens = 0
        self.sum_logprob = 0.0
        self._ask, self._tokens = ask, tokens
        self._detokeniser = tokens.detokeniser(ask.skip_special)
        self._stops = StopStrings(ask.stops, ask.keep_stop)
        self._told = 0  # characters that left the detokeniser
        self._sure = 0  # characters that left the stop strings: these can be shown
        self._unsure: deque[Scored] = deque()
        self._piece = Piece()
        self._echoed = not ask.echo

    @property
    def waiting_bytes(self) -> int:
        """Roughly the memory that the waiting piece takes."""
        per_token = 100 * (2 + (self._ask.logprobs or 0))
        return 2 * len(self._piece.text) + per_token * len(self._piece.scored)

    def take(self) -> Piece:
        """What is waiting; it is then no longer."""
        piece, self._piece = self._piece, Piece()
        return piece

    def feed(self, output: Output) -> None:
        """Take in a step's tokens; `self.finish` becomes "stop" when a stop string was found among them."""
        if self.finish is not None:
            return
        if (
            not self.num_tokens
        ):  # of the reading that led to the first token, not of one after a loss or a move
            self.cached_tokens = output.cached_tokens
        if not self._echoed:
            self._echo(output.prompt_logprobs)
        logprobs: Sequence[Logprob | None] = output.logprobs or [None] * len(output.tokens)
        for i, (token, logprob) in enumerate(zip(output.tokens, logprobs, strict=True)):
            last = i == len(output.tokens) - 1
            self._count(logprob)
            ends = last and output.finish == "stop" and token in self._ask.sampling.stop_token_ids
            if ends and not self._ask.keep_stop:
                break
            self._write(token, logprob)
            if self._stops.hit is not None:
                self._end("stop")
                return

    def end(self, reason: str) -> None:
        """No token will follow."""
        if self.finish is None:
            if not self._echoed:
                self._echo(None)
            rest = self._detokeniser.flush()
            self._told += len(rest)
            self._show(self._stops.feed(rest))
            if self._stops.hit is None:
                self._show(self._stops.flush())
            self._end("stop" if self._stops.hit is not None else reason)

    def _count(self, logprob: Logprob | None) -> None:
        self.num_tokens += 1
        self.sum_logprob += logprob.logprob if logprob is not None else 0.0

    def _write(self, token: int, logprob: Logprob | None) -> None:
        if logprob is not None and self._ask.logprobs is not None:
            self._unsure.append(Scored(token, self._told, logprob))
        text = self._detokeniser.feed(token)
        self._told += len(text)
        early = self.num_tokens < self._ask.sampling.min_tokens
        self._show(self._stops.skip(text) if early else self._stops.feed(text))

    def _show(self, text: str) -> None:
        self._piece.text += text
        self._sure += len(text)
        while self._unsure and self._unsure[0].offset < self._sure:
            self._piece.scored.append(self._unsure.popleft())

    def _end(self, reason: str) -> None:
        if self._stops.hit is None:  # else what is unsure lies behind the cut
            self._piece.scored += self._unsure
        self._unsure.clear()
        self.finish = reason

    def _echo(self, scores: list[Logprob | None] | None) -> None:
        """Put the prompt before the answer, with its own log-probabilities when they were asked for."""
        self._echoed = True
        ids = self.prompt.tokens
        offsets, text = _offsets(ids, self._tokens.detokeniser(self._ask.skip_special))
        if self.prompt.text is not None:
            text = self.prompt.text
        if self._ask.logprobs is not None:
            known = scores or [None] * len(ids)
            self._piece.scored += [Scored(*row) for row in zip(ids, offsets, known, strict=True)]
        self._piece.text += text
        self._told = self._sure = len(text)


def _offsets(ids: list[int], detokeniser: Detokeniser) -> tuple[list[int], str]:
    """Where each token's text begins, and the text."""
    offsets, text = [], ""
    for token in ids:
        offsets.append(len(text))
        text += detokeniser.feed(token)
    return offsets, text + detokeniser.flush()
