"""Builds one sequence's answer while it is generated: tokens go in, pieces of text with log-probabilities come out.

New text waits until it is taken. A writer that takes it rarely gets one larger piece, not several.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diptych.messages import Logprob, Output
from services.gateway.generation.scored_tokens import RankedTokens, ScoredToken, ScoredTokens
from services.gateway.openai.resolve import Prompt, ResolvedRequest
from services.gateway.parsing.answer_parts import AnswerPart
from services.gateway.tokenization.stop_strings import StopStrings
from services.gateway.tokenization.tokenizer import GatewayTokenizer

CHAR_BYTES = 2
# Bytes of one log-probability or alternative that is not in an array yet.
UNPACKED_LOGPROB_BYTES = 120


@dataclass(slots=True)
class OutputPiece:
    """New text since the last piece, and the tokens from `start` up to `stop` of `scored`.

    Of an answer that a reader reads, `parts` are what is new, and `text` is what of them is for the client to show.
    `part_stops` are, for each part but the last, the index behind its last token.
    """

    text: str
    scored: ScoredTokens
    # Index of the first token of `scored` that belongs to this piece.
    start: int = 0
    stop: int | None = None
    parts: Sequence[AnswerPart] = ()
    part_stops: Sequence[int] = ()
    # The ids of all new tokens, if they were asked for, also of those whose text is not certain yet.
    token_ids: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.scored or self.parts)

    def iter_rows(self) -> Iterator[ScoredToken]:
        """The piece's tokens with their log-probabilities."""
        return self.scored.iter_rows(self.start, len(self.scored) if self.stop is None else self.stop)

    def split_pieces(self, limit: int) -> Iterator[OutputPiece]:
        """Split the piece so that each one has at most `limit` scored tokens, and at most one of `parts`.

        Without parts the first one has all the text. The first one has all token ids.
        """
        start, ids = self.start, self.token_ids
        for part, stop in self.part_ranges():
            end = min(stop, start + limit)
            text = self.text if part is None else part.text if part.kind == "content" else ""
            yield OutputPiece(text, self.scored, start, end, () if part is None else (part,), token_ids=ids)
            start, ids = end, ()
            while start < stop:
                end = min(stop, start + limit)
                yield OutputPiece("", self.scored, start, end)
                start = end

    def part_ranges(self) -> Iterator[tuple[AnswerPart | None, int]]:
        """The parts, each with the index behind its last token; None: there are no parts."""
        stop = len(self.scored) if self.stop is None else self.stop
        if not self.parts:
            yield None, stop
        for i, part in enumerate(self.parts):
            yield part, self.part_stops[i] if i < len(self.part_stops) else stop


