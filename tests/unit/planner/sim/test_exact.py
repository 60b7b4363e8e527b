"""The simulator: nothing is lost or left behind, what limits a deployment limits it, and bad ones are refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from math import inf
from random import Random
from statistics import mean

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from engine.scheduling.scheduler import StepPlan
from planner.attainment import AttainmentCounter
from planner.costs.profile import analytic_profile
from planner.costs.profile_file import built_in_profile
from planner.costs.step import StepVariation
from planner.sim.exact.deployment import SimDeployment, build_deployment, saturation_tokens
from planner.sim.exact.engine import SimEngine, StepRun
from planner.sim.exact.event_queue import EventQueue
from planner.sim.exact.links import SimLinks
from planner.sim.exact.prompts import SimPrompt, chunk_names
from planner.sim.exact.simulate import ExactSimulation, simulate_exact
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    GatewayCpuCost,
    InstancePool,
    Job,
    JobResult,
    LinkSpec,
    Parallelism,
    Placement,
    StepBatch,
)
from planner.workload.workload import Workload, synthetic_workload
from router.requests.admission import AdmissionLimits as Bounds
from tests.unit.planner.sim.exact_samples import COST, MACHINE, of, placed


def poisson(count: int, per_s: float, seed: int = 1, prompt: float = 5.0, output: float = 3.5) -> list[Job]:
    draw, at_s, jobs = Random(seed), 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(per_s)
        lengths = int(draw.lognormvariate(prompt, 0.8)) + 1, int(draw.lognormvariate(output, 0.8)) + 1
        jobs.append(Job(at_s, min(2000, lengths[0]), min(500, lengths[1])))
    return jobs


def run(deployment: SimDeployment, jobs: list[Job]) -> tuple[list[JobResult], ExactSimulation]:
    served: list[JobResult] = []
    simulation = ExactSimulation(deployment, served.append)
    simulation.run(jobs)
    return served, simulation


PAIR = placed((PREFILL, 1), (DECODE, 1))


@pytest.mark.parametrize("placement", [PAIR, placed((BOTH, 2))])
def test_a_rhythm_that_changes_nothing_changes_nothing(placement: Placement) -> None:
    jobs = poisson(120, 40.0)
    plain, paced = (
        simulate_exact(of(placement, machine), jobs)
        for machine in (MACHINE, replace(MACHINE, variation=StepVariation()))
    )
    assert plain == paced


@pytest.mark.parametrize("placement", [PAIR, placed((BOTH, 2))])
def test_a_gateway_that_works_in_no_time_changes_nothing(placement: Placement) -> None:
    jobs = poisson(120, 40.0)
    plain, handled = (
        simulate_exact(of(placement, cpu_cost=handling), jobs) for handling in (None, GatewayCpuCost())
    )
    assert plain == handled


def test_what_a_gateway_has_to_do_waits_for_its_processor() -> None:
    """A request is half a second of its work when it comes, and what was measured at rest has that in it already."""
    at_rest = simulate_exact(of(PAIR), [Job(0.0, 100, 1)])[0].ttft_s
    for count in (1, 2, 4):
        served = simulate_exact(of(PAIR, cpu_cost=GatewayCpuCost(0.0, 0.0, 1.0)), [Job(0.0, 100, 1)] * count)
        first_s = min(one.ttft_s for one in served)
        assert first_s == pytest.approx(at_rest + 0.5 * (count - 1), abs=0.02), (
            "all that came before are taken first"
        )


def test_an_end_is_work_for_the_gateway_as_well() -> None:
    jobs = [Job(0.0, 100, 5), Job(0.5, 100, 5)]
    calm, full = (
        simulate_exact(of(PAIR, cpu_cost=GatewayCpuCost(0.0, 0.0, work_s)), jobs)[1] for work_s in (0.0, 1.6)
    )
    assert calm.job.at_s == full.job.at_s == 0.5
    assert full.ttft_s - calm.ttft_s == pytest.approx(0.3 + 0.8, abs=0.1), (
        "0.8 s for the first's end, of which 0.3 s are left, and 0.8 s for its own begin"
    )


@pytest.mark.parametrize("handling", [GatewayCpuCost(message_s=0.1), GatewayCpuCost(token_s=0.1)])
def test_tokens_come_no_faster_than_the_gateway_passes_them_on(handling: GatewayCpuCost) -> None:
    (alone,) = simulate_exact(of(placed((BOTH, 1)), cpu_cost=handling), [Job(0.0, 100, 50)])
    assert alone.tpot_s == pytest.approx(0.1, rel=0.05), "far more than a step takes"


def test_messages_do_not_overtake_each_other_when_ways_take_longer_beside_steps() -> None:
    """All cores are often in steps, and the way of a message is longer then: the relay gets each token once."""
    machine = replace(MACHINE, variation=StepVariation())
    jobs = poisson(150, 40.0)
    deployment = of(PAIR, machine, cpu_cost=GatewayCpuCost(1e-4, 1e-5, 1e-3), cores=1, hop_s=8e-3)
    served, simulation = run(deployment, jobs)
    assert len(served) == len(jobs) and not any(one.failed for one in served)
    assert not simulation.gateways[0].relay.live
    quicker = simulate_exact(replace(deployment, cores=8), jobs)
    assert mean(one.ttft_s for one in served) > mean(one.ttft_s for one in quicker)


def test_steps_of_a_size_and_what_is_before_them_are_as_long_as_they_were() -> None:
    """Two rows take three times what the cost says, and a step of two rows begins 50 ms after the one before."""
    rhythm = StepVariation(sizes=((1.0, 3.0), (1.0,), (1.0,)), gaps_s=(0.0, 0.05))
    machine = replace(MACHINE, variation=rhythm)
    pair = simulate_exact(of(placed((BOTH, 1)), machine), [Job(0.0, 100, 40), Job(0.0, 100, 40)])
    step_s = 3.0 * COST.step_s(StepBatch(0, 0.0, 2, 240)) + 0.05
    assert max(one.tpot_s for one in pair) == pytest.approx(step_s, rel=0.01)


def test_sizes_of_steps_that_read_and_that_do_both_are_distinguished() -> None:
    usual = (1.0,) * 13
    rhythm = StepVariation(
        sizes=(usual, (*usual, 5.0), (*usual, 7.0))
    )  # 14 and more: from 2 ** 6.25 tokens on
    reads, both, writes = StepBatch(100, 1e4), StepBatch(100, 1e4, 2, 50), StepBatch(0, 0.0, 14, 50)
    assert [rhythm.factor(batch, False) for batch in (reads, both, writes)] == [5.0, 7.0, 1.0]
    assert rhythm.factor(StepBatch(1, 1.0), False) == rhythm.factor(StepBatch(64, 4096.0), False) == 1.0
    first = simulate_exact(of(placed((BOTH, 1)), replace(MACHINE, variation=rhythm)), [Job(0.0, 100, 1)])[0]
    plain = simulate_exact(of(placed((BOTH, 1))), [Job(0.0, 100, 1)])[0]
    assert first.ttft_s - plain.ttft_s == pytest.approx(4.0 * COST.step_s(reads))


def test_steps_follow_their_workers_tapes_and_slow_down_beside_others() -> None:
    """Alone, steps that write take 2 and then 4 times their cost; while the other worker steps, 10 times that."""
    rhythm = StepVariation((2.0, 1.0), (20.0, 10.0), tapes=((1.0, 2.0), (1.0,)))
    machine = replace(MACHINE, variation=rhythm)
    alone = simulate_exact(of(placed((BOTH, 1)), machine), [Job(0.0, 100, 5)])[0]
    steps = [COST.step_s(StepBatch(0, 0.0, 1, context)) for context in range(100, 104)]
    lasting = sum(2.0 * (1 + number % 2) * seconds for number, seconds in enumerate(steps))
    assert alone.tpot_s * 4 == pytest.approx(lasting, rel=1e-6)
    pair = simulate_exact(of(placed((BOTH, 2)), machine), [Job(0.0, 100, 200), Job(0.0, 100, 200)])
    assert min(one.tpot_s for one in pair) > 5.0 * alone.tpot_s


@pytest.mark.parametrize(
    "deployment",
    [
        of(placed((PREFILL, 2), (DECODE, 2)), link=LinkSpec(1e9, 1e-4), token_bytes=1e5),
        of(PAIR, replace(MACHINE, kv_tokens=64 * 60)),
        of(placed((BOTH, 2)), replace(MACHINE, kv_tokens=64 * 60)),
        of(placed((PREFILL, 1), (DECODE, 1), split=Parallelism(1, 2))),
        of(placed((BOTH, 1), split=Parallelism(2, 4))),
        of(placed((PREFILL, 1), (DECODE, 1), (BOTH, 1)), cells=2),
        of(PAIR, prefix_caching=True),
    ],
)
def test_every_request_ends_once_and_nothing_is_held_afterwards(deployment: SimDeployment) -> None:
    jobs = poisson(150, 40.0)
    served, simulation = run(deployment, jobs)
    assert sorted(one.job.at_s for one in served) == [job.at_s for job in jobs]
    assert not any(one.failed for one in served)
    assert all(0 < one.ttft_s < inf and one.ended_s >= one.job.at_s + one.ttft_s for one in served)
    for gate in simulation.gateways:
        assert not gate.open and not gate.relay.live and not len(gate.relay.ledger)
        for worker in gate.workers.values():
            assert not worker.leases
            for engine in worker.engines:
                engine.kv.check_books()
                assert engine.kv.used == 0 and not len(engine.scheduler)


def test_the_same_jobs_fare_alike() -> None:
    jobs = poisson(80, 40.0)
    assert simulate_exact(of(PAIR), jobs) == simulate_exact(of(PAIR), jobs)


def test_a_tally_gets_what_a_list_would_have() -> None:
    jobs = poisson(80, 40.0)
    slos = {"": Slo(0.2, 0.02)}
    tally = simulate_exact(of(PAIR), iter(jobs), AttainmentCounter(slos))
    served = simulate_exact(of(PAIR), jobs)
    assert tally.attainment() == mean(one.meets_slo(slos[""]) for one in served)


def test_one_request_alone_takes_what_its_steps_and_messages_take() -> None:
    job = Job(0.0, 300, 11)
    link = LinkSpec(1e9, 5e-4)
    (served,) = simulate_exact(of(PAIR, link=link, token_bytes=1e5, pipelined=False), [job])
    read_s = COST.step_s(StepBatch(300, 300.0**2))
    assert served.ttft_s == pytest.approx(
        1e-3 + 2e-4 + read_s + 2e-4
    )  # the gateway, there, the step, and back
    writes_s = sum(COST.step_s(StepBatch(rows=1, context=300 + step)) for step in range(10))
    moved_s = 5 * 64 * 1e5 / 1e9 + link.latency_s
    # The offer goes up with the token, the order down; the last token up.
    assert served.tpot_s * 10 == pytest.approx(2e-4 + moved_s + writes_s + 2e-4)


def test_parts_of_a_requests_time_sum_to_it() -> None:
    for served in simulate_exact(of(PAIR), poisson(60, 30.0)):
        first = sum(
            served.parts[name] for name in ("admission", "retry", "prefill_queue", "prefill", "deliver")
        )
        assert first == pytest.approx(served.ttft_s)


def test_decode_instances_read_prompts_themselves_where_that_is_sooner() -> None:
    """Prompts are long, answers short, and one instance reads: the others help, and first tokens come sooner."""
    placement, jobs = placed((PREFILL, 1), (DECODE, 2)), poisson(150, 30.0, prompt=6.3, output=1.5)
    ttft_s = {}
    for local in "never", "auto":
        served = simulate_exact(of(placement, local_prefill=local), jobs)
        ttft_s[local] = mean(one.ttft_s for one in served)
        read_there = sum("decode_admission" not in one.parts and one.job.output > 1 for one in served)
        assert bool(read_there) == (local == "auto")
    assert ttft_s["auto"] < ttft_s["never"]


# ---- pipelines


def test_a_pipeline_of_two_takes_nearly_twice_the_rate() -> None:
    """Prompts of equal length, more than can be read: stages of half the time each."""
    jobs = [Job(0.0, 512, 1) for _ in range(200)]
    one = max(served.ended_s for served in simulate_exact(of(placed((BOTH, 1))), jobs))
    staged = replace(MACHINE, cost=replace(COST, pp=2, hop_s=1e-4))
    two = max(
        served.ended_s
        for served in simulate_exact(of(placed((BOTH, 1), split=Parallelism(1, 2)), staged), jobs)
    )
    assert 1.8 < one / two < 2.0


# ---- the link (DistServe acceptance S15)


def test_a_link_caps_what_is_handed_over() -> None:
    """S15: more is asked for than the link moves; what ends per second is its rate over the mean bytes of a prompt."""
    jobs = poisson(300, 200.0, output=1.0)
    token_bytes, speed = 1e6, 2e9
    served, simulation = run(
        of(PAIR, replace(MACHINE, kv_tokens=1 << 20), link=LinkSpec(speed), token_bytes=token_bytes), jobs
    )
    moving = [one for one in served if one.job.output > 1]
    chunk_bytes = mean(-(-one.job.prompt // 64) * 64 * token_bytes for one in moving)
    began_s = min(one.job.at_s for one in moving)
    rate = len(moving) / (max(one.ended_s for one in moving) - began_s)
    assert rate == pytest.approx(speed / chunk_bytes, rel=0.05)
    assert simulation.links[0].busy_s / simulation.events.now_s > 0.95


def test_a_slow_link_between_nodes_is_no_way_to_serve_a_large_model() -> None:
    """S15: OPT-66B on A100s over 25 Gbit/s, two requests a second, long enough for the queue to build."""
    profile = built_in_profile("OPT-66B", "A100-80G")
    pools = InstancePool(PREFILL, Parallelism(4)), InstancePool(DECODE, Parallelism(4))
    kept = {}
    for name, link, count in ("cross", LinkSpec(25e9 / 8), 500), ("inner", LinkSpec(300e9), 150):
        jobs = islice(synthetic_workload("sharegpt").stream(2.0, 1), count)
        served = simulate_exact(build_deployment(Placement(pools), profile, link=link), jobs)
        kept[name] = mean(one.meets_slo(Slo(2.5, 0.15)) for one in served)
    assert kept["cross"] < 0.3 < 0.9 < kept["inner"]


def test_low_affinity_hands_over_within_a_unit_only() -> None:
    placement = placed((PREFILL, 2), (DECODE, 4), affinity="low")
    _, simulation = run(of(placement), poisson(40, 20.0))
    ties = {name: set(member.links) for name, member in simulation.gateways[0].relay.fleet.workers.items()}
    assert [ties[f"decode-{i}"] for i in range(4)] == [{f"prefill-{i % 2}"} for i in range(4)]


def test_transfers_share_a_port() -> None:
    agenda, there = EventQueue(), dict[str, float]()
    agenda.now_s = 0.0
    links = SimLinks(agenda, LinkSpec(100.0, 1.0))

    def start(name: str, source: str, target: str, num_bytes: float) -> None:
        links.start(source, target, num_bytes, lambda: there.update({name: agenda.now_s}))

    start("a", "p0", "d0", 100.0)
    start("b", "p0", "d1", 50.0)  # they share p0's port: 50 each, until b is through at 1 s
    start("c", "p1", "d2", 100.0)  # in nobody's way
    agenda.run()
    assert there == pytest.approx({"b": 2.0, "c": 2.0, "a": 2.5})
    assert links.moved == 250.0


def test_kv_moves_while_it_is_read() -> None:
    """What is left to send after the last token was read is the last step's, where the link is fast enough."""
    jobs = [Job(0.5 * i, 1900, 20) for i in range(20)]
    machine, answered_s = replace(MACHINE, max_num_batched_tokens=256), {}
    for pipelined in False, True:
        deployment = of(PAIR, machine, link=LinkSpec(2e9, 1e-4), token_bytes=1e5, pipelined=pipelined)
        served, simulation = run(deployment, jobs)
        answered_s[pipelined] = mean(one.parts["decode_admission"] + one.parts["transfer"] for one in served)
        (links,) = simulation.links
        assert links.moved == len(jobs) * 30 * 64 * 1e5  # every chunk once
    assert answered_s[False] > 30 * 64 * 1e5 / 2e9 > 3 * answered_s[True]


