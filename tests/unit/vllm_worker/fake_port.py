"""A port that does what a test tells it."""

from __future__ import annotations

from dataclasses import replace

from diptych.request import SamplingParams, Tenancy
from engine.sequence import Sequence
from kvtransfer.transfer_buffer import TransferBuffer
from vllm_worker.port import (
    ComputedPart,
    PortCounts,
    PortFacts,
    PortOutput,
    PortRefused,
    PortRequest,
    SavedKv,
)

FACTS = PortFacts(
    version="0",
    attention_backend="NONE",
    device="cpu",
    dtype="float32",
    block_tokens=64,
    num_blocks=10,
    max_model_len=500,
    max_num_batched_tokens=500,
    vocab_size=1000,
)


class FakePort:
    """Each step returns the next of `script`; `refusal` refuses the next request."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.requests: list[PortRequest] = []
        self.aborted: list[str] = []
        self.script: list[list[PortOutput]] = []
        self.refusal: PortRefused | None = None
        self.has_work = self.is_waiting_only = False
        self.held_blocks = self.steps = 0
        self.counts = PortCounts(step_tokens=1)
        self.parts: list[ComputedPart] = []
        self.saved_kv: list[SavedKv] = []
        self.loaded_keys: list[str] = []
        self.failed_keys: list[str] = []

    def attach_buffer(self, buffer: TransferBuffer) -> None:
        """Nothing."""

    def add(self, request: PortRequest) -> None:
        """Keep it, or refuse it."""
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.has_work = True

    def abort(self, keys: list[str]) -> None:
        """Keep the keys."""
        self.aborted += keys

    def step(self) -> list[PortOutput]:
        """What the script says."""
        self.steps += 1
        return self.script.pop(0) if self.script else []

    def saved(self) -> list[SavedKv]:
        """`saved_kv`, once."""
        taken, self.saved_kv = self.saved_kv, []
        return taken

    def loaded(self) -> list[str]:
        """`loaded_keys`, once."""
        taken, self.loaded_keys = self.loaded_keys, []
        return taken

    def failed_loads(self) -> list[str]:
        """`failed_keys`, once."""
        taken, self.failed_keys = self.failed_keys, []
        return taken

    def computed(self) -> list[ComputedPart]:
        """`parts`."""
        return self.parts

    def clear_prefixes(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def sampling(**changes: object) -> SamplingParams:
    """Greedy sampling of eight tokens, with changes."""
    return replace_fields(SamplingParams(max_tokens=8, seed=3, temperature=0.0), changes)


def replace_fields(params: SamplingParams, changes: dict[str, object]) -> SamplingParams:
    """`params` with changes."""
    values = {name: getattr(params, name) for name in params.__struct_fields__} | changes
    return SamplingParams(**values)


def sequence(
    name: str = "r", epoch: int = 1, tokens: int = 100, deadline_s: float = 1e9, **changes: object
) -> Sequence:
    """A sequence with a prompt of made-up tokens; `changes` are its fields, and "sampling" a dictionary."""
    values = dict(changes)
    params = sampling(**values.pop("sampling", {}))  # type: ignore[arg-type]
    priority = values.pop("priority", 0)
    return Sequence(
        name,
        epoch,
        list(range(tokens)),
        params,
        deadline_s,
        tenancy=Tenancy(priority=priority),  # type: ignore[arg-type]
        **values,  # type: ignore[arg-type]
    )


def request(**changes: object) -> PortRequest:
    """A request of 100 tokens; "sampling" may be a dictionary of changes."""
    values = dict(changes)
    params = sampling(**values.pop("sampling", {}))  # type: ignore[arg-type]
    return replace(PortRequest("r#1", list(range(100)), [], params), **values)  # type: ignore[arg-type]
