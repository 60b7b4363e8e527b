"""Every message survives the wire; nothing else is taken for one."""

from __future__ import annotations

import contextlib
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.eviction_report import KeptReport
from diptych.eviction_spec import KEEP_ALL, KeepSpec, decision_tokens
from diptych.messages import (
    Admit,
    ChannelMessage,
    Generate,
    Hello,
    Output,
    Prefill,
    Step,
    ToGateway,
    ToWorker,
    WorkerStats,
)
from diptych.request import CONTINUED, Grammar, SamplingParams, Tenancy

KINDS = [
    *((ToWorker, kind) for kind in get_args(ToWorker)),
    *((ToGateway, kind) for kind in get_args(ToGateway)),
]

SAMPLES: dict[object, object] = {
    str: "text",
    bool: True,
    int: 7,
    float: 0.5,
    bytes: b"\x00bytes",
    list[int]: [1, 2],
    list[str]: ["a"],
    tuple[str, ...]: ("seed",),
    dict[str, str]: {"a": "b"},
    dict[str, bytes]: {"shm": b"x"},
    dict[str, float]: {"queue": 0.25},
    dict[str, tuple[int, int]]: {"raw": (16, 4096), "tq4.s0": (112, 576)},
    list[tuple[str, int]]: [("r", 3)],
    list[Output]: [Output("r", 1, [5], finish="stop", seconds={"prefill": 1.0})],
    WorkerStats: WorkerStats(slabs_used=3, step_seconds=0.5, preemptions={"park": 2}),
    Tenancy: Tenancy("t", "s", -1),
    KeepSpec: KeepSpec(0.95, 128),
    KeptReport | None: KeptReport(3, 8, {"special": 2, "full": 1}, 4),
    SamplingParams: SamplingParams(
        max_tokens=3, seed=2**63, logit_bias={5: -1.0}, grammar=Grammar("regex", "a+")
    ),
}


def example(kind: type[ChannelMessage]) -> ChannelMessage:
    fields = msgspec.structs.fields(kind)
    return kind(*(SAMPLES[field.type] for field in fields))


def decode_until(kind: type[ChannelMessage], field: str) -> ChannelMessage:
    """An example of `kind` as a sender of before would send it, which does not know `field` and those after it."""
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(example(kind)))
    names = [one.name for one in msgspec.structs.fields(kind)]
    # The first entry is the message's kind.
    short = whole[: 1 + names.index(field)]
    return msgspec.msgpack.decode(msgspec.msgpack.encode(short), type=kind)


@pytest.mark.parametrize(("union", "kind"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_message_is_itself_after_the_wire(union: object, kind: type[ChannelMessage]) -> None:
    message = example(kind)
    decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(union)
    assert decoder.decode(msgspec.msgpack.encode(message)) == message
    assert type(decoder.decode(msgspec.msgpack.encode(message))) is kind


def test_both_directions_are_closed_to_each_other() -> None:
    assert not set(get_args(ToWorker)) & set(get_args(ToGateway))
    hello = msgspec.msgpack.encode(example(Hello))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(hello, type=ToWorker)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(ToGateway)
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # as the channel does
        assert isinstance(decoder.decode(noise), ChannelMessage)


def test_fields_at_the_end_with_defaults_may_be_absent() -> None:
    old = decode_until(Hello, "ended")
    assert isinstance(old, Hello) and old.traits == CONTINUED, "workers of before could continue everything"
    assert (old.ended, old.kv_classes, old.raw_chunk_bytes, old.worker) == ("", {}, 0, "text")
    assert (old.kv_losses, old.kv_auto, old.keep_classes, old.keep_rules) == ({}, False, [], ())
    assert (old.log_file, old.block_sequences, old.block_tokens) == ("", 0, 0)


@pytest.mark.parametrize("kind", [Prefill, Generate, Admit], ids=lambda kind: kind.__name__)
def test_an_order_without_a_keep_spec_keeps_everything(kind: type[ChannelMessage]) -> None:
    old = decode_until(kind, "keep")
    assert isinstance(old, Prefill | Generate | Admit) and not getattr(old, "defer_first", False)
    assert (old.keep, old.keep.evicts) == (KEEP_ALL, False)


@pytest.mark.parametrize(
    ("threshold", "boundary", "why"),
    [
        (0.0, 0, "at most 1, not 0.0"),
        (1.01, 0, "at most 1, not 1.01"),
        (float("nan"), 0, "at most 1, not nan"),
        (0.5, -64, "not -64 tokens"),
        (0.5, 63, "not 63 tokens"),
    ],
)
def test_a_keep_spec_that_makes_no_sense_is_refused(threshold: float, boundary: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        KeepSpec(threshold, boundary)
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.msgpack.decode(msgspec.msgpack.encode((threshold, boundary)), type=KeepSpec)


def test_decision_points_follow_the_answer() -> None:
    points = {tokens: decision_tokens(100, tokens) for tokens in (99, 100, 163, 164, 227, 228)}
    assert points == {99: 0, 100: 100, 163: 100, 164: 164, 227: 164, 228: 228}


def test_the_wire_is_compact() -> None:
    step = Step([Output(f"request-{index}", 0, [1234]) for index in range(64)])
    assert len(msgspec.msgpack.encode(step)) < 64 * 40
    prefill = Prefill("r", 0, list(range(1900)), [], SamplingParams(max_tokens=1, seed=0), 1.0)
    assert len(msgspec.msgpack.encode(prefill)) < 6500


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        example(Hello).worker = "other"  # type: ignore[attr-defined]
