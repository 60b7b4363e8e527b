"""Fields of vLLM over HTTP: their shapes from a script, and on real workers equal to what is known already."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deployment import Served, serve_parts
from tests.system.api_answers import HI, check_error, events
from tests.system.scripted_gateway import scripted
from tests.system.transformers_oracle import read_text

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, COMPLETION: {"prompt": "hi there"}}


def post(http: httpx.Client, path: str, **fields: Any) -> Any:
    answer = http.post(path, json={"model": "toy", "max_tokens": 12, **BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- shapes


@pytest.mark.parametrize("path", BODIES)
def test_token_ids_are_the_same_whole_and_streamed(http: httpx.Client, path: str) -> None:
    body = {**BODIES[path], "n": 2, "max_tokens": 80, "return_token_ids": True}
    whole = post(http, path, **body)
    for choice in whole["choices"]:
        owner = whole if path == CHAT else choice
        count = whole["usage"]["prompt_tokens"]
        assert len(owner["prompt_token_ids"]) == count and len(choice["token_ids"]) > 60
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    chunks = events(http, path, **body)
    for choice in whole["choices"]:
        own = [
            (chunk, one) for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]
        ]
        assert [token for _, one in own for token in one.get("token_ids", ())] == choice["token_ids"]
        first, *others = [chunk if path == CHAT else one for chunk, one in own]
        expected = (whole if path == CHAT else choice)["prompt_token_ids"]
        assert first["prompt_token_ids"] == expected
        assert not any("prompt_token_ids" in other for other in others)


@pytest.mark.parametrize("path", BODIES)
def test_answers_say_what_stopped_them(http: httpx.Client, path: str) -> None:
    def reasons(**fields: Any) -> set[Any]:
        whole = post(http, path, **{"max_tokens": 80, **fields})
        last = events(http, path, **{**BODIES[path], "max_tokens": 80, **fields})[-1]
        return {one["choices"][0]["stop_reason"] for one in (whole, last)}

    assert reasons() == {None} and reasons(max_tokens=3) == {None}
    assert reasons(stop=["two", "never"]) == {"two"}
    # The script ends with the lowest of all stop tokens; an end token of the model is no reason.
    assert reasons(stop_token_ids=[0]) == {None}
    assert reasons(stop_token_ids=[0], ignore_eos=True) == {0}


@pytest.mark.parametrize("path", BODIES)
def test_tokens_are_called_by_their_ids(http: httpx.Client, path: str) -> None:
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    body = {**BODIES[path], **logprobs, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = post(http, path, **body)["choices"][0]
    found = choice["logprobs"]
    names = [entry["token"] for entry in found["content"]] if path == CHAT else found["tokens"]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]
    plain = post(http, path, **BODIES[path], **logprobs)["choices"][0]["logprobs"]
    if path == CHAT:
        assert [entry["bytes"] for entry in plain["content"]] == [
            entry["bytes"] for entry in found["content"]
        ]
    else:
        assert plain["text_offset"] == found["text_offset"]


def test_one_answer_lists_the_prompt(http: httpx.Client) -> None:
    whole = post(http, CHAT, prompt_logprobs=2, n=2)
    first, *others = whole["prompt_logprobs"]
    assert first is None and len(others) == whole["usage"]["prompt_tokens"] - 1
    assert all(
        set(value) == {"logprob", "rank", "decoded_token"} for entry in others for value in entry.values()
    )
    choice = post(http, COMPLETION, prompt_logprobs=0, max_tokens=0)["choices"][0]
    assert (choice["prompt_logprobs"][0], choice["text"], choice["finish_reason"]) == (None, "", "length")


def test_fields_that_are_out_of_bounds_are_refused(http: httpx.Client) -> None:
    for path, body in BODIES.items():
        for field, value in (
            ("guided_regex", "a"),
            ("allowed_token_ids", [10**6]),
            ("bad_words", [" "]),
            ("truncate_prompt_tokens", 0),
            ("structured_outputs", {}),
        ):
            answer = http.post(path, json={"model": "toy", **body, field: value})
            code = "unsupported_parameter" if field.startswith("guided") else "invalid_value"
            check_error(answer, 400, code, field)


def test_unknown_fields_are_counted_and_served(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        scripted(folder, ignore_unknown=True) as lenient,
        httpx.Client(base_url=lenient.url, timeout=60) as http,
    ):
        for _ in range(3):
            post(http, CHAT, mood="good")
        parts = [{"type": "text", "text": "a", "x": 1}]
        post(http, CHAT, messages=[{"role": "user", "content": parts}])
        text = http.get("/metrics").text
    assert 'diptych:ignored_fields_total{field="mood"} 3.0' in text
    assert 'diptych:ignored_fields_total{field="messages[].content[].x"} 1.0' in text
    assert sum("unknown field 'mood'" in record.message for record in caplog.records) == 1


# ---- on workers


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_parts("--prefill", "1", "--decode", "1") as served:
        yield served


def ask(served: Served, **fields: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    path = CHAT if "messages" in body else COMPLETION
    answer = httpx.post(f"{served.url}{path}", json=body, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 600, 1500])
def test_scores_of_a_prompt_are_those_of_echo(served: Served, length: int) -> None:
    """Across the hand-off, chunks of a prompt, and prefixes that are cached: a scored prompt is computed anew."""
    check_scores(served, length)


@pytest.mark.timeout(600)
def test_scores_of_a_prompt_are_those_of_echo_on_two_ranks() -> None:
    """Each rank has half of the vocabulary's scores, so that the most likely tokens come from both."""
    with serve_parts("--prefill", "1", "--decode", "1", "--prefill-tp", "2", "--decode-tp", "2") as ranks:
        for length in (1, 65, 600):
            check_scores(ranks, length)


