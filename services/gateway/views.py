"""What the two generation routes do not share: the shape of what the client receives."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.answer import Answer, Piece
from services.gateway.replies import Usage
from services.gateway.validate import Ask

OBFUSCATED_CHARS = 16  # a chunk's text and padding together are a multiple of this


@dataclass(frozen=True, slots=True)
class Head:
    """What every body and every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str | None


class View(Protocol):
    """One route's bodies. A stream is, per choice, `begin`, any number of `delta`, `end`; then `usage` if asked for."""

    def begin(self, choice: int) -> Sequence[msgspec.Struct]: ...

    def delta(self, choice: int, piece: Piece) -> msgspec.Struct: ...

    def end(self, choice: int, reason: str) -> msgspec.Struct: ...

    def usage(self, usage: Usage) -> msgspec.Struct: ...

    def whole(self, answers: Sequence[Answer], usage: Usage) -> msgspec.Struct: ...


def chosen(ask: Ask, answers: Sequence[Answer]) -> list[Answer]:
    """The `n` answers of each prompt with the highest mean log-probability; all, in order, if n is best_of."""
    if ask.best_of == ask.n:
        return list(answers)
    groups = (answers[i : i + ask.best_of] for i in range(0, len(answers), ask.best_of))
    return [answer for group in groups for answer in _best(group, ask.n)]


def _best(group: Iterable[Answer], n: int) -> list[Answer]:
    return sorted(group, key=lambda answer: -answer.sum_logprob / max(1, answer.num_tokens))[:n]


def usage_field(ask: Ask) -> None | UnsetType:
    """`usage` of a chunk that has none: null when the client asked for usage at the end, else absent."""
    return None if ask.include_usage else UNSET


def padding(ask: Ask, text: str) -> str | UnsetType:
    """Random characters that hide the length of `text` from whoever sees only the size of packets."""
    if not ask.obfuscate:
        return UNSET
    return secrets.token_urlsafe(OBFUSCATED_CHARS)[: OBFUSCATED_CHARS - len(text.encode()) % OBFUSCATED_CHARS]
