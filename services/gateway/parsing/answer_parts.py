"""What a reader of answers finds: text, thoughts, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

PartKind = Literal["content", "reasoning", "call", "arguments"]
# The types of each parameter of each tool, as its JSON schema names them.
ToolTypes = Mapping[str, Mapping[str, tuple[str, ...]]]


@dataclass(slots=True)
class AnswerPart:
    """A piece of an answer. `text` is a tool's name at the beginning of a call; `call` counts calls from 0.

    A call that is not `is_marked` began without the marker of calls.
    """

    kind: PartKind
    text: str
    call: int = -1
    is_marked: bool = True


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What a reader needs to know of a request.

    `prefix` is what its prompt has written of the answer, `tools` its tools with the types of their parameters. None:
    it has none, and what looks like a call is text. With `one_call` nothing is read behind the first one. `short_ids`:
    see `AnswerFormat`. `calls_bound`: a grammar binds each call that has its marker, so its arguments become an object.
    """

    prefix: str = ""
    tools: dict[str, dict[str, tuple[str, ...]]] | None = None
    one_call: bool = False
    short_ids: bool = False
    calls_bound: bool = False


@dataclass(slots=True)
class PartList:
    """Collects parts of marked text, without the whitespace beside markup. `unmark` gives the text of marked text.

    Whitespace at the end of content or of a thought waits until more of it follows.
    """

    unmark: Callable[[str], str]
    parts: list[AnswerPart] = field(default_factory=list)
    num_calls: int = 0
    has_content: bool = False
    _has_thought: bool = False
    _has_arguments: bool = False
    # Whether nothing but whitespace has followed markup, so that it is dropped.
    _behind_markup: bool = False
    _in_thought: bool = False
    _content_space: str = ""
    _thought_space: str = ""

    def add_content(self, text: str) -> None:
        """Add text of the answer."""
        if self._behind_markup:
            text = text.lstrip()
            self._behind_markup = not text
        if not text:
            return
        text = self._content_space + text
        shown = text.rstrip()
        self._content_space = text[len(shown) :]
        self.has_content |= bool(shown)
        self._add_part("content", shown)

    def begin_thought(self) -> None:
        """A thought begins, on a line of its own if there was one before."""
        self._in_thought, self._thought_space = False, "\n" if self._has_thought else ""

    def add_thought(self, text: str) -> None:
        """Add text of the thought."""
        if not self._in_thought:
            text = text.lstrip()
        if not text:
            return
        self._in_thought = self._has_thought = True
        text = self._thought_space + text
        shown = text.rstrip()
        self._thought_space = text[len(shown) :]
        self._add_part("reasoning", shown)

    def begin_call(self, name: str, is_marked: bool = True) -> None:
        """A call of the tool `name` begins, with the marker of calls or without."""
        self._has_arguments = False
        self._add_part("call", name)
        self.parts[-1].is_marked = is_marked
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Add JSON text of the arguments of the call that began last."""
        self._has_arguments |= bool(text)
        self._add_part("arguments", text)

    def end_call(self) -> None:
        """The call is complete; one without arguments has an empty object."""
        if not self._has_arguments:
            self.add_arguments("{}")

    def end_markup(self) -> None:
        """Markup ends here: whitespace behind it is dropped."""
        self._behind_markup = True

    def end_answer(self) -> None:
        """Nothing follows: whitespace at the end of an answer belongs to it, unless markup is beside it."""
        if not self._behind_markup:
            self._add_part("content", self._content_space)

    def forget_parts(self) -> None:
        """Forget what was found, but not where the answer is."""
        self.parts, self.num_calls, self.has_content = [], 0, False
        self._has_thought, self._content_space, self._thought_space = False, "", ""

    def take_parts(self) -> list[AnswerPart]:
        """Remove and return the parts that were found."""
        taken, self.parts = self.parts, []
        return taken

    def _add_part(self, kind: PartKind, text: str) -> None:
        """Add text to the last part if it is of this kind, else a new part."""
        if not text:
            return
        call = self.num_calls - 1 if kind == "arguments" else self.num_calls if kind == "call" else -1
        text, last = self.unmark(text), self.parts[-1] if self.parts else None
        if last is not None and last.kind == kind and kind != "call":
            last.text += text
        else:
            self.parts.append(AnswerPart(kind, text, call))
