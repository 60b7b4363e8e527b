"""Checks a client's grammar before any work is done for it: off the event loop, one at a time, and remembered."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLTokenizer

from diptych.errors import GrammarError, RequestError
from diptych.request import Grammar
from engine.grammar import check, load
from services.gateway.tokens import Tokens

REMEMBERED = 256  # verdicts
WAITING = 16  # grammars that may wait for their check
CHECK_S = 2.0
PARAM = "response_format"


class Grammars:
    """Compiling is bounded by the engine's fuel; the time limit here is for the queue before it."""

    def __init__(self, tokens: Tokens) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()
        self._waiting = 0
        self._tokenizer: LLTokenizer | None = None
        self._unable = ""
        try:
            self._tokenizer = load(tokens.hf.backend_tokenizer, tokens.end_ids)
        except GrammarError as error:
            self._unable = error.what

    async def check(self, grammar: Grammar | None) -> None:
        """Raises RequestError: 400 if it does not compile, 503 if too many wait."""
        if grammar is None:
            return
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(self._unable, code="unsupported_parameter", param=PARAM)
        if grammar not in self._verdicts:
            self._remember(grammar, await self._judge(grammar, tokenizer))
        self._verdicts.move_to_end(grammar)
        told = self._verdicts[grammar]
        if told is not None:
            raise RequestError(f"'{PARAM}' cannot be served: {told}", code="invalid_schema", param=PARAM)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _remember(self, grammar: Grammar, verdict: str | None) -> None:
        self._verdicts[grammar] = verdict
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)

    async def _judge(self, grammar: Grammar, tokenizer: LLTokenizer) -> str | None:
        if self._waiting >= WAITING:
            raise _busy()
        self._waiting += 1
        try:
            async with asyncio.timeout(CHECK_S):
                return await asyncio.get_running_loop().run_in_executor(
                    self._pool, _verdict, grammar, tokenizer
                )
        except TimeoutError as error:
            raise _busy() from error
        finally:
            self._waiting -= 1


def _verdict(grammar: Grammar, tokenizer: LLTokenizer) -> str | None:
    try:
        check(grammar, tokenizer)
    except GrammarError as error:
        return f"{error.what}: {error.why}"[:300] if error.why else error.what
    return None


def _busy() -> RequestError:
    return RequestError(
        "too many grammars are being checked",
        status=503,
        kind="server_error",
        code="overloaded",
        retry=True,
        retry_after_s=1.0,
    )
