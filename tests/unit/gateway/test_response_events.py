"""The last events of a long response with log-probabilities come in small parts, between which other tasks run."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import Logprob, Output
from diptych.request import SamplingParams
from services.gateway.generation.formats import MAX_WRITTEN_TOKENS, ResponseHead
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.output_text import OutputPiece, OutputText
from services.gateway.generation.scored_tokens import ScoredTokens
from services.gateway.openai.resolve import ResolvedRequest, make_prompt
from services.gateway.openai.schemas.response_schema import Usage
from services.gateway.parsing.answer_parts import AnswerPart
from services.gateway.responses.output_items import PART_BYTES
from services.gateway.responses.responses_format import ResponsesFormat
from services.gateway.tokenization.tokenizer import GatewayTokenizer

TOP, NUM_TOKENS = 20, 2000
USAGE = Usage(1, NUM_TOKENS, NUM_TOKENS + 1)
CALL = OutputPiece("", ScoredTokens(0), parts=(AnswerPart("call", "jump", 0),))


def events_of(parts: list[bytes]) -> list[dict[str, Any]]:
    frames = b"".join(parts).decode().split("\n\n")[:-1]
    return [json.loads(frame.partition("data: ")[2]) for frame in frames if not frame.endswith("[DONE]")]


def long_answer(tokens: GatewayTokenizer, ask: ResolvedRequest) -> OutputText:
    answer = OutputText(ask, 0, ask.prompts[0], tokens)
    rows = [
        Logprob(i % tokens.size, -i / 7, [((i + k) % tokens.size, -k / 3) for k in range(TOP)])
        for i in range(NUM_TOKENS)
    ]
    answer.feed_output(Output("r", 0, [row.token for row in rows], rows, finish="length"))
    answer.end_sequence("length")
    return answer


@pytest.mark.parametrize("end", ["closing", "failure", "call"])
def test_no_part_of_the_last_events_is_large(tokens: GatewayTokenizer, end: str) -> None:
    sampling, repeated = SamplingParams(max_tokens=9999, seed=0), b'{"repeated":{"metadata":{"a":"b"}}}'
    ask = ResolvedRequest("toy", [make_prompt([5])], sampling, 9999, logprobs=TOP, route_fields=repeated)
    answer = long_answer(tokens, ask)
    form = ResponsesFormat(ResponseHead("resp_x", 0, 'a "output":[] model', None), ask, LogprobJson(tokens))
    begun = [*form.begin_events(0)]
    pieces = answer.take_piece().split_pieces(MAX_WRITTEN_TOKENS)
    deltas = [part for piece in pieces for part in form.delta_events(0, piece)]
    kept_bytes = form.kept_bytes
    if end == "failure":
        last = list(form.failure_events(RequestFailure(FailureReason.WORKER_LOST, "as the test says")))
    else:
        called = form.delta_events(0, CALL) if end == "call" else ()
        last = list(chain(called, form.end_events(0, answer), form.closing_events(USAGE)))
    events = events_of([*begun, *deltas, *last])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    entries = [entry for event in events if event["type"].endswith("delta") for entry in event["logprobs"]]
    assert len(entries) == NUM_TOKENS and len(entries[0]["top_logprobs"]) == TOP
    response = events[-1]["response"]
    assert response["output"][0]["content"][0]["logprobs"] == entries and response["metadata"] == {"a": "b"}
    done = {event["type"].removeprefix("response."): event for event in events}
    if end != "failure":
        assert done["output_text.done"]["logprobs"] == entries
        assert done["content_part.done"]["part"]["logprobs"] == entries
    num_bytes = sum(map(len, deltas))
    assert num_bytes > 20 * PART_BYTES and sum(map(len, last)) > 0.9 * num_bytes
    assert max(map(len, last)) <= PART_BYTES
    # What waits for the end is there once.
    assert kept_bytes < num_bytes
