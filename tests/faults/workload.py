"""What is asked of a deployment, and what the answer has to be, token by token.

Kinds of sampling are mixed: greedy, seeded, penalties, bias, a minimum before the end, stop strings (from the very
answer, so that they may lie across any cut), log-probabilities, and structured output.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from diptych.request import Grammar, SamplingParams
from tests.faults.client import ClientAnswer, ClientRequest, StreamingClient
from tests.faults.phase_gates import mark_prompt
from tests.faults.toy_model import END_TOKEN, ToyOracle, grammar_tokenizer, spell_answer, toy_layout

SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":20},"ok":{"type":"boolean"},'
    '"size":{"enum":["s","m","l"]}},"required":["name","ok","size"],"additionalProperties":false}'
)
KINDS = ("greedy", "seeded", "penalised", "biased", "ending", "stopped", "scored", "structured")
SHARED_PREFIX = [1 + byte for byte in b"Many begin with these words, and some go on in other ways. " * 3]


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """An undisturbed answer."""

    text: str
    finish: str
    completion_tokens: int


class RequestBook:
    """Makes requests, and knows their answers. Everything follows from the seed."""

    def __init__(self, seed: int, codec: str = "") -> None:
        """`codec` is that of the deployment's KV."""
        self.dice, self._nonces = random.Random(seed), itertools.count(1)
        self._oracle = ToyOracle(grammar_tokenizer(), layout=toy_layout(codec))
        self._expected: dict[int, ExpectedAnswer] = {}

    def ask(
        self, phase: str = "free", prompt: tuple[int, int] = (8, 300), answer: int = 40, kind: str = ""
    ) -> ClientRequest:
        """A request that is held in `phase`; its prompt is as long as the bounds say, its answer `answer` at most.

        A quarter of those that are held nowhere share a prefix.
        """
        dice, nonce = self.dice, next(self._nonces)
        kind = kind or dice.choice(KINDS)
        tokens = [dice.randrange(33, 127) for _ in range(dice.randint(*prompt))]
        shared = phase == "free" and dice.random() < 0.25
        tokens = SHARED_PREFIX + tokens if shared else mark_prompt(phase, nonce) + tokens
        ask = ClientRequest(nonce, tokens, sampling_of(kind, dice, answer), phase)
        if kind == "stopped":
            text = self.expected(ask).text
            if len(text) > 6:
                at = dice.randrange(len(text) // 2, len(text) - 3)
                ask = replace(ask, stop=(text[at : at + dice.choice((1, 2, 3))],))
                self._expected.pop(nonce)
        return ask

    def expected(self, ask: ClientRequest) -> ExpectedAnswer:
        """What the answer is when nothing happens."""
        known = self._expected.get(ask.nonce)
        if known is None:
            known = self._expected[ask.nonce] = self._undisturbed(ask)
        return known

    def _undisturbed(self, ask: ClientRequest) -> ExpectedAnswer:
        tokens, finish = self._oracle.answer(ask.prompt, ask.sampling)
        text = spell_answer(tokens)
        found = [(text.find(stop), stop) for stop in ask.stop if stop in text]
        if found:
            # The first that is complete ends it; of those that are complete at once, the one that begins first.
            ends, at, _ = min((at + len(stop), at, stop) for at, stop in found)
            return ExpectedAnswer(text[:at], "stop", ends)
        return ExpectedAnswer(text, finish, len(tokens))

    def wrong(self, answer: ClientAnswer) -> str:
        """What is not as it should be in an answer that came whole, or in what came of it; "" if nothing is."""
        expected = self.expected(answer.ask)
        if not answer.whole:
            return "" if expected.text.startswith(answer.text) else f"wrong tokens before {answer.code}"
        if answer.text != expected.text:
            return f"{answer.text!r} instead of {expected.text!r}"
        if answer.finish != expected.finish:
            return f"finish {answer.finish!r} instead of {expected.finish!r}"
        if len(answer.usage) != 1:
            return f"{len(answer.usage)} counts of usage"
        counted = answer.usage[0]["completion_tokens"], answer.usage[0]["prompt_tokens"]
        if counted != (expected.completion_tokens, len(answer.ask.prompt)):
            return f"usage {counted}, not {(expected.completion_tokens, len(answer.ask.prompt))}"
        if answer.ask.sampling.logprobs is not None and len(answer.logprobs) != len(answer.text):
            return f"{len(answer.logprobs)} log-probabilities for {len(answer.text)} tokens"
        return ""


def sampling_of(kind: str, dice: random.Random, answer: int) -> SamplingParams:
    """Parameters of one kind."""
    seed = dice.randrange(1 << 40)
    plain = SamplingParams(max_tokens=answer, seed=seed, temperature=0.9)
    match kind:
        case "greedy":
            return SamplingParams(max_tokens=answer, seed=0, temperature=0.0)
        case "penalised":
            return SamplingParams(
                answer,
                seed,
                temperature=1.1,
                frequency_penalty=0.7,
                presence_penalty=0.4,
                repetition_penalty=1.2,
            )
        case "biased":
            return SamplingParams(answer, seed, logit_bias={1 + dice.randrange(33, 127): 4.0, 1 + 32: -50.0})
        case "ending":
            return SamplingParams(
                answer, seed, min_tokens=answer // 3, temperature=1.4, stop_token_ids=(END_TOKEN,)
            )
        case "scored":
            return SamplingParams(answer, seed, temperature=0.7, logprobs=2)
        case "structured":
            return SamplingParams(
                answer,
                seed,
                temperature=0.8,
                grammar=Grammar("json_schema", SCHEMA),
                stop_token_ids=(END_TOKEN,),
            )
        case _:
            return plain


async def keep_streaming(
    client: StreamingClient, make: Callable[[], ClientRequest], streams: int, until: Callable[[], bool]
) -> AsyncIterator[ClientAnswer]:
    """Keep `streams` requests going until `until` holds, then until they have ended; every answer as it comes."""
    open_now: set[asyncio.Task[ClientAnswer]] = set()
    while True:
        while len(open_now) < streams and not until():
            open_now.add(asyncio.create_task(client.ask(make())))
        if not open_now:
            return
        done, open_now = await asyncio.wait(open_now, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            yield task.result()
