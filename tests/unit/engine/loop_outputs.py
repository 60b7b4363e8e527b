"""What an engine puts out, and an observer that records its steps."""

from __future__ import annotations

from collections.abc import Sequence as Keys

from diptych.messages import Output
from engine.outputs import SequenceOutput
from engine.protocols import OnLayersDone
from engine.sequence import Sequence
from tests.unit.engine.fakes import EngineBench


def finish(bench: EngineBench, limit: int = 10_000) -> list[SequenceOutput]:
    """Step until nothing is left."""
    emitted: list[SequenceOutput] = []
    while len(bench.scheduler):
        assert bench.engine.has_work and limit, "stuck"
        emitted += bench.engine.step(bench.clock)
        limit -= 1
    return emitted


def outputs(emitted: list[SequenceOutput], name: str) -> list[Output]:
    return [e.message for e in emitted if isinstance(e.message, Output) and e.message.request == name]


def written(emitted: list[SequenceOutput], name: str) -> list[int]:
    return [token for output in outputs(emitted, name) for token in output.tokens]


class RecordingObserver:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.parts: list[tuple[str, int, int]] = []
        self.layers: list[int] = []
        self.gone: list[str] = []

    def on_slabs_taken(self, slabs: Keys[int]) -> None:
        self.taken += slabs

    def on_step_begin(self, parts: Keys[tuple[Sequence, int]]) -> OnLayersDone | None:
        self.parts += [(seq.id, seq.computed, end) for seq, end in parts]
        return self.layers.append

    def on_sequence_dropped(self, key: str) -> None:
        self.gone.append(key)
