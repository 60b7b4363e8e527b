"""What the routes do: check, tokenise, generate, describe. Owns the open generations."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.responses import Response

from diptych.metrics import Metrics
from services.gateway.chat import ChatView
from services.gateway.completions import CompletionView
from services.gateway.errors import shutting_down
from services.gateway.generation import Backend, Generation
from services.gateway.grammars import Grammars
from services.gateway.origin import Caller
from services.gateway.replies import Detokenized, Tokenized
from services.gateway.respond import PING_S, Respond
from services.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
)
from services.gateway.validate import (
    Ask,
    Prompt,
    Rules,
    ask_chat,
    ask_completion,
    check_chat,
    check_completion,
    check_length,
    check_model,
    conversation,
    grammar_of,
    split_prompts,
    wrong,
)
from services.gateway.views import Head, View

INLINE_CHARS = 8192  # tokenised on the event loop; longer texts in a thread, so that streams do not wait

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things may take, in seconds."""

    request_s: float = 600.0
    stall_s: float = 30.0
    ping_s: float = PING_S


@dataclass
class Service:
    """`fingerprint` names what produces the answers (model, weights, numerics) to clients; None until known."""

    rules: Rules
    backend: Backend
    metrics: Metrics
    grammars: Grammars
    fingerprint: Callable[[], str | None]
    patience: Patience = Patience()
    draining: bool = False
    open: set[Generation] = field(default_factory=set)
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="tokenise")
    )

    def admit(self) -> None:
        """Asked before a body is even read, so that refusals stay cheap when there are many.

        Raises:
            RequestError: nothing can be taken in now.
        """
        if self.draining:
            raise shutting_down()
        if (refusal := self.backend.refusal(1)) is not None:
            self.metrics.refused(refusal.code or "unknown")
            raise refusal

    async def chat(self, body: ChatRequest, caller: Caller) -> Response:
        """`POST /v1/chat/completions`."""
        check_chat(body, self.rules)
        await self.grammars.check(grammar_of(body.response_format, self.rules.limits))
        resume = bool(body.continue_final_message)
        generate = body.add_generation_prompt is not False and not resume
        prompt = await self._render(body.messages, generate, resume, bool(body.add_special_tokens))
        ask = ask_chat(body, prompt, self.rules, caller.tenant)
        head = self._head("chatcmpl", ask)
        return self._respond(head, ask, ChatView(head, ask, self.rules.tokens), caller)

    async def completion(self, body: CompletionRequest, caller: Caller) -> Response:
        """`POST /v1/completions`."""
        prompts = split_prompts(body.prompt, self.rules)
        check_completion(body, len(prompts), self.rules)
        await self.grammars.check(grammar_of(body.response_format, self.rules.limits))
        special = body.add_special_tokens is not False
        told = [await self._prompt(prompt, special) for prompt in prompts]
        ask = ask_completion(body, told, self.rules, caller.tenant)
        head = self._head("cmpl", ask)
        return self._respond(head, ask, CompletionView(head, ask, self.rules.tokens), caller)

    async def tokenize(self, body: TokenizeRequest) -> Tokenized:
        """`POST /tokenize`."""
        check_model(body.model, self.rules)
        if (body.prompt is None) == (body.messages is None):
            raise wrong("prompt", "or 'messages' must be given, and not both")
        if body.messages is not None:
            resume = bool(body.continue_final_message)
            generate = body.add_generation_prompt is not False and not resume
            ids = (await self._render(body.messages, generate, resume, bool(body.add_special_tokens))).tokens
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
            ids = await self._offload(len(text), self.rules.tokens.encode, text, special)
        names = [self.rules.tokens.text_of(token) for token in ids] if body.return_token_strs else None
        return Tokenized(len(ids), self.rules.context_tokens, ids, names)

    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        """`POST /detokenize`."""
        check_model(body.model, self.rules)
        tokens = self.rules.tokens
        if any(token >= tokens.size for token in body.tokens):
            raise wrong("tokens", f"holds ids beyond the vocabulary of {tokens.size}")
        skip = bool(body.skip_special_tokens)
        return Detokenized(await self._offload(len(body.tokens), tokens.decode, list(body.tokens), skip))

    def shut(self) -> None:
        """End all open generations with an error that their clients see."""
        for generation in list(self.open):
            generation.give_up(shutting_down())

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    async def _render(self, messages: list[Message], generate: bool, resume: bool, special: bool) -> Prompt:
        turns = conversation(messages)
        size = sum(len(turn["content"] or "") for turn in turns)
        text = await self._offload(size, self.rules.tokens.render, turns, generate, resume)
        check_length(text, self.rules, "messages")
        return Prompt(await self._offload(len(text), self.rules.tokens.encode, text, special), text)

    async def _prompt(self, prompt: str | list[int], special: bool) -> Prompt:
        if isinstance(prompt, list):
            return Prompt(prompt)
        check_length(prompt, self.rules, "prompt")
        ids = await self._offload(len(prompt), self.rules.tokens.encode, prompt, special)
        return Prompt(ids or [self.rules.tokens.start_id], prompt)

    async def _offload(self, size: int, call: Callable[..., T], *arguments: object) -> T:
        if size <= INLINE_CHARS:
            return call(*arguments)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, functools.partial(call, *arguments)
        )

    def _head(self, prefix: str, ask: Ask) -> Head:
        return Head(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), ask.model, self.fingerprint())

    def _respond(self, head: Head, ask: Ask, view: View, caller: Caller) -> Response:
        if self.draining:
            raise shutting_down()
        patience = self.patience
        allowed_s = min(patience.request_s, caller.timeout_s or patience.request_s)
        max_bytes = self.rules.limits.max_stream_bytes
        generation = Generation(head.id, ask, self.rules.tokens, self.backend, self.metrics, max_bytes)
        return Respond(
            generation,
            view,
            self.open,
            arrived_s=caller.arrived_s,
            deadline_s=caller.arrived_s + allowed_s,
            stall_s=patience.stall_s,
            ping_s=patience.ping_s,
        )
