"""Part `faults`: kills in every stage of a request, clients that leave, and a source that stands still."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Sequence

from benchmarks.device_parts.faults import PHASES, STEADY_S, FaultyDeployment
from benchmarks.gpu_parts.check_part import PartContext
from benchmarks.load.answer_checks import ask_reference, compare_answers, make_requests
from benchmarks.load.channel_deployment import DEVICE_BOOKS, ChannelAnswer, ChannelDeployment, wait_answers
from benchmarks.vllm_parts.tokens import ALONE, KINDS, REST_S, TWO_PAIRS, vllm_flags
from diptych.failure_statuses import RULES
from router.requests.continuable import can_continue

NUM_ASKED, STREAMS, NEW_TOKENS = 48, 8, 40
KILLS, LEAVING, STOPPED_S, ANSWERS_S = 40, 300, 60.0, 180.0
# With this share of all kills or more, a source stands still for the whole time.
WHOLE_SHARE = 0.2


def measure_faults(context: PartContext) -> None:
    """All faults, one round after the other, over two pools of two workers; half of the requests are continuable."""
    rng, rounds = random.Random(0), max(len(PHASES), round(KILLS * context.share))
    asked = make_requests(NUM_ASKED // 2, NUM_ASKED // 2, seed=2, max_tokens=NEW_TOKENS, kinds=KINDS)
    with ChannelDeployment(*ALONE, *vllm_flags()) as deployment:
        reference = ask_reference(deployment, asked)
    held, pids = dict[str, object](), set[int]()
    with ChannelDeployment(*TWO_PAIRS, *vllm_flags(), "--recovery-s", "120", steady_s=STEADY_S) as deployment:
        faulty = FaultyDeployment(deployment, asked, rng)

        def end_round(batch: Sequence[ChannelAnswer]) -> None:
            wait_answers(batch, ANSWERS_S)
            held.update(deployment.wait_rest(REST_S, DEVICE_BOOKS))
            deployment.wait_ready()
            context.record(check_answers(faulty, reference) | {"kv_at_rest": len(held), "held_by": held})

        for stage, role in itertools.islice(itertools.cycle(PHASES), rounds):
            pids |= {deployment.pid(worker) for worker in deployment.workers}
            batch = faulty.submit(STREAMS)
            faulty.kill_in(stage, role)
            faulty.leave(-(-LEAVING // rounds))
            end_round(batch)
        batch = faulty.submit(STREAMS)
        with deployment.paused("prefill-0"):
            time.sleep(STOPPED_S * min(1.0, context.share / WHOLE_SHARE))
        end_round(batch)
        pids |= {deployment.pid(worker) for worker in deployment.workers}
    context.record({"left_behind": sum(map(is_alive, pids))})


def check_answers(faulty: FaultyDeployment, reference: Sequence[ChannelAnswer]) -> dict[str, object]:
    """How the answers of clients that stayed have ended.

    `failed` counts requests that another worker could have continued, and errors that a client may not retry; `ended`
    the others, each with one error.
    """
    codes, failed = Counter[str](), 0
    whole = list[tuple[ChannelAnswer, ChannelAnswer]]()
    for number, answer in faulty.stayed:
        if answer.failure is None:
            whole.append((reference[number], answer))
            continue
        codes[answer.failure.reason.value] += 1
        may_end = not can_continue(answer.request.sampling, ())
        failed += not (may_end and RULES[answer.failure.reason].retry_after_s is not None)
    found = compare_answers([right for right, _ in whole], [answer for _, answer in whole])
    return faulty.counts() | {
        "fault_answers": len(faulty.stayed),
        "fault_wrong": found.unexplained,
        "fault_failed": failed + found.failed,
        "fault_ended": dict(codes),
        "fault_examples": found.examples,
    }


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number, which was a worker's."""
    return os.path.exists(f"/proc/{pid}")
