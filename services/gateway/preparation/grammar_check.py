"""Checks a client's grammar before any work is done for its request.

This runs in a preparer, which is killed if the check takes too long.
"""

from __future__ import annotations

from llguidance import LLTokenizer

from diptych.errors import GrammarError, RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.shown_text import shorten_text
from diptych.request import Grammar
from engine.sampling.grammar import build_tokenizer, check_grammar
from services.gateway.tokenization.tokenizer import GatewayTokenizer

# Most characters of a reason, which is kept for as long as the finding about its grammar.
MAX_REASON_CHARS = 300


class GrammarChecker:
    """Checks grammars with llguidance. To make one takes about a second for a vocabulary of 150,000 tokens."""

    def __init__(self, tokenizer: GatewayTokenizer) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._unable = ""
        try:
            self._tokenizer = build_tokenizer(tokenizer.backend, tokenizer.end_ids)
        except GrammarError as error:
            self._unable = error.what

    def rejection_reason(self, grammar: Grammar, field: str) -> str | None:
        """Why `grammar`, which `field` asks for, cannot be served; None if it can.

        Raises:
            RequestError: this model's tokenizer allows no structured output at all.
        """
        if self._tokenizer is None:
            failure = RequestFailure(FailureReason.UNSUPPORTED_PARAMETER, self._unable, field)
            raise RequestError(failure)
        try:
            check_grammar(grammar, self._tokenizer)
        except GrammarError as error:
            # llguidance's reasons have several lines.
            why = " ".join(error.why.split())
            return shorten_text(f"{error.what}: {why}" if why else error.what, MAX_REASON_CHARS)
        return None