def check_scores(served: Served, length: int) -> None:
    """Scores of a prompt of so many tokens, alone and with an answer that echoes it."""
    start = random.Random(length).randrange(10_000)
    prompt = read_text()[start : start + length]
    echoed = ask(served, prompt=prompt, echo=True, logprobs=3, return_tokens_as_token_ids=True)["choices"][0][
        "logprobs"
    ]
    for _ in range(2):
        answer = ask(served, prompt=prompt, prompt_logprobs=3, logprobs=3, return_tokens_as_token_ids=True)
        (choice,) = answer["choices"]
        first, *others = choice["prompt_logprobs"]
        assert first is None and len(others) == length - 1
        for i, (token, entry) in enumerate(zip(prompt[1:], others, strict=True), 1):
            assert entry[str(token)]["logprob"] == echoed["token_logprobs"][i]
            tops = {f"token_id:{one}": value["logprob"] for one, value in entry.items()}
            assert tops == echoed["top_logprobs"][i]
            ranks = sorted(value["rank"] for value in entry.values())
            assert ranks[:3] == [1, 2, 3], entry
        assert choice["logprobs"]["tokens"] == echoed["tokens"][length:]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.timeout(600)
def test_answers_keep_to_what_was_asked(served: Served) -> None:
    free = ask(served, prompt="def read(self):", return_token_ids=True)["choices"][0]["token_ids"]
    allowed = sorted({*free[:6], 300, 301, 302})
    named = ask(served, prompt="def read(self):", allowed_token_ids=allowed, return_token_ids=True)
    assert set(named["choices"][0]["token_ids"]) <= set(allowed)
    assert named["choices"][0]["token_ids"][:4] == free[:4]
    chosen = ask(
        served,
        prompt="Is a list ordered? ",
        structured_outputs={"choice": ["yes", "never"]},
        ignore_eos=False,
    )
    assert chosen["choices"][0]["text"] in ("yes", "never")
    digits = ask(served, prompt="x = ", structured_outputs={"regex": "[0-9]{9}"}, ignore_eos=False)
    assert len(digits["choices"][0]["text"]) == 9 and digits["choices"][0]["text"].isdigit()
    message = [{"role": "user", "content": "Say a or b."}]
    lark = ask(served, messages=message, structured_outputs={"grammar": 'start: "a" | "b"'}, ignore_eos=False)
    assert lark["choices"][0]["message"]["content"] in ("a", "b")


@pytest.mark.timeout(600)
def test_bad_words_are_left_out_across_the_hand_off(served: Served) -> None:
    """Words whose first token the prefill worker has drawn, too."""
    prompt = "for name in names:\n    print("
    text = ask(served, prompt=prompt)["choices"][0]["text"]
    words = [text[i : i + 4].strip() for i in range(0, 12, 3)]
    words = [word for word in dict.fromkeys(words) if word and f" {word}" not in prompt]
    without = ask(served, prompt=prompt, bad_words=words)["choices"][0]["text"]
    assert without != text
    tokens = [served_tokens(served, prefix + word) for word in words for prefix in ("", " ")]
    ids = ask(served, prompt=prompt, bad_words=words, return_token_ids=True)["choices"][0]["token_ids"]
    for bad in tokens[::2]:
        assert not any(ids[i : i + len(bad)] == bad for i in range(len(ids))), bad


def served_tokens(served: Served, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    found: list[int] = httpx.post(f"{served.url}/tokenize", json=body, trust_env=False).json()["tokens"]
    return found


@pytest.mark.timeout(600)
def test_what_leaves_no_token_is_its_clients_fault(served: Served) -> None:
    """Never a failure of the service, whether it is seen before the work or amid it."""
    (letter,) = served_tokens(served, "a")
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}
    call = {"messages": HI, "tools": [tool], "tool_choice": "required"}
    for code, fields in (
        ("invalid_value", {"allowed_token_ids": [letter], "bad_words": ["a"]}),
        ("no_token_left", {"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}),
        ("no_token_left", {"structured_outputs": {"regex": "zza"}, "bad_words": ["a", "za"]}),
        ("no_token_left", {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [letter + 1]}),
        ("no_token_left", {"allowed_token_ids": [letter], "bad_words": ["aa"], "min_tokens": 2}),
        ("no_token_left", {"allowed_token_ids": [letter], **call}),
    ):
        path = CHAT if "messages" in fields else COMPLETION
        body = {"model": "tiny", "max_tokens": 24, "temperature": 0, **BODIES[path], **fields}
        answer = httpx.post(f"{served.url}{path}", json=body, timeout=300, trust_env=False)
        found = answer.json().get("error", answer.json())
        assert (answer.status_code, found.get("code")) == (400, code), (fields, answer.text)
        streamed = httpx.post(
            f"{served.url}{path}", json={**body, "stream": True}, timeout=300, trust_env=False
        )
        assert f'"code":"{code}"' in streamed.text, (fields, streamed.text)
    assert ask(served, prompt="a")["choices"][0]["text"]


@pytest.mark.timeout(600)
def test_a_cut_prompt_is_answered_as_its_last_tokens(served: Served) -> None:
    prompt = read_text()[5000:5400]
    for kept in (1, 64, 333, -1):
        cut = ask(served, prompt=prompt, truncate_prompt_tokens=kept, return_token_ids=True)
        tail = ask(served, prompt=prompt if kept == -1 else prompt[-kept:], return_token_ids=True)
        assert cut["choices"][0]["token_ids"] == tail["choices"][0]["token_ids"]
        assert cut["usage"]["prompt_tokens"] == tail["usage"]["prompt_tokens"]