def test_who_has_room_ahead_gives_it_back_to_whoever_needs_it() -> None:
    """Hardly any room and slow links: requests are recalled, and all are answered."""
    machine = replace(MACHINE, kv_tokens=64 * 36, max_num_batched_tokens=128)
    placement = placed((PREFILL, 2), (DECODE, 1))
    served, simulation = run(of(placement, machine, link=LinkSpec(3e8), token_bytes=1e5), poisson(150, 30.0))
    assert not any(one.failed for one in served)
    for worker in simulation.gateways[0].workers.values():
        assert not worker.leases and all(not len(one.admission) for one in worker.fetchers)
        assert all(not engine.kv.used for engine in worker.engines)


# ---- bursts (S17)


def test_bursts_wait_on_the_prefill_side_and_overflow_nothing() -> None:
    """S17: gamma arrivals, cv 4: pulled KV never overfills a decode pool; pushed at once it would have."""
    machine = replace(MACHINE, kv_tokens=64 * 80)
    jobs = list(islice(synthetic_workload("humaneval").stream(25.0, 3, cv=4.0), 250))
    served, simulation = run(of(PAIR, machine), jobs)
    assert len(served) == 250 and not any(one.failed for one in served)
    (gate,) = simulation.gateways
    for worker in gate.workers.values():
        (engine,) = worker.engines
        assert 0 < engine.most_used[""] <= 80
    held = sorted(
        (moment, tokens)
        for one in served
        for moment, tokens in (
            (one.job.at_s + one.ttft_s, one.job.prompt + one.job.output),
            (one.ended_s, -one.job.prompt - one.job.output),
        )
    )
    most = level = 0
    for _, tokens in held:
        level += tokens
        most = max(most, level)
    assert most > machine.kv_tokens  # all that was read and had not ended, wherever it was


