"""A `Step` that is too long for one frame is cut, and says the same."""

from __future__ import annotations

import msgspec
import pytest

from diptych.channel import frames
from diptych.channel.frames import (
    MAX_FRAME_BYTES,
    STEP_BYTES,
    decode_from_worker,
    pack_message,
    pack_pieces,
)
from diptych.channel.hub import ChannelHub
from diptych.errors import ChannelError
from diptych.messages import Failed, Logprob, Output, Step
from tests.unit.channel.endpoints import Dial, meet_each_other, receive_from


def scored(count: int) -> list[Logprob | None]:
    return [None, *(Logprob(token, -1.5, [(token, -1.5)] * 5) for token in range(count - 1))]


def test_a_prompt_of_two_hundred_thousand_scored_tokens_passes() -> None:
    """It ended the worker, and then the next one."""
    output = Output("r", 1, [5], prompt_logprobs=scored(200_000), finish="length", cached_tokens=64)
    with pytest.raises(ChannelError, match=f"limit of {MAX_FRAME_BYTES}"):
        pack_message(Step([output]))
    pieces = pack_pieces(Step([Output("q", 1, [7]), output, Output("s", 2, [9])]))
    assert max(map(len, pieces)) <= STEP_BYTES
    parts = [part for piece in pieces for part in steps(piece)]
    assert [(one.request, one.tokens) for one in parts if one.tokens] == [("q", [7]), ("r", [5]), ("s", [9])]
    mine = [one for one in parts if one.request == "r"]
    assert [item for one in mine for item in one.prompt_logprobs or []] == output.prompt_logprobs
    assert [one.finish for one in mine] == [None] * (len(mine) - 1) + ["length"], "what ends it comes last"
    assert mine[-1].cached_tokens == 64


def steps(piece: bytes) -> list[Output]:
    message = decode_from_worker(piece)
    assert isinstance(message, Step)
    return message.outputs


def test_each_piece_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread does it: a long prompt was encoded again for every halving."""
    encode, num_bytes = msgspec.msgpack.encode, 0

    def counted(message: object) -> bytes:
        nonlocal num_bytes
        payload = encode(message)
        num_bytes += len(payload)
        return payload

    outputs = [
        Output(f"r{i}", 1, [5], prompt_logprobs=scored(count)) for i, count in enumerate((9, 131_000, 9))
    ]
    outputs += [Output(f"s{number}", 1, [number]) for number in range(100)]
    monkeypatch.setattr(msgspec.msgpack, "encode", counted)
    pieces = pack_pieces(Step(outputs))
    assert len(pieces) > 10 and num_bytes == sum(map(len, pieces))
    parts = [part for piece in pieces for part in steps(piece)]
    assert [one.request for one in parts if one.tokens] == [output.request for output in outputs]


def test_tokens_with_more_alternatives_than_expected_are_cut_again() -> None:
    uneven = [Logprob(1, -1.0, [(2, -1.5)] * 100)] * 50_000 + scored(2)
    pieces = pack_pieces(Step([Output("r", 1, [5], prompt_logprobs=uneven)]))
    assert max(map(len, pieces)) <= STEP_BYTES
    assert [one for piece in pieces for part in steps(piece) for one in part.prompt_logprobs or []] == uneven


def test_what_is_short_enough_is_one_piece() -> None:
    for step in (Step([Output("r", 1, [5]), Output("q", 1, [6], prompt_logprobs=scored(3))]), Step([])):
        assert pack_pieces(step) == [pack_message(step)]


def test_what_cannot_be_cut_is_still_refused() -> None:
    with pytest.raises(ChannelError, match="longer than the limit"):
        pack_pieces(Failed("r", 1, "a", "b" * (MAX_FRAME_BYTES + 1)))


async def test_pieces_arrive_one_after_the_other(
    hub: ChannelHub, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "STEP_BYTES", 2000)
    link = dial(hub)
    await meet_each_other(hub, link)
    output = Output("r", 1, [5], prompt_logprobs=scored(1000))
    link.send(Step([output]))
    received: list[Logprob | None] = []
    while True:
        message = await receive_from(hub, Step)
        assert isinstance(message, Step)
        received += message.outputs[0].prompt_logprobs or []
        if message.outputs[0].tokens:
            break
    assert received == output.prompt_logprobs and link.num_broken_sessions == 0
