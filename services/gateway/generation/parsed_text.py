"""The answer of one sequence that a reader reads: its text, its thoughts, and its calls of tools."""

from __future__ import annotations

from diptych.messages import Logprob
from services.gateway.generation.output_text import OutputPiece, OutputText
from services.gateway.openai.resolve import Prompt, ResolvedRequest
from services.gateway.parsing.answer_parts import AnswerPart
from services.gateway.parsing.answer_reader import AnswerReader
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.tokenization.tokenizer import GatewayTokenizer


class ParsedText(OutputText):
    """An `OutputText` whose text passes a reader. Stop strings are looked for only in what the client is shown."""

    def __init__(
        self,
        resolved: ResolvedRequest,
        index: int,
        prompt: Prompt,
        tokenizer: GatewayTokenizer,
        markup: ModelMarkup,
    ) -> None:
        super().__init__(resolved, index, prompt, tokenizer)
        assert resolved.context is not None
        context = resolved.context
        answer_markup = markup.plain if context.tools is None else markup.calls
        self._reader = AnswerReader(answer_markup, context.prefix, context.tools)
        self._mark_of, self._tokenizer = answer_markup.mark_of, tokenizer
        self._parts: list[AnswerPart] = []
        # Tokens that are thoughts if what they begin turns out to be no call.
        self._num_doubtful = 0
        # How many tokens had been scored when each part ended, the last of them excepted, and how many were taken.
        self._part_stops: list[int] = []
        self._num_taken = 0
        # Whether the answer ends before a second call.
        self._one_call = context.one_call

    def _take_content(self) -> OutputPiece:
        """Remove and return the parts and the log-probabilities that wait."""
        piece = super()._take_content()
        piece.parts, self._parts = self._parts, []
        piece.part_stops = [min(stop - self._num_taken, len(piece.scored)) for stop in self._part_stops]
        self._num_taken, self._part_stops = self._num_taken + len(piece.scored), []
        piece.text = "".join([part.text for part in piece.parts if part.kind == "content"])
        return piece

    def _append_token(self, token: int, logprob: Logprob | None) -> None:
        """Append a token. It counts as thought if it begins, continues or ends one; a call within it is none."""
        reader, mark = self._reader, self._mark_of.get(token)
        is_scored = not self._ask.text_logprobs or (mark is None and reader.takes_content)
        if logprob is not None and self._ask.logprobs is not None and is_scored:
            self._scored.add_token(token, self._num_detokenized, logprob)
        was_thinking = reader.thinking
        if mark is None:
            text = self._detokenizer.feed(token)
        else:
            text = self._detokenizer.flush() + mark
            self._detokenizer = self._tokenizer.new_detokenizer(self._ask.skip_special)
        self._num_detokenized += len(text)
        early = self.num_tokens < self._ask.sampling.min_tokens or not reader.takes_content
        self._append_final(self._stops.skip(text) if early else self._stops.feed(text))
        if was_thinking or not reader.may_think:
            self._count_doubtful()
            self.reasoning_tokens += was_thinking or reader.thinking
        else:
            self._num_doubtful += 1

    def _count_doubtful(self) -> None:
        """What was doubtful is certain now."""
        self.reasoning_tokens += self._num_doubtful * self._reader.thinking
        self._num_doubtful = 0

    def _append_text(self, text: str) -> None:
        """Read text, and append what is found to what waits to be taken."""
        self._reader.feed(text)
        self._take_parts()

    def _set_finish(self, reason: str) -> None:
        """End the answer; one that calls tools ends for them."""
        # A thought that the end of the answer has cut is no call.
        self.reasoning_tokens += self._num_doubtful * self._reader.may_think
        self._num_doubtful = 0
        self._reader.close()
        self._take_parts()
        super()._set_finish("tool_calls" if reason == "stop" and self._reader.has_calls else reason)

    def _take_parts(self) -> None:
        for part in self._reader.take_parts():
            if self._one_call and part.call > 0:
                # The answer ends before it, as before a stop string.
                self._stops.hit = ""
                continue
            self._chars += len(part.text)
            last = self._parts[-1] if self._parts else None
            if last is not None and last.kind == part.kind and part.kind != "call":
                last.text += part.text
            else:
                if last is not None:
                    self._part_stops.append(self._num_taken + len(self._scored))
                self._parts.append(part)


def make_text(
    resolved: ResolvedRequest,
    index: int,
    prompt: Prompt,
    tokenizer: GatewayTokenizer,
    markup: ModelMarkup | None,
) -> OutputText:
    """The answer of a sequence, with a reader if the request has one."""
    if resolved.context is None or markup is None:
        return OutputText(resolved, index, prompt, tokenizer)
    return ParsedText(resolved, index, prompt, tokenizer, markup)
