"""Prompts of conversations: the same as transformers renders, and every failure is the request's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from diptych.errors import RequestError
from services.gateway.tokenization.chat_template import ChatTemplate
from tests.unit.gateway.chat_template_samples import CONVERSATIONS, TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
LEFT_OUT = {"odd": ("tool",)}  # roles that templates pass over
TINY = Path(__file__).parents[3] / "models" / "tiny" / "chat_template.jinja"


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    load: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = load(tokenizer_object=backend, **SPECIAL)
    return made


def source_of(name: str) -> str:
    return TINY.read_text() if name == "tiny" else TEMPLATES[name]


@pytest.mark.parametrize("mode", ["prompt", "whole", "open"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", [*TEMPLATES, "tiny"])
def test_prompts_are_those_of_transformers(
    name: str, conversation: str, mode: str, reference: PreTrainedTokenizerFast
) -> None:
    source, messages = source_of(name), CONVERSATIONS[conversation]
    if "developer" not in source:
        roles = {"developer": "system"}
        messages = [message | {"role": roles.get(message["role"], message["role"])} for message in messages]
    try:
        expected: Any = reference.apply_chat_template(
            messages,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=mode == "prompt",
            continue_final_message=mode == "open",
        )
    except Exception:
        expected = None
    template = ChatTemplate(source, SPECIAL)
    left_out = [message["content"] for message in messages if message["role"] in LEFT_OUT.get(name, ())]
    if left_out:
        assert expected is None or left_out[0] not in expected
        expected = None
    if mode != "open" and expected is not None and "look_up" not in expected:
        # A template that drops calls is refused.
        expected = expected if not any(message.get("tool_calls") for message in messages) else None
    messages = CONVERSATIONS[conversation]
    if expected is None:
        with pytest.raises(RequestError) as caught:
            template.render_conversation(messages, mode == "prompt", mode == "open")
        assert caught.value.failure.status == 400 and (caught.value.failure.param or "").startswith(
            "messages"
        )
    else:
        assert template.render_conversation(messages, mode == "prompt", mode == "open") == expected


def test_most_of_the_comparisons_are_of_prompts(reference: PreTrainedTokenizerFast) -> None:
    rendered = 0
    for name in TEMPLATES:
        for messages in CONVERSATIONS.values():
            try:
                ChatTemplate(TEMPLATES[name], SPECIAL).render_conversation(messages)
            except RequestError:
                continue
            rendered += 1
    assert rendered >= 0.7 * len(TEMPLATES) * len(CONVERSATIONS)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("thinking", {"enable_thinking": False}),
        ("thinking", {"enable_thinking": True}),
        ("headers", {"date_string": "today"}),
    ],
)
def test_options_reach_the_template(
    name: str, options: dict[str, Any], reference: PreTrainedTokenizerFast
) -> None:
    messages = CONVERSATIONS["reasoning"]
    expected: Any = reference.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True, **options
    )
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    assert template.render_conversation(messages, options=options) == expected
    assert (template.render_conversation(messages) == expected) == (options == {"enable_thinking": True})


@pytest.mark.parametrize(
    "option", ["frobnicate", "messages", "tools", "bos_token", "add_generation_prompt", "namespace"]
)
def test_options_that_no_client_has_to_set_are_refused(option: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(TEMPLATES["headers"], SPECIAL).render_conversation(
            CONVERSATIONS["question"], options={option: 1}
        )
    assert caught.value.failure.param == "chat_template_kwargs" and "it has date_string" in caught.value.what


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_developer_message_is_in_the_prompt_of_every_template(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    prompt = template.render_conversation(messages)
    assert "Be kind." in prompt and prompt != template.render_conversation(messages[1:])
    assert prompt == template.render_conversation([messages[0] | {"role": "system"}, messages[1]])


def test_a_developer_message_stays_one_where_the_template_knows_it() -> None:
    source = (
        "{% for m in messages if m.role in ('developer', 'user') %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate(source, {}).render_conversation(messages) == "developer:a;user:b;"


@pytest.mark.parametrize(
    ("name", "messages", "where"),
    [
        ("odd", [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], "messages[1]"),
        ("chatml", [{"role": "function", "content": "a"}, {"role": "user", "content": "a"}], "messages[0]"),
        (
            "chatml",
            [{"role": "user", "content": "You help."}, {"role": "function", "content": "You"}],
            "messages[1]",
        ),
    ],
)
def test_no_message_is_left_out_in_silence(name: str, messages: list[dict[str, Any]], where: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError) as caught:
            template.render_conversation(messages)
        assert caught.value.failure.param == where and caught.value.failure.status == 400


def test_what_templates_cut_from_answers_does_not_count_as_left_out() -> None:
    turns = CONVERSATIONS["turns"]
    prompt = ChatTemplate(TEMPLATES["thinking"], SPECIAL).render_conversation(turns)
    assert "hm" not in prompt and "two" in prompt


def test_one_conversation_does_not_vouch_for_another() -> None:
    source = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.name }}{% endfor %}"
    template = ChatTemplate(source, {})
    template.render_conversation(
        [{"role": "user", "content": "a", "name": "diptych1shown"}, {"role": "tool", "content": "b"}]
    )
    with pytest.raises(RequestError):
        template.render_conversation([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}])
    with pytest.raises(RequestError):
        template.render_conversation(
            [{"role": "user", "content": "a", "name": "x"}, {"role": "tool", "content": "b"}]
        )


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].tool_calls | tojson }}", {"tool_calls": [{"arguments": deep(20_000)}]}),
        ("{{ messages[0].content.upper() + strftime_now(1) }}", {}),
        ("{{ 'x' * (10 ** 30) }}", {}),
        ("{{ 1 / (messages | length - 1) }}", {}),
        ("{{ {}[messages[0].content] }}{{ messages[5].role }}", {}),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", {}),
        ("{{ range(10 ** 9) | list }}", {}),
        ("{% for c in messages[0].content %}{{ c | attr('nothing') | int + 'x' }}{% endfor %}", {}),
    ],
)
def test_whatever_a_template_raises_is_the_request_s_error(source: str, message: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, SPECIAL).render_conversation([{"role": "user", "content": "x"} | message])
    assert caught.value.failure.status == 400 and caught.value.failure.param == "messages"


@pytest.mark.parametrize("last", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_a_message_without_text_cannot_be_continued(last: dict[str, Any]) -> None:
    template = ChatTemplate(TEMPLATES["chatml"], SPECIAL)
    with pytest.raises(RequestError) as caught:
        template.render_conversation([{"role": "user", "content": "x"}, last], False, True)
    assert caught.value.failure.param == "messages[1].content"


def test_what_a_template_says_is_reported() -> None:
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        ChatTemplate(TEMPLATES["strict"], SPECIAL).render_conversation(
            [{"role": "assistant", "content": "x"}]
        )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
        "{{ namespace(__init__=1) }}",
        "{{ dict.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'x' %}",
    ],
)
def test_templates_reach_nothing_outside(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source, {}).render_conversation([{"role": "user", "content": "x"}])