# ---- batches of prompts (S19)


@pytest.mark.parametrize("seed", [1, 2])
def test_steps_of_l_m_leave_fewer_bubbles(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """S19: L_m is where 90 % of the best rate is reached. No step reads more, so that stages wait less for each other,
    and first tokens come sooner. Order is not kept by us: short prompts may pass a long one (docs/scheduling.md).
    """
    cost = replace(COST, pp=2, hop_s=1e-4)
    most = saturation_tokens(cost, 2048)
    wide = replace(MACHINE, cost=cost, kv_tokens=64 * 20000, max_num_batched_tokens=16384, max_num_seqs=1024)
    ttft_s, bubbles, longest = [], [], []
    for tokens in 0, most:
        steps: list[int] = []
        monkeypatch.setattr(SimEngine, "_fill_run", noting(steps))
        placement = placed((PREFILL, 1), (DECODE, 1), split=Parallelism(1, 2))
        served, simulation = run(
            of(placement, replace(wide, saturation_tokens=tokens)), poisson(300, 1e4, seed, output=-5.0)
        )
        (stages,) = {engine.stages for engine in simulation.gateways[0].workers["prefill-0"].engines}
        bubbles.append(1 - stages.busy_s / max(one.ended_s for one in served))
        ttft_s.append(mean(one.ttft_s for one in served))
        longest.append(max(steps))
    assert longest[1] <= most < longest[0]
    assert bubbles[1] < bubbles[0] and ttft_s[1] < ttft_s[0]


REAL_FILL_RUN = SimEngine._fill_run


def noting(steps: list[int]) -> Callable[[SimEngine, StepRun, StepPlan], None]:
    """`SimEngine._fill_run` that notes how many tokens each step reads."""

    def read(self: SimEngine, one: StepRun, plan: StepPlan) -> None:
        REAL_FILL_RUN(self, one, plan)
        steps.append(sum(count for _, count in one.parts))

    return read


# ---- prefixes


def test_equal_prefixes_have_equal_names_and_nothing_else() -> None:
    first, second = (
        Job(0.0, 400, 1, prefix=(7, 8), block_tokens=128),
        Job(1.0, 300, 1, prefix=(7, 9), block_tokens=128),
    )
    one, other = chunk_names(first, 0), chunk_names(second, 1)
    assert len(one) == 6 and len(other) == 4
    assert [a == b for a, b in zip(one, other, strict=False)] == [True, True, False, False]
    uneven = chunk_names(Job(0.0, 400, 1, prefix=(7, 8), block_tokens=100), 0)
    assert [b":" in name for name in uneven] == [False] * 3 + [
        True
    ] * 3  # 200 tokens are shared: three chunks


def test_shared_prefixes_are_read_once() -> None:
    jobs = [Job(0.1 * i, 640, 4, prefix=tuple(range(9)), block_tokens=64) for i in range(40)]
    plain = simulate_exact(of(PAIR), jobs)
    caching = simulate_exact(of(PAIR, prefix_caching=True), jobs)
    assert mean(one.ttft_s for one in caching) < 0.5 * mean(one.ttft_s for one in plain)


def test_a_text_is_as_long_as_it_says() -> None:
    text = SimPrompt(5)
    text.extend([1, 2, 3])
    assert len(text) == 8 and list(text) == [0] * 8
    assert len(text[:-1]) == 7 and not SimPrompt(0)


# ---- what goes wrong


def test_what_cannot_be_served_fails_and_harms_nobody() -> None:
    jobs = [Job(0.0, 100, 10), Job(0.1, 5000, 10), Job(0.2, 3000, 1000), Job(0.3, 100, 10)]
    served = simulate_exact(of(PAIR, replace(MACHINE, kv_tokens=64 * 50)), jobs)
    assert {one.job.at_s: one.failed for one in served} == {
        0.0: "",
        0.1: "context_length_exceeded",
        0.2: "out_of_memory",
        0.3: "",
    }


def test_admission_refuses_as_at_the_gateway() -> None:
    jobs = [Job(0.0, 500, 50) for _ in range(20)]
    served = simulate_exact(of(PAIR, bounds=Bounds(max_requests=8)), jobs)
    assert [one.failed for one in served].count("too_many_requests") == 12


@pytest.mark.parametrize("placement", [PAIR, placed((BOTH, 1), split=Parallelism(1, 3))])
def test_time_runs_out(placement: Placement) -> None:
    """Also that of what a batch of a pipeline is just computing, while another batch hears of it."""
    jobs = [Job(0.01 * i, 1500, 100) for i in range(40)]
    served, simulation = run(of(placement, timeout_s=1.0), jobs)
    failed = [one for one in served if one.failed]
    assert failed and {one.failed for one in failed} == {"deadline_exceeded"}
    assert all(one.ended_s - one.job.at_s == pytest.approx(1.0, abs=0.11) for one in failed)
    for worker in simulation.gateways[0].workers.values():
        assert all(not engine.kv.used and not len(engine.scheduler) for engine in worker.engines)


def test_the_collector_is_left_as_it_was() -> None:
    usual = gc.get_threshold()
    simulate_exact(of(PAIR), poisson(5, 10.0))
    with pytest.raises(ValueError, match="already"):
        simulate_exact(of(PAIR), [Job(1.0, 10, 10), Job(0.0, 10, 10)])
    assert gc.get_threshold() == usual


def test_jobs_come_in_order() -> None:
    with pytest.raises(ValueError, match="too late"):
        simulate_exact(of(PAIR), [Job(1.0, 10, 1), Job(0.5, 10, 1)])


@pytest.mark.parametrize(
    "deployment",
    [
        of(placed((PREFILL, 1))),
        of(placed()),
        SimDeployment(PAIR, (MACHINE,)),
        of(PAIR, cells=0),
    ],
)
def test_deployments_that_serve_nothing_are_refused(deployment: SimDeployment) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate_exact(deployment, [Job(0.0, 1, 1)])
    assert len(caught.value.lines()) <= 6


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="OPT-66B does not fit on TP1 of A100-80G"):
        build_deployment(placed((BOTH, 1)), analytic_profile("OPT-66B", "A100-80G"))


def test_a_workload_that_shares_fits_the_interface() -> None:
    jobs = [Job(float(i), 200, 5, prefix=(1, 2), block_tokens=64) for i in range(20)]
    drawn = Workload.of(jobs).sample(40, 20.0, 1)
    served = simulate_exact(of(placed((BOTH, 1)), prefix_caching=True), drawn)
    assert len(served) == 40
