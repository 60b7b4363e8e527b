"""What official clients see of a model that thinks, in streams and in whole answers."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.model_folder import make_folder
from tests.system.scripted_gateway import Running, scripted
from tests.unit.gateway.thinking_model import MARKERS, THINKING_TEMPLATE

TEXT = "<think>\nthe quick fox\n</think>\n\nIt jumps over the dog."
THOUGHT, CONTENT = "the quick fox", "It jumps over the dog."


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_folder(tmp_path_factory.mktemp("thinking"), 512, MARKERS, THINKING_TEMPLATE)
    with scripted(folder, text=TEXT) as running:
        yield running


@pytest.fixture
def client(gateway: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.api, api_key="none") as made:
        yield made


def test_a_whole_answer_has_its_thought_apart(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hi"}], logprobs=True
    )
    [choice] = answer.choices
    assert choice.message.content == CONTENT and choice.finish_reason == "stop"
    assert choice.message.model_dump()["reasoning"] == THOUGHT
    assert choice.message.model_dump()["reasoning_content"] == THOUGHT
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert choice.logprobs is not None and choice.logprobs.content is not None
    names = [entry.token for entry in choice.logprobs.content]
    # The end token has none.
    assert len(names) == answer.usage.completion_tokens - 1
    assert answer.usage.completion_tokens_details.reasoning_tokens == names.index("</think>") + 1


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hi"}], logprobs=True
    )
    stream = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    thought, content, names, usage, finish = "", "", [], None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_unset=True)
            assert delta.get("reasoning") == delta.get("reasoning_content")
            assert not (content and "reasoning" in delta)
            thought += delta.get("reasoning", "")
            content += delta.get("content", "")
            finish += [choice.finish_reason] if choice.finish_reason else []
            if choice.logprobs is not None:
                names += [entry.token for entry in choice.logprobs.content or ()]
    assert (thought, content, finish) == (THOUGHT, CONTENT, ["stop"])
    assert usage == whole.usage
    assert whole.choices[0].logprobs is not None
    assert names == [entry.token for entry in whole.choices[0].logprobs.content or ()]


def test_stop_strings_do_not_stop_the_thought(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hi"}], stop=["quick", " over"]
    )
    message = answer.choices[0].message
    assert message.content == "It jumps" and message.model_dump()["reasoning"] == THOUGHT


def test_a_budget_and_a_schema_reach_the_worker(gateway: Running, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=9,
        response_format={"type": "json_object"},
        extra_body={"thinking_token_budget": 4},
    )
    sampling = gateway.script.seen[-1].sampling
    assert sampling.thought is not None and sampling.thought.tokens == 4
    assert sampling.grammar is not None and sampling.grammar.gate is not None
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
        client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            extra_body={"thinking_token_budget": 4},
        )
