"""The engine as a state machine: whatever happens, every slab has one owner and every answer is right."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from diptych.eviction_spec import KEEP_ALL, KeepSpec, decision_tokens
from diptych.messages import Failed, Output
from diptych.request import Tenancy
from engine.scheduling.new_token_ratio import NewTokenRatio
from engine.sequence import Sequence, SequenceRefused, num_chunks
from tests.unit.engine.fakes import EngineBench, FixedRate, alone, sampling, sequence

MODEL_LEN = 300
FAMILIES = [sequence(name, MODEL_LEN).prompt for name in ("one", "another")]
WAYS: Counter[str] = Counter()  # preemptions of all examples
EVICTED: Counter[str] = Counter()  # decisions, and bags that were loaded, of all examples
HITS: list[int] = []  # tokens found in the prefix tree, by example


class Conservation(RuleBasedStateMachine):
    """Two engines on one fake memory each; what the first holds is handed to the second, or dropped."""

    def __init__(self) -> None:
        super().__init__()
        limits: dict[str, Any] = {
            "max_num_seqs": 3,
            "max_num_batched_tokens": 40,
            "max_model_len": MODEL_LEN,
            "max_waiting": 5,
        }
        self.first, self.second = EngineBench(6, swap=5, **limits), EngineBench(6, swap=3, **limits)
        for bench in (self.first, self.second):
            bench.scheduler.ratio = NewTokenRatio(
                0.0, 0.0, 0.0, 0.01
            )  # admits whatever fits now: preempts often
        self.names = 0
        self.held: list[Sequence] = []
        self.written: dict[str, list[int]] = {}
        self.asked: dict[str, Sequence] = {}
        self.ended: dict[str, str] = {}

    def _name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    @rule(
        length=st.sampled_from([190, 129, 128, 127, 65, 64, 63, 40, 5, 1]),
        common=st.sampled_from([190, 128, 127, 64, 63, 0]),
        family=st.integers(0, 1),
        new=st.sampled_from([100, 60, 10, 2, 1, 0]),
        hold_kv=st.booleans(),
        earlier=st.integers(0, 5),
        scored=st.booleans(),
        origin=st.builds(Tenancy, st.sampled_from("ab"), st.just(""), st.integers(-1, 1)),
        patience=st.one_of(st.just(float("inf")), st.integers(0, 200)),
        keep=st.sampled_from([KEEP_ALL, KeepSpec(0.5), KeepSpec(0.5, 64)]),
    )
    def add(self, **asked: Any) -> None:
        """One more request."""
        self._add(**asked)

    def _add(
        self,
        length: int,
        common: int,
        family: int,
        new: int,
        hold_kv: bool,
        earlier: int,
        scored: bool,
        origin: Tenancy,
        patience: float,
        keep: KeepSpec = KEEP_ALL,
    ) -> None:
        """Prompts begin alike up to `common` tokens, within a family."""
        if keep.boundary > length:
            keep = KeepSpec(keep.threshold)
        name = self._name()
        prompt = FAMILIES[family][: min(length, common)]
        prompt += sequence(name, length - len(prompt)).prompt
        asked = sampling(new, prompt_logprobs=0 if scored else None)
        plain = sequence(name, prompt, asked, tenancy=origin, keep=keep)
        whole = alone(plain, MODEL_LEN)
        output = whole[: min(earlier, max(0, len(whole) - 1))]
        deadline_s = self.first.now_s + patience
        seq = sequence(
            name,
            prompt,
            asked,
            output=list(output),
            hold_kv=hold_kv,
            stage=hold_kv,
            deadline_s=deadline_s,
            tenancy=origin,
            keep=keep,
        )
        try:
            self.first.engine.add(seq, self.first.now_s)
        except SequenceRefused:
            return
        self.asked[name], self.written[name] = plain, list(output)

    @initialize(parks=st.booleans())
    def begin(self, parks: bool) -> None:
        self.rates(parks, second=False)
        self.crowd(0, 64)

    @rule(
        family=st.integers(0, 1),
        common=st.sampled_from([0, 64, 100]),
        keep=st.sampled_from([KEEP_ALL, KeepSpec(0.5), KeepSpec(0.5, 64)]),
    )
    def crowd(self, family: int, common: int, keep: KeepSpec = KEEP_ALL) -> None:
        """Three who all grow beyond what there is."""
        for tenant in "aab":
            self._add(100, common, family, 100, False, 0, False, Tenancy(tenant), float("inf"), keep)

    @rule(which=st.integers(0, 10))
    def hand_over(self, which: int) -> None:
        """As a decode worker does it: what is known is attached, the rest is taken, fetched and shared."""
        if not self.held:
            return
        seq, bench = self.held[which % len(self.held)], self.second
        computed = decision_tokens(len(seq.prompt), seq.computed) if seq.keep.evicts else seq.computed
        fields = {"output": list(seq.output), "computed": computed, "tenancy": seq.tenancy, "keep": seq.keep}
        copy = sequence(seq.id, seq.prompt, seq.sampling, kept_slabs=seq.kept_slabs, **fields)
        if bench.scheduler.limits.max_slabs(copy) > 6 or not bench.engine.admits(copy):
            return
        full = copy.full_chunks(computed)
        copy.slabs = bench.holdings.attach_prefix(copy.key, copy.keys[:full])
        fetched = len(copy.slabs)
        copy.slabs += bench.holdings.allocate(copy.key, copy.slabs_for(copy.total) - fetched)
        pairs = zip(seq.slabs[fetched:], copy.slabs[fetched:], strict=False)
        bench.runner.kv.fetch(self.first.runner.kv, pairs)
        bench.holdings.publish(copy.key, copy.keys[:full], copy.slabs)
        bench.engine.adopt(copy, bench.now_s)
        self.forget(which)

    @rule(which=st.integers(0, 10))
    def forget(self, which: int) -> None:
        """A lease ends."""
        if self.held:
            seq = self.held.pop(which % len(self.held))
            self.first.holdings.release(seq.key)
            if seq.key not in self.second.scheduler:
                self.ended[seq.id] = "dropped"

    @rule(second=st.booleans(), steps=st.sampled_from([40, 12, 3, 1]))
    def step(self, second: bool, steps: int) -> None:
        bench = self.second if second else self.first
        for _ in range(steps):
            for emission in bench.engine.step(bench.clock):
                self._note(emission.message)
                if emission.held:
                    self._taken(emission.held)
                    self.held.append(emission.held)

    @rule(parks=st.booleans(), second=st.booleans())
    def rates(self, parks: bool, second: bool) -> None:
        """From now on, copying is much cheaper than computing, or the reverse."""
        engine = (self.second if second else self.first).engine
        engine.copy_rate = FixedRate(1e12 if parks else 1e-12)

    def _taken(self, seq: Sequence) -> None:
        """A held sequence has left the engine, with its slabs."""

    def _note(self, message: Output | Failed) -> None:
        name = message.request
        assert name not in self.ended, "reported after its end"
        if isinstance(message, Failed):
            self.ended[name] = message.code
            return
        self.written[name] += message.tokens
        if message.finish:
            self.ended[name] = message.finish

    @rule(which=st.integers(1, 40), second=st.booleans())
    def abort(self, which: int, second: bool) -> None:
        bench = self.second if second else self.first
        for seq in bench.engine.abort(f"r{which}", 1):
            self.ended[seq.id] = "aborted"

    @rule(token=st.integers(0, 49), second=st.booleans())
    def poison(self, token: int, second: bool) -> None:
        """From now on, the runner or the sampler fails for whoever has this token."""
        bench = self.second if second else self.first
        (bench.runner if token % 2 else bench.sampler).poison = {token}

    @invariant()
    def slabs_belong_to_the_living(self) -> None:
        for bench, held in ((self.first, self.held), (self.second, [])):
            bench.holdings.check_books()
            book = bench.scheduler
            live = [*book.sequences(), *held]
            assert bench.holdings.owners() == {seq.key: len(seq.slabs) for seq in live if seq.slabs}
            assert book.waiting_tokens == sum(seq.unprefilled_tokens for seq in book.waiting.values())
            started = {seq.key for seq in book.sequences() if seq.started_s is not None}
            assert set(bench.engine._live) == started and started >= set(book.running)
            parked = [seq for seq in book.waiting.values() if seq.parked]
            assert set(bench.host._held) == {seq.key for seq in parked}
            slabs = sum(
                (seq.slabs_for(seq.computed + 1) if seq.kept_slabs else num_chunks(seq.computed))
                - seq.parked_from
                for seq in parked
            )
            assert bench.host.used_bytes == slabs * bench.host.slab_bytes <= bench.host.capacity_bytes

    @invariant()
    def a_bag_has_the_slabs_that_its_map_needs(self) -> None:
        """And the runner keeps nothing of a sequence that is gone, or that is computed again from its first token."""
        for bench in (self.first, self.second):
            book, maps = bench.scheduler, bench.runner.maps
            for seq in [*book.running.values(), *book.adopted.values()]:
                assert (seq.key in maps) == bool(seq.kept_slabs)
                assert len(seq.bag_slabs) == (num_chunks(1 + len(maps[seq.key])) if seq.kept_slabs else 0)
                assert not seq.kept_slabs or len(seq.slabs) == seq.slabs_for(seq.computed + 1)
            goes_on = {seq.key for seq in book.waiting.values() if seq.parked}
            assert bench.runner.given <= {*book.running, *book.adopted, *goes_on}
        assert all(bool(seq.kept_slabs) == seq.keep.evicts for seq in self.held)

    @invariant()
    def the_first_among_the_best_is_never_preempted(self) -> None:
        """Among all that hold memory; only a waiting sequence of a better priority takes it from that one."""
        for bench in (self.first, self.second):
            book = bench.scheduler
            if victim := book.schedule(bench.holdings).preempted:
                holders = [*book.running.values(), *book.adopted.values()]
                first = min(holders, key=lambda seq: seq.precedence)
                waits = [
                    seq for seq in book.waiting.values() if seq.tenancy.priority < first.tenancy.priority
                ]
                assert victim != first.key or waits

    @invariant()
    def tokens_are_those_of_an_undisturbed_run(self) -> None:
        for name, tokens in self.written.items():
            whole = alone(self.asked[name], MODEL_LEN)
            assert tokens == whole[: len(tokens)]
            if self.ended.get(name) == "length":
                assert tokens == whole

    def teardown(self) -> None:
        """Left alone, everything ends, and nothing is held."""
        for bench in (self.first, self.second):
            while self.held:
                self.hand_over(0)
                self.forget(0)
            for _ in range(3000):
                if not len(bench.scheduler):
                    break
                assert bench.engine.has_work
                for emission in bench.engine.step(bench.clock):
                    self._note(emission.message)
                    if emission.held:
                        self._taken(emission.held)
                        bench.holdings.release(emission.held.key)
                        self.ended[emission.held.id] = "dropped"
            assert not len(bench.scheduler) and bench.holdings.used == bench.host.used_bytes == 0
            assert not bench.runner.given | bench.runner.queries.keys() | bench.runner.maps.keys()
            bench.holdings.check_books()
        assert set(self.ended) == set(self.asked)
        WAYS.update(self.first.engine.stats.preemptions, **self.second.engine.stats.preemptions)
        EVICTED.update(self.first.runner.calls + self.second.runner.calls)
        HITS.append(self.first.holdings.prefix_hits + self.second.holdings.prefix_hits)
