"""A large grammar is compiled while its prompt is tokenised: each takes about as long for a hundred tools."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from diptych.request import Grammar
from services.gateway.openai.translated import GrammarCheck
from services.gateway.openai.validate import grammar_error

# Below this a thread costs more than it saves.
MIN_GRAMMAR_CHARS = 4096
# A longer body is tokenised afterwards: its CPU time would count against the limit of the check.
MAX_BODY_BYTES = 1 << 18


@contextmanager
def checked_grammar(
    grammar: Grammar | None, field: str, check: GrammarCheck, body_bytes: int
) -> Iterator[None]:
    """Have `check` look at a grammar before the block, or beside it where both are worth it.

    Raises:
        RequestError: the grammar cannot be served, whatever the block raises. `field` asks for it.
    """
    if grammar is None:
        yield
    elif len(grammar.text) < MIN_GRAMMAR_CHARS or body_bytes > MAX_BODY_BYTES:
        _raise_reason(check(grammar, field), field)
        yield
    else:
        with ThreadPoolExecutor(1, "grammar") as threads:
            finding = threads.submit(check, grammar, field)
            try:
                yield
            finally:
                _raise_reason(finding.result(), field)


def _raise_reason(why: str | None, field: str) -> None:
    if why is not None:
        raise grammar_error(why, field)
