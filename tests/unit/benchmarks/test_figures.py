"""The arithmetic of benchmarks, and their client against a server that says what it is given."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.handoff import digest_share, gap_ratios, total
from benchmarks.interference import Seen, compare, gaps_within, percentile, summary
from benchmarks.load.deployment import StampedStream
from benchmarks.planner import least_scale
from diptych.slo import Slo
from planner.types import Job, JobResult

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WORD, LAST = b'c\r\ndata: {"a":1}\n\n\r\n', b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("start_s", "end_s", "expected"),
    [
        (0.0, 9.0, [1.0, 4.0, 0.5]),
        (2.5, 3.0, [4.0]),  # both ends of the gap are outside
        (1.5, 6.0, [1.0, 4.0]),
        (2.0, 6.0, [4.0]),  # touching from outside does not count
        (7.0, 9.0, []),
    ],
)
def test_a_gap_counts_whole_when_it_touches_the_window(
    start_s: float, end_s: float, expected: list[float]
) -> None:
    assert gaps_within([1.0, 2.0, 6.0, 6.5], start_s, end_s) == expected


@given(st.lists(st.floats(0, 1e3), min_size=1), st.integers(1, 100))
def test_percentile_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[float], percent: int
) -> None:
    found = percentile(values, percent)

    def enough(limit: float) -> bool:
        return sum(value <= limit for value in values) * 100 >= percent * len(values)

    assert found in values and enough(found)
    assert not any(enough(value) for value in values if value < found)


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 99)


def test_figures_are_medians_over_rounds_of_each_rounds_longest_gap() -> None:
    rounds = [Seen(calm=[0.002], gaps=[0.001] * 200 + [longest], ttft_s=0.1) for longest in (0.03, 0.01, 9.0)]
    assert summary(rounds) == {
        "max_gap_ms": 30.0, "p99_ms": 1.0, "median_ms": 1.0,
        "calm_max_gap_ms": 2.0, "calm_p99_ms": 2.0, "prompt_ttft_ms": 100.0,
    }  # fmt: skip


def test_ratios_are_against_the_better_colocated_deployment_of_each_figure() -> None:
    found = {
        "chunked": {"max_gap_ms": 100.0, "p99_ms": 90.0},
        "unchunked": {"max_gap_ms": 300.0, "p99_ms": 60.0},
        "disaggregated": {"max_gap_ms": 10.0, "p99_ms": 5.0},
    }
    assert compare(found) == {"gap_ratio": 10.0, "p99_ratio": 12.0}


async def feed_stream(*pieces: bytes) -> StampedStream:
    """A stream from a server that sends `pieces` one by one and hangs up; all of it has arrived."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        stream = await StampedStream.open(port, prompt="x")
        async with asyncio.timeout(10):
            await stream.closed.wait()
    return stream


async def test_every_event_is_stamped_also_when_several_come_at_once() -> None:
    stream = await feed_stream(HEAD, WORD, WORD + WORD, LAST)
    await stream.done()
    assert len(stream.stamps_s) == 3
    assert stream.stamps_s[0] < stream.stamps_s[1] == stream.stamps_s[2]
    await stream.until(3)
    with pytest.raises(RuntimeError, match="after 3 events"):
        await stream.until(4)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((b'HTTP/1.1 503 Busy\r\n\r\n{"error": {}}',), "503 Busy"),
        ((HEAD, WORD, b'2d\r\ndata: {"error": {"code": "worker_lost"}}\n\n\r\n', LAST), "worker_lost"),
        ((HEAD, WORD), "ended before the answer did"),
    ],
)
async def test_a_stream_that_fails_is_never_measured(pieces: tuple[bytes, ...], message: str) -> None:
    stream = await feed_stream(*pieces)
    with pytest.raises(RuntimeError, match=message):
        await stream.done()


def test_gaps_of_a_hand_off_are_compared_length_by_length() -> None:
    found = {
        "split": {128: [0.03, 0.02, 0.9], 1900: [0.33, 0.33, 0.33]},
        "whole": {128: [0.02, 0.02, 0.02], 1900: [0.30, 0.11, 0.33]},
    }
    assert gap_ratios(found) == {128: pytest.approx(1.5), 1900: pytest.approx(1.1)}


def test_samples_of_a_metric_are_added_up_by_label() -> None:
    text = "\n".join(
        ['# HELP a_total x', 'a_total{part="hidden",w="1"} 2.0', 'a_total{part="hidden",w="2"} 0.5',
         'a_total{part="exposed",w="1"} 8.0', 'a_total_more{part="hidden"} 100.0', "b_total 3.0"]
    )  # fmt: skip
    assert total(text, "a_total", part="hidden") == 2.5 and total(text, "a_total") == 10.5
    assert total(text, "b_total") == 3.0 and total(text, "c_total") == 0.0


def test_the_share_of_hashing_is_of_both_ends() -> None:
    assert digest_share(1.0, 3.0, 2.0) == 0.5
    assert digest_share(1.0, 2.0, 2.5) == pytest.approx(1 / 3)  # no less than nothing at the target


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([0.5, 0.9, 1.0]),
)
def test_objectives_may_be_as_tight_as_so_many_requests_keep(
    times: list[tuple[int, int, bool]], attainment: float
) -> None:
    slo = Slo(2.0, 0.5, attainment)
    served = [
        JobResult(Job(0.0, 1, 2), ttft / 100, tpot / 100, 1.0, "kv" if fails else "")
        for ttft, tpot, fails in times
    ]
    scale = least_scale(served, slo)

    def enough(by: float) -> bool:
        scaled = Slo(slo.ttft_s * by, slo.tpot_s * by)
        return sum(one.meets_slo(scaled) for one in served) >= attainment * len(served) - 1e-9

    if scale == float("inf"):
        assert sum(not one.failed for one in served) < attainment * len(served)
    else:
        assert enough(scale * (1 + 1e-9)) and (scale == 0 or not enough(scale * (1 - 1e-9)))


def test_of_ten_requests_the_ninth_says_how_tight() -> None:
    served = [JobResult(Job(0.0, 1, 2), float(number), 0.0, 1.0) for number in range(1, 11)]
    assert least_scale(served, Slo(2.0, 0.5, 0.9)) == 4.5
