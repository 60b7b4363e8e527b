"""A worker's compiled grammars: each is compiled once, in a thread of its own, and copied for every sequence.

    request(grammar, output, tenant) ─▶ compile thread, tenants round-robin ─▶ a matcher at the end of `output`

Compiling takes up to half a second and releases the GIL for most of it, so the engine can continue meanwhile. A copy
takes microseconds and shares the lexer, so results that one sequence computes are available to all. A request is
dropped when its sequence no longer refers to it.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from llguidance import LLTokenizer
from msgspec import structs

from diptych.errors import GrammarError
from diptych.request import Grammar
from engine.sampling.gate import GatedMatcher
from engine.sampling.grammar import GrammarMatcher, TokenMatcher, compile_grammar

# Most compiled grammars that are kept; each takes at most about 40 MB (`grammar.PARSER_LIMITS`).
MAX_PROTOTYPES = 16
# Outputs of at most this many tokens are replayed on the caller's thread, at about 10 µs per token.
INLINE_TOKENS = 64


class MatcherRequest:
    """The future matcher of one sequence, whose grammar may still be compiling."""

    def __init__(self, grammar: Grammar, output: Sequence[int]) -> None:
        self.grammar, self.output = grammar, list(output)
        self._future: Future[TokenMatcher] = Future()

    @property
    def ready(self) -> bool:
        """Whether `result` returns (or raises) at once."""
        return self._future.done()

    def result(self) -> TokenMatcher:
        """The matcher; blocks until it is ready.

        Raises:
            GrammarError: the grammar does not compile, or the output does not fit it.
        """
        return self._future.result()

    def resolve_with(self, prototype: GrammarMatcher | GrammarError) -> None:
        """Set the result: a copy of `prototype` at the end of the output, or the error."""
        try:
            if isinstance(prototype, GrammarError):
                raise prototype
            matcher: TokenMatcher = prototype.copy()
            if self.grammar.gate is not None:
                matcher = GatedMatcher(self.grammar.gate, prototype)
            matcher.replay(self.output)
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(matcher)


class GrammarCache:
    """The compiled grammars of one engine.

    Args:
        tokenizer: the model's, from `grammar.build_tokenizer`.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        # Called in the compile thread after each request.
        self.on_ready: Callable[[], None] = lambda: None
        self._tokenizer = tokenizer
        # This lock guards all attributes below.
        self._changed = threading.Condition()
        self._prototypes: OrderedDict[Grammar, GrammarMatcher | GrammarError] = OrderedDict()
        self._waiting: OrderedDict[str, deque[weakref.ref[MatcherRequest]]] = OrderedDict()  # by tenant
        self._thread: threading.Thread | None = None

    def request_matcher(self, grammar: Grammar, output: Sequence[int], tenant: str) -> MatcherRequest:
        """A matcher at the end of `output`; ready at once if the grammar is compiled already and the output is
        short.
        """
        asked = MatcherRequest(grammar, output)
        plain = _without_gate(grammar)
        with self._changed:
            known = self._prototypes.get(plain)
            if known is None or (isinstance(known, GrammarMatcher) and len(output) > INLINE_TOKENS):
                self._waiting.setdefault(tenant, deque()).append(weakref.ref(asked))
                self._changed.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._compile_loop, name="grammar", daemon=True)
                    self._thread.start()
                return asked
        asked.resolve_with(known)
        return asked

    def _compile_loop(self) -> None:
        """The compile thread: serve requests, one tenant after the other, for ever."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                asked = self._next_request()
                known = None if asked is None else self._prototypes.get(_without_gate(asked.grammar))
            if asked is None:
                continue
            if known is None:
                known = self._compile_prototype(_without_gate(asked.grammar))
            asked.resolve_with(known)
            # The thread must not keep the request alive, or an unused request would not be dropped.
            del asked
            self.on_ready()

    def _next_request(self) -> MatcherRequest | None:
        """The oldest request of the next tenant, round-robin; None if its sequence is gone."""
        tenant, requests = self._waiting.popitem(last=False)
        asked = requests.popleft()()
        if requests:
            self._waiting[tenant] = requests
        return asked

    def _compile_prototype(self, grammar: Grammar) -> GrammarMatcher | GrammarError:
        """Compile a grammar, or catch its error, and store the result for later requests."""
        try:
            made: GrammarMatcher | GrammarError = compile_grammar(grammar, self._tokenizer)
            if isinstance(made, GrammarMatcher):
                made.warm()
        except GrammarError as error:
            made = error
        except Exception as error:
            made = GrammarError("the grammar cannot be compiled", f"{type(error).__name__}: {error}")
        with self._changed:
            self._prototypes[grammar] = made
            if len(self._prototypes) > MAX_PROTOTYPES:
                self._prototypes.popitem(last=False)
        return made


def _without_gate(grammar: Grammar) -> Grammar:
    """The grammar for all answers that it binds, wherever it does."""
    return grammar if grammar.gate is None else structs.replace(grammar, gate=None)
