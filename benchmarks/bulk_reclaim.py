"""How long an online request waits for slabs that bulk work holds: the engine of a worker, in this process."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

from diptych.chunks import CHUNK_TOKENS
from diptych.request import BULK_PRIORITY, SamplingParams, Tenancy
from engine.bulk.budget import BulkTime
from engine.bulk.engine import BulkEngine
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool

EMBEDDED = Path(__file__).parents[1] / "models" / "tiny"
SLICE_S = 0.02
NUM_SLABS, MODEL_LEN, TRIALS = 64, 2048, 200


def reclaim_times_s(trials: int = TRIALS) -> list[float]:
    """Seconds from the arrival of an online request, at any moment of a unit of bulk work, until it has its slabs.

    The request needs more slabs than are free without those of bulk work, which must give some back.
    """
    files, draw = Checkpoint.resolve(str(EMBEDDED)), random.Random(0)
    pool = KvPool(files.layout(), NUM_SLABS)
    runner = CpuModelRunner.load(files, pool, MODEL_LEN)
    runner.warm()
    limits = EngineLimits(num_slabs=NUM_SLABS, max_model_len=MODEL_LEN)
    holdings, sampler = KvAllocator(pool), Sampler(runner.vocab_size)
    online = Engine(runner, Scheduler(limits), holdings, sampler)
    bulk = BulkEngine(runner, limits, holdings, sampler, BulkTime(SLICE_S))
    origin, clock = Tenancy("batch", "", BULK_PRIORITY), time.monotonic
    found: list[float] = []
    number = 0
    while len(found) < trials:
        while len(bulk.scheduler) < 16:
            number += 1
            asked = SamplingParams(max_tokens=400, seed=number)
            prompt = [draw.randrange(1000) for _ in range(96)]
            bulk.add(Sequence(f"b{number}", 1, prompt, asked, math.inf, tenancy=origin), clock())
        begun_s = clock()
        bulk.run_unit(online, clock)
        ended_s = clock()
        if holdings.lent < NUM_SLABS // 3 or draw.random() < 0.7:
            continue
        arrived_s = draw.uniform(begun_s, ended_s)
        free = holdings.unused + draw.randint(1, holdings.lent)
        prompt = [draw.randrange(1000) for _ in range(min(MODEL_LEN, free * CHUNK_TOKENS) - 1)]
        number += 1
        name = f"r{number}"
        online.add(Sequence(name, 1, prompt, SamplingParams(max_tokens=1, seed=1), math.inf), clock())
        before = bulk.table.counters.preempted.total()
        plan = online.table.plan_step(lambda key: None)
        seq = online.scheduler.find(f"{name}#1")
        assert seq is not None
        # All its slabs at once, which is more than a step of a long prompt would take.
        holdings.allocate("probe", free)
        found.append(clock() - arrived_s)
        assert plan.admitted and bulk.table.counters.preempted.total() > before
        holdings.release("probe")
        online.abort(name, 1)
    return found
