"""Parts `buffer` and `handoff`: a small transfer buffer under many requests, and the time of a hand-off."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

from benchmarks.device_parts.tokens import PAIR, REST_S, on_device
from benchmarks.gpu_parts.check_part import PartContext
from benchmarks.load.answer_checks import FIRST_ID, VOCAB, AskedRequest, ask_all
from benchmarks.load.channel_deployment import ChannelAnswer, ChannelDeployment, wait_answers
from diptych.chunks import CHUNK_TOKENS
from diptych.request import RequestStage, SamplingParams
from kvcache.layout import KvLayout
from tests.support.waiting import comes_true

# Of the embedded model in float32.
CHUNK_BYTES = KvLayout(layers=6, kv_heads=4, head_dim=32, dtype="float32").chunk_bytes
MAX_TOKENS, NEW_TOKENS, OPEN, SERVED = 640, 16, 32, 128
TWO_REQUESTS = 2 * -(-MAX_TOKENS // CHUNK_TOKENS) * CHUNK_BYTES
LARGE_BUFFER = 40 * TWO_REQUESTS
LEASED, LEASED_TOKENS = 4, 300
MOVED, MOVED_TOKENS, WARM = 40, 512, 2
LONG_TOKENS, STEP_TOKENS = 1024, 128


def make_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_ID, VOCAB) for _ in range(tokens)] for _ in range(count)]


def greedy(num_tokens: int) -> SamplingParams:
    """An answer of so many tokens, unless it ends earlier."""
    return SamplingParams(num_tokens, 0, temperature=0.0)


def measure_buffer(context: PartContext) -> None:
    """32 open requests over a buffer for two of them, and over a large one, by turns; and what leases hold."""
    count = max(OPEN, int(SERVED * context.share))
    asked = [
        AskedRequest(prompt, greedy(NEW_TOKENS))
        for prompt in make_prompts(count, MAX_TOKENS - NEW_TOKENS, seed=3)
    ]
    flags = (*PAIR, *on_device(context), "--max-model-len", str(MAX_TOKENS))
    rates: dict[str, list[float]] = {"small": [], "large": []}
    peak, failed = 0.0, 0
    with ExitStack() as stack:
        deployments = {
            name: stack.enter_context(ChannelDeployment(*flags, *buffer_flags(context, size)))
            for name, size in (("small", TWO_REQUESTS), ("large", LARGE_BUFFER))
        }
        for name in ("small", "large", "large", "small"):
            ask_all(deployments[name], asked[:2])
            began_s = time.monotonic()
            # Each time other prompts: those of the tree would not be computed again.
            answers, used = ask_open(deployments[name], shift_prompts(asked, len(rates[name])))
            rates[name].append(sum(len(one.tokens) for one in answers) / (time.monotonic() - began_s))
            failed += sum(one.failure is not None or not one.finish for one in answers)
            peak = max(peak, used if name == "small" else 0.0)
        context.record({"leased_device_slabs": leased_device_slabs(deployments["large"])})
    ratio = sum(rates["small"]) / sum(rates["large"])
    context.record({
        "buffer_answers": 4 * count, "small_failed": failed, "buffer_peak_ratio": round(peak, 3),
        "throughput_ratio": round(ratio, 3),
        "tokens_per_s": {name: [round(rate, 1) for rate in found] for name, found in rates.items()},
    })  # fmt: skip


def buffer_flags(context: PartContext, num_bytes: int) -> tuple[str, ...]:
    """The flag for a buffer of this size; CPU workers have none."""
    return () if context.device == "cpu" else ("--transfer-buffer-bytes", str(num_bytes))


def shift_prompts(asked: Sequence[AskedRequest], by: int) -> list[AskedRequest]:
    """The same requests with other tokens, unless `by` is 0."""
    return [
        AskedRequest(
            [FIRST_ID + (token - FIRST_ID + by) % (VOCAB - FIRST_ID) for token in one.prompt], one.sampling
        )
        for one in asked
    ]


def ask_open(
    deployment: ChannelDeployment, asked: Sequence[AskedRequest]
) -> tuple[list[ChannelAnswer], float]:
    """All answers, with at most `OPEN` open requests at a time, and the largest used part of a buffer that was seen."""
    answers, used = list[ChannelAnswer](), 0.0
    while len(answers) < len(asked) or not all(answer.ended.is_set() for answer in answers):
        while len(answers) < len(asked) and sum(not answer.ended.is_set() for answer in answers) < OPEN:
            one = asked[len(answers)]
            answers.append(deployment.submit(one.prompt, one.sampling))
        used = max(used, used_share(deployment))
        time.sleep(0.02)
    return answers, used


def used_share(deployment: ChannelDeployment) -> float:
    """The used part of the fullest buffer."""
    return max(stats.buffer_used / max(1, stats.buffer_slabs) for stats in deployment.stats().values())


def leased_device_slabs(deployment: ChannelDeployment) -> int:
    """Slabs that the prefill worker holds on its device while all it has is under lease.

    Raises:
        RuntimeError: not all prompts came under lease.
    """
    with deployment.paused("decode-0"):
        answers = [
            deployment.submit(prompt, greedy(NEW_TOKENS))
            for prompt in make_prompts(LEASED, LEASED_TOKENS, seed=4)
        ]

        def all_leased() -> bool:
            stats = deployment.stats()["prefill-0"]
            return stats.leases >= LEASED and not stats.slabs_used

        # Statistics come with heartbeats.
        comes_true(all_leased, REST_S, pause_s=0.02)
        stats = deployment.stats()["prefill-0"]
    wait_answers(answers)
    if stats.leases < LEASED:
        raise RuntimeError(f"{stats.leases} leases of {LEASED} prompts after {REST_S} s")
    return stats.slabs_used


def measure_handoff(context: PartContext) -> None:
    """Hand-offs one at a time beside those of CPU workers, by turns; and those of prompts of several steps."""
    count = max(10, int(MOVED * context.share))
    with ExitStack() as stack:
        deployments = {
            place: stack.enter_context(ChannelDeployment(*PAIR, "--device", place, "--dtype", "float32"))
            for place in dict.fromkeys(("cpu", context.device))
        }
        found = hand_over(deployments, make_prompts(count + WARM, MOVED_TOKENS, seed=5))
    taken = {
        name: {place: median(map(seconds, answers)) for place, answers in found.items()}
        for name, seconds in (("handoff", transfer_s), ("offer", offer_s), ("pull", exposed_s))
    }
    context.record(
        {f"{name}_ms": {k: round(v * 1e3, 3) for k, v in one.items()} for name, one in taken.items()}
    )
    context.record({
        f"{name}_ratio": round(one[context.device] / one["cpu"], 3) for name, one in taken.items() if one["cpu"]
    })  # fmt: skip
    steps = ("--max-num-batched-tokens", str(STEP_TOKENS))
    with ChannelDeployment(*PAIR, *on_device(context), *steps) as deployment:
        deployment.pull_ahead()
        long = hand_over({"long": deployment}, make_prompts(count + WARM, LONG_TOKENS, seed=6))["long"]
    context.record({"hidden_share": round(median(map(hidden_share, long)), 3)})


def hand_over(
    deployments: dict[str, ChannelDeployment], prompts: Sequence[Sequence[int]]
) -> dict[str, list[ChannelAnswer]]:
    """The answers to prompts one after the other, by turns, that were handed over; but for the first ones."""
    found: dict[str, list[ChannelAnswer]] = {name: [] for name in deployments}
    for prompt in prompts:
        for name, deployment in deployments.items():
            answer = deployment.submit(prompt, greedy(4))
            wait_answers([answer])
            if answer.moved:
                found[name].append(answer)
    return {name: answers[WARM:] for name, answers in found.items()}


def transfer_s(answer: ChannelAnswer) -> float:
    """Seconds from the ticket to the permission to decode, as the gateway sees them."""
    return answer.entered_s[RequestStage.DECODING] - answer.entered_s[RequestStage.TRANSFERRING]


def offer_s(answer: ChannelAnswer) -> float:
    """Seconds from the first token to the ticket."""
    return answer.entered_s[RequestStage.TRANSFERRING] - answer.entered_s[RequestStage.PREFILLED]


def exposed_s(answer: ChannelAnswer) -> float:
    """Seconds of pulling after the ticket."""
    return answer.moved[-1].exposed_s


def hidden_share(answer: ChannelAnswer) -> float:
    """The part of the pulling that came before the ticket."""
    moved = answer.moved[-1]
    return moved.hidden_s / ((moved.hidden_s + moved.exposed_s) or 1.0)
