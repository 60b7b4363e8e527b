"""Part `faults`: what kills, leaving clients, a source that stands still and flipped bytes do to answers and KV."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.device_parts.flipped_bytes import flip_offered
from benchmarks.device_parts.tokens import CPU_WORKER, REST_S, TWO_PAIRS, on_device
from benchmarks.gpu_parts.check_part import PartContext
from benchmarks.load.answer_checks import AskedRequest, ask_reference, compare_answers, make_requests
from benchmarks.load.channel_deployment import DEVICE_BOOKS, ChannelAnswer, ChannelDeployment, wait_answers
from diptych.failure_statuses import FailureReason
from diptych.request import RequestStage
from tests.support.waiting import comes_true

STAGES = (RequestStage.QUEUED, RequestStage.PREFILLED, RequestStage.TRANSFERRING, RequestStage.DECODING)
# Every stage of a request in which either of its workers is killed.
PHASES = tuple((stage, role) for stage in STAGES for role in ("prefill", "decode"))
NUM_ASKED, BATCH, NEW_TOKENS = 120, 24, 40
KILLS, LEAVING, STOPS = 40, 300, 8
# A killed worker is started again at once, however often it was killed, if it was ready for so long.
STEADY_S = 0.2
STAGE_S, STOPPED_S, OFFER_S, ANSWERS_S = 3.0, 1.0, 5.0, 90.0
# A request whose KV is spoilt has chunks enough.
MIN_SPOILT_TOKENS = 64


class FaultyDeployment:
    """A deployment that is asked for answers while one thing after the other goes wrong; it counts what was done."""

    def __init__(
        self, deployment: ChannelDeployment, asked: Sequence[AskedRequest], rng: random.Random
    ) -> None:
        self.deployment, self._asked, self._rng = deployment, asked, rng
        self._order = itertools.cycle(range(len(asked)))
        # Answers of clients that stay, with the numbers of their requests; and of those that leave.
        self.stayed: list[tuple[int, ChannelAnswer]] = []
        self.left: list[ChannelAnswer] = []
        self.spoilt: list[ChannelAnswer] = []
        self.kills: Counter[str] = Counter()

    def submit(self, count: int) -> list[ChannelAnswer]:
        """Ask for the next answers, whose clients stay."""
        numbers = list(itertools.islice(self._order, count))
        some = [(number, self._submit_one(number)) for number in numbers]
        self.stayed += some
        return [answer for _, answer in some]

    def _submit_one(self, number: int, scope: str = "") -> ChannelAnswer:
        asked = self._asked[number]
        return self.deployment.submit(asked.prompt, asked.sampling, scope)

    def spoil_offer(self) -> None:
        """Flip a bit of KV that is offered, in the buffer of its prefill worker, before it can be pulled."""
        while len(self._asked[number := next(self._order)].prompt) < MIN_SPOILT_TOKENS:
            pass
        with ExitStack() as stack:
            for worker in self.deployment.workers:
                if worker.startswith("decode"):
                    stack.enter_context(self.deployment.paused(worker))
            # Nobody has its chunks already, so all of them are pulled.
            answer = self._submit_one(number, scope=f"spoilt-{len(self.spoilt)}")
            self.stayed.append((number, answer))
            comes_true(lambda: self.deployment.ticket(answer), OFFER_S, pause_s=0.002)
            if ticket := self.deployment.ticket(answer):
                source = self.deployment.source(answer)
                num_slabs = max(stats.buffer_slabs for stats in self.deployment.stats().values())
                flip_offered(self.deployment.pid(source), ticket, num_slabs, self._rng)
                self.spoilt.append(answer)
        wait_answers([answer], ANSWERS_S)

    def leave(self, count: int) -> None:
        """Clients ask and leave, each a moment later."""
        for number in itertools.islice(self._order, count):
            answer = self._submit_one(number)
            self.left.append(answer)
            time.sleep(self._rng.choice((0.0, 0.01, 0.05, 0.2)))
            self.deployment.cancel(answer)

    def kill_in(self, stage: RequestStage, role: str) -> None:
        """Kill the worker of this role of the first request that is found in a stage."""
        if worker := self.deployment.wait_stage(stage, role, STAGE_S):
            self.deployment.kill(worker)
            self.kills[f"{stage.value} {role}"] += 1

    def stand_still(self) -> None:
        """A prefill worker stands still for a while."""
        with self.deployment.paused(f"prefill-{self._rng.randrange(2)}"):
            time.sleep(STOPPED_S)

    @property
    def corrupt_found(self) -> float:
        """The share of the spoilt offers whose attempt was given up because of the transfer."""
        code = FailureReason.KV_TRANSFER_FAILED.value
        found = sum(any(retry.code == code for retry in answer.retries) for answer in self.spoilt)
        return found / max(1, len(self.spoilt))

    def counts(self) -> dict[str, object]:
        """What was done so far."""
        return {
            "kills": self.kills.total(),
            "kills_by_phase": dict(self.kills),
            "left": len(self.left),
            "flipped": len(self.spoilt),
            "corrupt_found": round(self.corrupt_found, 4),
        }


def measure_faults(context: PartContext) -> None:
    """All faults, one round after the other, over two pools of two workers."""
    rng, rounds = random.Random(0), max(len(PHASES), round(KILLS * context.share))
    asked = make_requests(NUM_ASKED // 2, NUM_ASKED // 2, seed=2, max_tokens=NEW_TOKENS)
    with ChannelDeployment(*CPU_WORKER) as deployment:
        reference = ask_reference(deployment, asked)
    flags = (*TWO_PAIRS, *on_device(context), "--recovery-s", "60")
    with ChannelDeployment(*flags, steady_s=STEADY_S) as deployment:
        faulty, held = FaultyDeployment(deployment, asked, rng), dict[str, object]()
        for number, (stage, role) in enumerate(itertools.islice(itertools.cycle(PHASES), rounds)):
            if context.device != "cpu":
                faulty.spoil_offer()
            batch = faulty.submit(BATCH)
            faulty.kill_in(stage, role)
            faulty.leave(-(-LEAVING // KILLS))
            if number % (KILLS // STOPS) == 0:
                faulty.stand_still()
            wait_answers(batch, ANSWERS_S)
            held |= deployment.wait_rest(REST_S, DEVICE_BOOKS)
            deployment.wait_ready()
            context.record(faulty.counts() | {"kv_at_rest": len(held), "held": held})
    right = [reference[number] for number, _ in faulty.stayed]
    found = compare_answers(right, [answer for _, answer in faulty.stayed])
    context.record(faulty.counts() | {
        "fault_answers": found.answers, "wrong": found.unexplained, "fault_failed": found.failed,
        "fault_explained": found.explained, "fault_retried": sum(bool(one.retries) for _, one in faulty.stayed),
        "fault_examples": found.examples,
    })  # fmt: skip
