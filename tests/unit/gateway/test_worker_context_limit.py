"""What the workers can take bounds a request at the door, whatever the gateway was started with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.errors import RequestError
from diptych.request import SamplingParams
from services.gateway.openai.resolve import ResolvedRequest, fit_worker_context, make_prompt


def ask(length: int, max_tokens: int, context_tokens: int = 32_768) -> ResolvedRequest:
    return ResolvedRequest(
        "m", [make_prompt([1] * length)], SamplingParams(max_tokens=max_tokens, seed=0), context_tokens
    )


@pytest.mark.parametrize(
    ("length", "max_tokens"),
    [
        pytest.param(5000, 10, id="prompt"),
        pytest.param(4096, 10, id="no room for one token"),
        pytest.param(4000, 97, id="prompt and answer"),
        pytest.param(4097, 0, id="to be scored"),
    ],
)
def test_what_is_longer_than_the_workers_take_is_a_400(length: int, max_tokens: int) -> None:
    asked = ask(length, max_tokens)
    with pytest.raises(RequestError) as caught:
        fit_worker_context(asked, 4096)
    assert (caught.value.failure.status, caught.value.failure.code) == (400, "context_length_exceeded")
    assert "4096" in str(caught.value)
    assert fit_worker_context(asked, 32_768) is asked


def test_what_fits_is_served_with_the_room_there_is() -> None:
    assert fit_worker_context(ask(4000, 96), 4096).context_tokens == 4096
    assert fit_worker_context(ask(4096, 0), 4096).context_tokens == 4096
    open_end = fit_worker_context(
        ask(4000, 32_768 - 4000), 4096
    )  # no 'max_tokens': as many as there is room for
    assert open_end.sampling_for(open_end.prompts[0], 0).max_tokens == 96


def test_an_answer_that_takes_what_there_is_is_clipped() -> None:
    asked = replace(ask(4000, 300), clips_length=True)
    served = fit_worker_context(asked, 4096)
    assert served.sampling_for(served.prompts[0], 0).max_tokens == 96
    with pytest.raises(RequestError):
        fit_worker_context(replace(ask(4096, 300), clips_length=True), 4096)
