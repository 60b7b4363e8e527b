"""A format of answers in one model's vocabulary: its literals as marked text, and sets of them to look for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.gateway.parsing.answer_format import AnswerFormat, CallRegion, Region
from services.gateway.parsing.markers import MarkerTable
from services.gateway.parsing.text_cursor import LiteralSet


class AnswerMarkup:
    """A format in one vocabulary. `token_id` gives the id of a text that is one added token, and else None."""

    def __init__(self, answer_format: AnswerFormat, token_id: Callable[[str], int | None]) -> None:
        self.markers = MarkerTable(answer_format.literals, token_id)
        mark = self.markers.mark_text
        self.format = answer_format
        self.reasoning = _mark_region(answer_format.reasoning or Region(()), mark)
        self.calls = None if answer_format.calls is None else _mark_calls(answer_format.calls, mark)
        calls = self.calls or CallRegion(())
        self.openers = LiteralSet([*self.reasoning.opens, *calls.opens, *calls.bare_opens, *calls.wraps])
        self.thought_ends = LiteralSet([*self.reasoning.closes, *calls.opens, *calls.wraps])
        self.call_closes = LiteralSet(calls.closes)
        # Tokens that no call contains.
        bounds = (*self.openers.literals, *self.reasoning.closes, *calls.closes)
        self.marks = LiteralSet([one for one in bounds if one in self.markers.mark_of.values()])

    @property
    def mark_of(self) -> dict[int, str]:
        """The tokens that are markers, and the characters that stand for them in marked text."""
        return self.markers.mark_of

    def find_prefix(self, prompt: str) -> str:
        """What a rendered prompt has already written of the answer, such as `<think>`."""
        ends = [prompt.rfind(anchor) + len(anchor) for anchor in self.format.anchors if anchor in prompt]
        return prompt[max(ends) :] if ends else ""


def _mark_region(region: Region, mark: Callable[[str], str]) -> Region:
    return Region(tuple(map(mark, region.opens)), tuple(map(mark, region.closes)))


def _mark_calls(region: CallRegion, mark: Callable[[str], str]) -> CallRegion:
    """The region with its literals as marked text."""

    def mark_all(value: object) -> object:
        if isinstance(value, str):
            return mark(value)
        return [mark_all(one) for one in value] if isinstance(value, list | tuple) else value

    return replace(
        region,
        opens=tuple(map(mark, region.opens)),
        closes=tuple(map(mark, region.closes)),
        wraps=tuple(map(mark, region.wraps)),
        bare_opens=tuple(map(mark, region.bare_opens)),
        options={name: mark_all(value) for name, value in region.options.items()},
    )
