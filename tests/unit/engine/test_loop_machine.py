"""Whatever is added, adopted, aborted and stepped, in any order: no slab is lost, and no token is another's."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.messages import Failed, Output
from engine.scheduler import Refused, Sequence
from tests.unit.engine.fakes import Bench, alone, sampling, sequence

MODEL_LEN = 300


class Conservation(RuleBasedStateMachine):
    """Two engines on one fake memory each; what the first holds is handed to the second, or dropped."""

    def __init__(self) -> None:
        super().__init__()
        limits = {
            "max_num_seqs": 3,
            "max_num_batched_tokens": 40,
            "max_model_len": MODEL_LEN,
            "max_waiting": 5,
        }
        self.first, self.second = Bench(10, **limits), Bench(8, **limits)
        self.names = 0
        self.held: list[Sequence] = []
        self.written: dict[str, list[int]] = {}
        self.asked: dict[str, Sequence] = {}
        self.ended: dict[str, str] = {}

    def _name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    @rule(
        length=st.integers(1, 200),
        new=st.integers(0, 30),
        hold=st.booleans(),
        earlier=st.integers(0, 5),
        patience=st.one_of(st.just(float("inf")), st.integers(0, 30)),
    )
    def add(self, length: int, new: int, hold: bool, earlier: int, patience: float) -> None:
        name = self._name()
        whole = alone(sequence(name, length, sampling(new)), MODEL_LEN)
        output = whole[: min(earlier, max(0, len(whole) - 1))]
        deadline_s = self.first.now_s + patience
        seq = sequence(name, length, sampling(new), output=list(output), hold=hold, deadline_s=deadline_s)
        try:
            self.first.engine.add(seq, self.first.now_s)
        except Refused:
            return
        self.asked[name], self.written[name] = sequence(name, length, sampling(new)), list(output)

    @rule(which=st.integers(0, 10))
    def hand_over(self, which: int) -> None:
        if not self.held:
            return
        seq = self.held.pop(which % len(self.held))
        room = self.second.scheduler.limits.room(sequence(seq.id, seq.prompt, seq.sampling))
        if room <= self.second.pool.free:
            slabs = self.second.pool.take(room, seq.key)
            target = dict(zip(seq.slabs, slabs, strict=False))
            for (slab, row), kv in list(self.first.runner.kv.items()):
                if slab in target:
                    self.second.runner.kv[target[slab], row] = kv
            fields = {"output": list(seq.output), "computed": seq.computed, "slabs": slabs}
            self.second.engine.adopt(sequence(seq.id, seq.prompt, seq.sampling, **fields), self.second.now_s)
        else:
            self.ended[seq.id] = "dropped"
        self.first.pool.give(seq.slabs, seq.key)

    @rule(second=st.booleans(), steps=st.integers(1, 8))
    def step(self, second: bool, steps: int) -> None:
        bench = self.second if second else self.first
        for _ in range(steps):
            for emission in bench.engine.step(bench.clock):
                self._note(emission.message)
                if emission.held:
                    self.held.append(emission.held)

    def _note(self, message: Output | Failed) -> None:
        name = message.request
        assert name not in self.ended, "told after its end"
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
            bench.pool.check()
            live = [*bench.scheduler.sequences(), *held]
            assert bench.pool.owners() == {seq.key: len(seq.slabs) for seq in live if seq.slabs}
            assert bench.scheduler.waiting_tokens == sum(
                seq.total for seq in bench.scheduler.waiting.values()
            )
            assert set(bench.engine._live) == set(bench.scheduler.running)

    @invariant()
    def tokens_are_those_of_an_undisturbed_run(self) -> None:
        for name, tokens in self.written.items():
            whole = alone(self.asked[name], MODEL_LEN)
            assert tokens == whole[: len(tokens)]
            if self.ended.get(name) == "length":
                assert tokens == whole

    def teardown(self) -> None:
        """Left alone, everything ends, and nothing is held."""
        while self.held:
            self.hand_over(0)
        for bench in (self.first, self.second):
            for _ in range(3000):
                if not len(bench.scheduler):
                    break
                for emission in bench.engine.step(bench.clock):
                    self._note(emission.message)
                    if emission.held:
                        bench.pool.give(emission.held.slabs, emission.held.key)
                        self.ended[emission.held.id] = "dropped"
            assert not len(bench.scheduler) and bench.pool.used == 0
            bench.pool.check()
        assert set(self.ended) == set(self.asked)


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