class OutputText:
    """The answer of one sequence. Text offsets count characters from its start, an echoed prompt included.

    The prompt's own log-probabilities can be many. They wait as objects until `pack_logprobs` has put them into arrays,
    a limited number at a time.
    """

    def __init__(
        self, resolved: ResolvedRequest, index: int, prompt: Prompt, tokenizer: GatewayTokenizer
    ) -> None:
        """With `resolved.echo`, `prompt` has its text; and its tokens' offsets, if log-probabilities are asked for."""
        self.index, self.prompt = index, prompt
        self.finish: str | None = None
        # The stop string, or the token among those that the request names, that ended the answer.
        self.stop_reason: str | int | None = None
        self.num_tokens = self.cached_tokens = self.reasoning_tokens = 0
        self.sum_logprob = 0.0
        # What was pooled of the prompt, as float32 numbers; empty for an answer with text.
        self.pooled = b""
        self._ask = resolved
        self._detokenizer = tokenizer.new_detokenizer(resolved.skip_special)
        self._stops = StopStrings(resolved.stops, resolved.keep_stop)
        # Number of characters that the detokenizer has returned.
        self._num_detokenized = 0
        # Number of characters that `StopStrings` has returned. They cannot become part of a stop string, so they can
        # be shown.
        self._num_final = 0
        self._texts: list[str] = []
        self._chars = 0
        # The answer's tokens with their log-probabilities. Those whose text can be shown come first.
        self._scored = ScoredTokens(resolved.logprobs or 0)
        self._echoed = not resolved.echo
        # The log-probabilities of the echoed prompt as a worker sent them. Empty: there are none.
        self._prompt_logprobs: Sequence[Logprob | None] = ()
        # The prompt's log-probabilities that `pack_logprobs` has put into arrays so far.
        self._packed_prompt_logprobs = ScoredTokens(resolved.logprobs or 0)
        # The prompt's log-probabilities that the answer lists by themselves, packed in the same way, but never taken.
        self.prompt_scores = RankedTokens(resolved.prompt_logprobs or 0)
        self._num_packed = 0
        self._token_ids = array("I")
        self._offsets = array("I", prompt.offsets or b"")
        # Number of characters of the echoed prompt that wait to be taken.
        self._prompt_chars = 0

    @property
    def held_bytes(self) -> int:
        """Roughly the memory, in bytes, of everything that waits to be taken."""
        ids_bytes = self._token_ids.itemsize * len(self._token_ids)
        return (
            CHAR_BYTES * self._chars
            + self._scored.num_bytes
            + self._prompt_bytes
            + ids_bytes
            + len(self.pooled)
        )

    @property
    def waiting_bytes(self) -> int:
        """Bytes that could be taken now, without an echoed prompt: how far the client has fallen behind."""
        ready_bytes = self._scored.bytes_of(self._num_ready)
        return CHAR_BYTES * (self._chars - self._prompt_chars) + ready_bytes

    @property
    def _num_ready(self) -> int:
        """Tokens whose log-probabilities can be shown; the text of the others may become part of a stop string."""
        return len(self._scored) if self.finish is not None else self._scored.count_before(self._num_final)

    @property
    def _prompt_bytes(self) -> int:
        """Roughly the memory of the prompt's log-probabilities, packed or not."""
        unpacked = max(0, len(self._prompt_logprobs) - self._num_packed)
        most = max(self._ask.logprobs or 0, self._ask.prompt_logprobs or 0)
        packed_bytes = self._packed_prompt_logprobs.num_bytes + self.prompt_scores.num_bytes
        return packed_bytes + unpacked * UNPACKED_LOGPROB_BYTES * (2 + most)

    def pack_logprobs(self, limit: int) -> bool:
        """Pack at most `limit` of the prompt's log-probabilities. Returns False when none are left.

        Must be called until it returns False, before `take_piece`.
        """
        start, end = self._num_packed, len(self._prompt_logprobs)
        tokens, stop = self.prompt.tokens, min(start + limit, end)
        is_echoed = self._ask.echo and self._ask.logprobs is not None
        for i in range(start, stop) if is_echoed else ():
            self._packed_prompt_logprobs.add_token(tokens[i], self._offsets[i], self._prompt_logprobs[i])
        for i in range(start, stop) if self._ask.prompt_logprobs is not None else ():
            self.prompt_scores.add_token(tokens[i], self._prompt_logprobs[i])
        self._num_packed = max(start, stop)
        return start + limit < end

    def take_piece(self) -> OutputPiece:
        """Remove and return everything that waits. Token ids wait for other content (or `take_token_ids`)."""
        piece = self._take_content()
        if piece:
            piece.token_ids = self.take_token_ids()
        return piece

    def take_token_ids(self) -> Sequence[int]:
        """Remove and return the token ids that wait."""
        if not self._token_ids:
            return ()
        taken, self._token_ids = self._token_ids.tolist(), array("I")
        return taken

    def _take_content(self) -> OutputPiece:
        """Remove and return the text and the log-probabilities that wait."""
        ready, scored = self._scored.remove_first(self._num_ready), self._packed_prompt_logprobs
        if scored:
            scored.extend(ready)
        piece = OutputPiece("".join(self._texts), scored or ready)
        self._texts, self._chars, self._prompt_chars, self._prompt_logprobs = [], 0, 0, ()
        self._num_packed = 0
        self._packed_prompt_logprobs = ScoredTokens(self._ask.logprobs or 0)
        return piece

    def feed_output(self, output: Output) -> None:
        """Add the tokens of a step. `self.finish` becomes "stop" if they complete a stop string."""
        if self.finish is not None:
            return
        # Only the first prefill counts, not one after a retry or migration.
        if not self.num_tokens:
            self.cached_tokens = output.cached_tokens
        self.pooled = output.pooled or self.pooled
        if self._ask.prompt_logprobs is not None and output.prompt_logprobs:
            self._prompt_logprobs = output.prompt_logprobs
        if not self._echoed:
            self._echo_prompt(output.prompt_logprobs)
        logprobs: Sequence[Logprob | None] = output.logprobs or [None] * len(output.tokens)
        for i, (token, logprob) in enumerate(zip(output.tokens, logprobs, strict=True)):
            last = i == len(output.tokens) - 1
            self._count_token(logprob)
            if self._ask.return_ids:
                self._token_ids.append(token)
            ends = last and output.finish == "stop" and token in self._ask.sampling.stop_token_ids
            if ends and token in self._ask.own_stop_ids:
                self.stop_reason = token
            if ends and not self._ask.keep_stop:
                break
            self._append_token(token, logprob)
            if self._stops.hit is not None:
                self._set_finish("stop")
                return

    def end_sequence(self, reason: str) -> None:
        """No token will follow: release all text that was held back, and set `self.finish`."""
        if self.finish is None:
            if not self._echoed:
                self._echo_prompt(None)
            rest = self._detokenizer.flush()
            self._num_detokenized += len(rest)
            self._append_final(self._stops.feed(rest))
            if self._stops.hit is None:
                self._append_final(self._stops.flush())
            self._set_finish("stop" if self._stops.hit is not None else reason)

    def _count_token(self, logprob: Logprob | None) -> None:
        """Count a token for usage and for the ranking of answers by `best_of`."""
        self.num_tokens += 1
        self.sum_logprob += logprob.logprob if logprob is not None else 0.0

    def _append_token(self, token: int, logprob: Logprob | None) -> None:
        """Append a token's text, as far as it is certain; before `min_tokens` stop strings are not looked for."""
        if logprob is not None and self._ask.logprobs is not None:
            self._scored.add_token(token, self._num_detokenized, logprob)
        text = self._detokenizer.feed(token)
        self._num_detokenized += len(text)
        early = self.num_tokens < self._ask.sampling.min_tokens
        self._append_final(self._stops.skip(text) if early else self._stops.feed(text))

    def _append_final(self, text: str) -> None:
        """Append text of the answer that cannot become part of a stop string any more."""
        self._append_text(text)
        self._num_final += len(text)

    def _append_text(self, text: str) -> None:
        """Append text to what waits to be taken."""
        if text:
            self._texts.append(text)
            self._chars += len(text)

    def _set_finish(self, reason: str) -> None:
        """End the answer; after a stop string, drop the tokens whose text lies behind it."""
        if self._stops.hit is not None:
            # The text of the dropped tokens lies behind the stop string.
            self._scored = self._scored.remove_first(self._num_ready)
            # It is empty if a reader ended the answer.
            self.stop_reason = self._stops.hit or None
        self.finish = reason

    def _echo_prompt(self, logprobs: list[Logprob | None] | None) -> None:
        """Put the prompt before the answer, with its own log-probabilities when they were asked for."""
        self._echoed = True
        text = self.prompt.text or ""
        if self._ask.logprobs is not None:
            self._prompt_logprobs = logprobs or [None] * len(self.prompt.tokens)
        self._append_text(text)
        self._num_detokenized = self._num_final = self._prompt_chars = len(text)


def with_echo(prompt: Prompt, tokenizer: GatewayTokenizer, skip_special: bool) -> Prompt:
    """`prompt` with what an answer that echoes it needs: its text, and the offset of each token in the text.

    Takes time: some microseconds for every token of the prompt.
    """
    detokeniser = tokenizer.new_detokenizer(skip_special)
    offsets, texts, length = array("I"), list[str](), 0
    for token in prompt.tokens:
        offsets.append(length)
        texts.append(detokeniser.feed(token))
        length += len(texts[-1])
    text = "".join(texts) + detokeniser.flush() if prompt.text is None else prompt.text
    return Prompt(prompt.ids, text, offsets.tobytes())
