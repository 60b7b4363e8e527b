"""Answers with log-probabilities: as they were when objects made them, in slices, and bounded in sum."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.failure_statuses import RequestFailure
from diptych.messages import Logprob, Output
from diptych.request import Request, SamplingParams, Tenancy
from services.gateway.generation.answer_memory import AnswerMemory
from services.gateway.generation.chat_format import ChatFormat
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.formats import ResponseHead, prompt_score_parts
from services.gateway.generation.generation import Generation, SequenceSink
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.output_text import OutputText, with_echo
from services.gateway.generation.scored_tokens import (
    ALTERNATIVE_BYTES,
    TOKEN_BYTES,
    ScoredToken,
    ScoredTokens,
)
from services.gateway.generation.whole_answer import MAX_PART_BYTES, gather_pieces
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.resolve import ResolvedRequest, make_prompt
from services.gateway.openai.schemas.response_schema import Usage
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import END

HEAD = ResponseHead("x", 0, 'a "choices":[] model', None)
USAGE = Usage(1, 2, 3)
TOP = 20


def scored(tokens: GatewayTokenizer, count: int, top: int) -> list[Logprob]:
    """One for each of `count` tokens, with alternatives that are spelled alike, not at all, or not as characters."""
    return [
        Logprob(
            i % tokens.size,
            -i / 7,
            [((i + k) % tokens.size, -k / 3 if k else float("-inf")) for k in range(top)],
        )
        for i in range(count)
    ]


def asked(top: int | None, tenant: str = "", **fields: object) -> ResolvedRequest:
    sampling = SamplingParams(max_tokens=9999, seed=0)
    return ResolvedRequest("toy", [make_prompt([5])], sampling, 9999, Tenancy(tenant), logprobs=top, **fields)  # type: ignore[arg-type]


def answered(tokens: GatewayTokenizer, ask: ResolvedRequest, count: int, top: int) -> OutputText:
    answer = OutputText(ask, 0, ask.prompts[0], tokens)
    rows = scored(tokens, count, top)
    answer.feed_output(Output("r", 0, [row.token for row in rows], rows, finish="length"))
    answer.end_sequence("length")
    return answer


def floor(value: float) -> float:
    return max(value, -9999.0)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 400])
@pytest.mark.parametrize("top", [None, 0, 3])
def test_chat_answers_say_of_every_token_what_is_known(
    tokens: GatewayTokenizer, count: int, top: int | None
) -> None:
    ask = asked(top)
    answers = [answered(tokens, ask, count, 4) for _ in range(2)]
    body = msgspec.json.decode(
        b"".join(ChatFormat(HEAD, ask, LogprobJson(tokens)).full_body_parts(answers, USAGE))
    )
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert (body["model"], body["usage"]["total_tokens"]) == (HEAD.model, 3)

    def entry(token: int, value: float) -> dict[str, object]:
        raw = tokens.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": floor(value), "bytes": list(raw)}

    for choice in body["choices"]:
        if top is None:
            assert choice["logprobs"] is None
            continue
        assert choice["logprobs"] == {
            "content": [
                entry(row.token, row.logprob) | {"top_logprobs": [entry(*one) for one in row.top[:top]]}
                for row in scored(tokens, count, 4)
            ],
            "refusal": None,
        }


@pytest.mark.parametrize("count", [0, 1, 128, 300])
@pytest.mark.parametrize("top", [None, 0, 5])
def test_completions_say_of_every_token_what_is_known(
    tokens: GatewayTokenizer, count: int, top: int | None
) -> None:
    ask = asked(top)
    answer = answered(tokens, ask, count, 5)
    body = msgspec.json.decode(
        b"".join(CompletionFormat(HEAD, ask, LogprobJson(tokens)).full_body_parts([answer], USAGE))
    )
    [choice] = body["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    if top is None:
        assert choice["logprobs"] is None
        return
    rows = scored(tokens, count, 5)
    assert choice["logprobs"]["token_logprobs"] == [floor(row.logprob) for row in rows]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == count
    for name, row, best in zip(
        choice["logprobs"]["tokens"], rows, choice["logprobs"]["top_logprobs"], strict=True
    ):
        assert best[name] == floor(row.logprob)
        assert set(best.values()) <= {floor(value) for _, value in [*row.top[:top], (0, row.logprob)]}


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 300), st.floats(-99, 0)), max_size=4), max_size=30), st.data()
)
def test_arrays_give_back_what_was_put_in(rows: list[list[tuple[int, float]]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    first, second = ScoredTokens(3), ScoredTokens(3)
    for i, top in enumerate(rows):
        known = None if i == 0 else Logprob(i, -float(i), top)
        (first if i < cut else second).add_token(i, 2 * i, known)
    first.extend(second)
    start = data.draw(st.integers(0, len(rows)))
    found = list(first.iter_rows(start, len(rows)))
    assert [(row.token, row.offset) for row in found] == [(i, 2 * i) for i in range(start, len(rows))]
    assert [row.top for row in found] == [rows[i][:3] if i else [] for i in range(start, len(rows))]
    assert [row.logprob for row in found] == [-float(i) if i else None for i in range(start, len(rows))]


def test_a_large_answer_is_written_in_slices(tokens: GatewayTokenizer, own_garbage: None) -> None:
    ask = asked(TOP, n=8, best_of=8)
    answers = [answered(tokens, ask, 4000, TOP) for _ in range(8)]
    longest_s = 0.0

    async def main() -> int:
        nonlocal longest_s

        async def tick() -> None:
            nonlocal longest_s
            last_s = time.thread_time()
            while True:
                await asyncio.sleep(0)
                longest_s, last_s = max(longest_s, time.thread_time() - last_s), time.thread_time()

        ticking, size, over = asyncio.create_task(tick()), 0, False
        pieces = ChatFormat(HEAD, ask, LogprobJson(tokens)).full_body_parts(answers, USAGE)
        while not over:
            body, over = await gather_pieces(pieces, MAX_PART_BYTES)
            size += len(body)
            assert len(body) < 2 * MAX_PART_BYTES
        ticking.cancel()
        return size

    assert asyncio.run(main()) > 10_000_000
    assert longest_s < 0.1  # of this thread's time; once it took seconds


def test_an_echoed_prompt_is_packed_in_slices_and_comes_first(tokens: GatewayTokenizer) -> None:
    ids = tokens.encode("The quick brown fox " * 500, False)
    prompt = with_echo(make_prompt(ids), tokens, True)
    ask = ResolvedRequest("toy", [prompt], SamplingParams(max_tokens=2, seed=0), 99999, logprobs=5, echo=True)
    answer = OutputText(ask, 0, prompt, tokens)
    scores = [None, *(Logprob(token, -2.0, [(token, -2.0)] * 5) for token in ids[1:])]
    answer.feed_output(Output("r", 0, [ids[0]], [Logprob(ids[0], -1.0, [])], prompt_logprobs=scores))
    loose_bytes = answer.held_bytes
    slices = 1
    while answer.pack_logprobs(100):
        slices += 1
    assert slices == -(-len(ids) // 100)
    assert answer.held_bytes < loose_bytes / 4
    assert answer.waiting_bytes < 1000  # a reader is not behind because it asked for its prompt
    rows = list(answer.take_piece().iter_rows())
    assert [row.token for row in rows] == [*ids, ids[0]]
    assert [row.logprob for row in rows] == [None, *[-2.0] * (len(ids) - 1), -1.0]
    assert rows[-1].offset == len("The quick brown fox " * 500)
    assert answer.held_bytes == 0


class Silent:
    """A backend that does nothing. Implements `GenerationBackend`."""

    def __init__(self) -> None:
        self.left: list[str] = []

    def submit_requests(self, asked: Iterator[tuple[Request, SequenceSink]]) -> None:
        pass

    def cancel_request(self, request: str, *others: str) -> None:
        self.left += request, *others

    def stop_request(self, request: str) -> None:
        pass

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        return None


def without_text(count: int) -> Output:
    """A special token, again and again, with log-probabilities: nothing of it is shown."""
    rows = [Logprob(END, -1.0, [(END, -1.0)] * TOP) for _ in range(count)]
    return Output("r", 0, [END] * count, rows)


def test_tokens_without_text_are_packed_and_counted_at_once(
    tokens: GatewayTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = asked(TOP)
    answer = OutputText(ask, 0, ask.prompts[0], tokens)
    for _ in range(20):
        answer.feed_output(without_text(100))
    packed_bytes = 2000 * (TOKEN_BYTES + TOP * ALTERNATIVE_BYTES)
    assert answer.held_bytes == packed_bytes
    assert answer.waiting_bytes == 0  # no reader can be behind with them
    assert not answer.take_piece()
    added = list[int]()
    monkeypatch.setattr(ScoredTokens, "add_token", lambda self, token, *_: added.append(token))
    answer.end_sequence("length")
    assert not added, "the end of an answer is no work"
    assert answer.waiting_bytes == packed_bytes
    rows = list(answer.take_piece().iter_rows())
    assert [(row.token, row.offset, len(row.top)) for row in rows] == [(END, 0, TOP)] * 2000
    assert answer.held_bytes == 0


def test_tokens_without_text_behind_a_stop_string_are_left_out(tokens: GatewayTokenizer) -> None:
    [letter], [stop] = tokens.encode("e", False), tokens.encode("o", False)
    ask = asked(1, stops=("o",))
    answer = OutputText(ask, 0, ask.prompts[0], tokens)
    ids, taken = [END, letter, END, letter, END, stop], list[ScoredToken]()
    for token in ids:
        answer.feed_output(Output("r", 0, [token], [Logprob(token, -1.0, [(token, -1.0)])]))
        taken += answer.take_piece().iter_rows()
    answer.end_sequence("length")
    taken += answer.take_piece().iter_rows()
    assert [(row.token, row.offset, row.top) for row in taken] == [
        (END, 0, [(END, -1.0)]),
        (letter, 0, [(letter, -1.0)]),
        (END, 1, [(END, -1.0)]),
        (letter, 1, [(letter, -1.0)]),
    ]
    assert answer.held_bytes == 0


def failure(generation: Generation) -> str | None:
    return generation.failure.code if generation.failure is not None else None


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_without_text_are_bounded_in_sum(tokens: GatewayTokenizer, stream: bool) -> None:
    memory, backend = AnswerMemory(10_000_000), Silent()
    one = Generation(
        "a",
        asked(TOP, "a", stream=stream),
        tokens,
        backend,  # type: ignore[arg-type]
        GatewayMetrics(),
        1 << 20,
        memory,
        arrived_s=0.0,
        deadline_s=60.0,
    )
    one.submit_sequences()
    for _ in range(50):
        one.streams[0].deliver_output(without_text(100), 0.0)
    assert not failure(one) and not one.flooded
    for _ in range(150):
        one.streams[0].deliver_output(without_text(100), 0.0)
    assert failure(one) == "answer_memory_full"
    one.release_bytes()
    assert memory.held_bytes == 0


async def test_an_answer_that_is_complete_before_it_is_waited_for_has_its_prompt(
    tokens: GatewayTokenizer,
) -> None:
    prompt = with_echo(make_prompt([5, 6]), tokens, True)
    ask = ResolvedRequest("toy", [prompt], SamplingParams(max_tokens=0, seed=0), 99999, logprobs=1, echo=True)
    one = Generation(
        "a", ask, tokens, Silent(), GatewayMetrics(), 1 << 20, AnswerMemory(1 << 20), arrived_s=0.0, deadline_s=60.0  # type: ignore[arg-type]
    )  # fmt: skip
    one.submit_sequences()
    scores = [None, Logprob(6, -2.0, [])]
    one.streams[0].deliver_output(Output("a", 0, [], prompt_logprobs=scores, finish="length"), 0.0)
    one.streams[0].finish_sequence("length", 0.0)
    await one.wait_until_complete()
    assert [row.logprob for row in one.answers[0].take_piece().iter_rows()] == [None, -2.0]


def test_answers_that_wait_are_bounded_in_sum(tokens: GatewayTokenizer) -> None:
    memory, backend, metrics = AnswerMemory(1_000_000), Silent(), GatewayMetrics()

    def begun(name: str, tenant: str) -> Generation:
        one = Generation(
            name, asked(TOP, tenant), tokens, backend, metrics, 1 << 20, memory, arrived_s=0.0, deadline_s=60.0  # type: ignore[arg-type]
        )  # fmt: skip
        one.submit_sequences()
        return one

    def deliver(one: Generation, count: int) -> None:
        rows = scored(tokens, count, TOP)
        one.streams[0].deliver_output(Output(one.name, 0, [row.token for row in rows], rows), 0.0)

    greedy, modest = begun("greedy", "a"), begun("modest", "b")
    while greedy.failure is None:
        deliver(greedy, 100)
        assert memory.held_bytes < 1_000_000
    assert (greedy.failure.status, greedy.failure.code) == (503, "answer_memory_full")
    assert backend.left == ["greedy"]
    deliver(modest, 500)
    assert modest.failure is None
    greedy.release_bytes()
    modest.release_bytes()
    assert memory.held_bytes == 0


def ranked(tokens: GatewayTokenizer, prompt: list[int], top: int) -> list[Logprob | None]:
    """Scores of a prompt: of every second token the likeliest one is itself."""
    return [
        None,
        *(
            Logprob(token, -1.5, [(token + i % 2 + k, -1.0 - k) for k in range(top)], 2 - i % 2)
            for i, token in enumerate(prompt[1:])
        ),
    ]


@pytest.mark.parametrize("count", [1, 2, 129, 300])
@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_prompts_are_listed_as_vllm_lists_them(
    tokens: GatewayTokenizer, kind: type[ChatFormat | CompletionFormat], count: int, top: int
) -> None:
    prompt = [5 + i % 200 for i in range(count)]
    ask = replace(asked(None), prompts=[make_prompt(prompt)], prompt_logprobs=top, return_ids=True)
    answer = OutputText(ask, 0, ask.prompts[0], tokens)
    answer.feed_output(Output("r", 0, [7, 8], prompt_logprobs=ranked(tokens, prompt, 4), finish="length"))
    assert answer.held_bytes > 100 * count
    while answer.pack_logprobs(50):
        pass
    answer.end_sequence("length")
    form = kind(HEAD, ask, LogprobJson(tokens))
    body = msgspec.json.decode(b"".join(form.full_body_parts([answer], USAGE)))
    (choice,) = body["choices"]
    head = body if kind is ChatFormat else choice
    assert (head["prompt_token_ids"], choice["token_ids"]) == (prompt, [7, 8])
    first, *others = head["prompt_logprobs"]
    assert first is None and len(others) == count - 1
    for i, (token, entry) in enumerate(zip(prompt[1:], others, strict=True)):
        expected = {token: (-1.5, 2 - i % 2)}
        expected |= {token + i % 2 + k: (-1.0 - k, k + 1) for k in range(top) if i % 2 + k}
        assert entry == {
            str(one): {"logprob": value, "rank": rank, "decoded_token": tokens.token_text(one)}
            for one, (value, rank) in expected.items()
        }
        assert next(iter(entry)) == str(token), "the token itself comes first"


@pytest.mark.parametrize("top", [0, 20])
def test_a_part_of_a_prompts_scores_has_so_many_numbers(
    tokens: GatewayTokenizer, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alternatives count, too; and a token's text is written once, however often it is listed."""
    prompt = [5 + i % 20 for i in range(300)]
    ask = replace(asked(None), prompts=[make_prompt(prompt)], prompt_logprobs=top)
    answer = OutputText(ask, 0, ask.prompts[0], tokens)
    answer.feed_output(Output("r", 0, [7], prompt_logprobs=ranked(tokens, prompt, 20), finish="length"))
    while answer.pack_logprobs(50):
        pass
    decoded: list[int] = []
    text = type(tokens).token_text

    def note(tokenizer: GatewayTokenizer, token: int) -> str:
        decoded.append(token)
        return text(tokenizer, token)

    monkeypatch.setattr(type(tokens), "token_text", note)
    parts = list(prompt_score_parts(answer, LogprobJson(tokens)))
    assert max(part.count(b'"logprob":') for part in parts) <= 128
    assert len(decoded) == len(set(decoded))
    assert len(msgspec.json.decode(b"".join(parts))) == 300


def test_what_is_not_asked_for_is_not_there(tokens: GatewayTokenizer) -> None:
    ask = asked(None)
    for kind in (ChatFormat, CompletionFormat):
        form = kind(HEAD, ask, LogprobJson(tokens))
        text = b"".join(form.full_body_parts([answered(tokens, ask, 2, 0)], USAGE))
        assert b"token_ids" not in text and b"prompt_logprobs" not in text and b'"stop_reason":null' in text


def test_tokens_may_have_ids_for_names(tokens: GatewayTokenizer) -> None:
    ask, names = asked(1), LogprobJson(tokens, ids_as_names=True)
    (row, *_) = scored(tokens, 3, 1)
    chat = msgspec.json.decode(
        b"".join(ChatFormat(HEAD, ask, names).full_body_parts([answered(tokens, ask, 3, 1)], USAGE))
    )
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{row.token}" and entry["bytes"] == list(tokens.token_bytes(row.token))
    whole = CompletionFormat(HEAD, ask, names).full_body_parts([answered(tokens, ask, 3, 1)], USAGE)
    logprobs = msgspec.json.decode(b"".join(whole))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:0", "token_id:1", "token_id:2"]
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
