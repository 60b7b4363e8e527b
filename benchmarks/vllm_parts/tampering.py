"""Part `tampered`: flipped bytes in a transfer buffer, and tickets that were altered, replayed, stale or of others."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_parts.check_part import PYTHON_VARIABLE, PartContext
from benchmarks.vllm_parts.roles import watch_cpu
from diptych.messages import Abort, Offer, Prefill, Pulled, Release
from diptych.request import SamplingParams
from kvtransfer.ticket import Ticket, decode_ticket, encode_ticket
from services.host.model_probe import EMBEDDED_MODEL, resolve_embedded
from tests.support.vllm_worker_pair import LinkedPair, vllm_command
from tests.support.vllm_worker_serving import KEY

EACH, PROMPT_TOKENS, NUM_PROMPTS = 1000, 130, 8
# More than the buffer holds.
NUM_WAITING, WAITING_TOKENS, SETTLE_S = 8, 512, 2.0
GREEDY = SamplingParams(max_tokens=4, seed=1, temperature=0.0)
OTHER_KEY = bytes(32)


@dataclass(slots=True)
class Tampering:
    """Hand-offs between two vLLM processes, each spoilt in one way; what came of them by the way's name."""

    pair: LinkedPair
    chance: random.Random
    prompts: list[list[int]]
    right: list[list[int]]
    ended: dict[str, Counter[str]]
    wrong: int = 0
    number: int = 0

    def spoil(self, kind: str, spoiler: Callable[[Tampering, str, bytes], bytes]) -> None:
        """One hand-off; `spoiler` gets its name and ticket, and returns the ticket that the decode worker gets."""
        self.number += 1
        which, name = self.chance.randrange(len(self.prompts)), f"{kind} {self.number}"
        # Under a scope of its own its chunks are cached nowhere, so all of them are pulled.
        prompt = self.prompts[which]
        offer = self.pair.offer(name, prompt, GREEDY, scope=name)
        ticket = spoiler(self, name, offer.ticket)
        self.pair.admit(name, prompt, GREEDY, ticket, scope=name)
        end = self.pair.decode.wait_end(name)
        tokens = self.pair.prefill.tokens(name) + self.pair.decode.tokens(name)
        # A request that is answered all the same has the right tokens, or it is wrong.
        self.wrong += tokens != self.right[which][: len(tokens)] or (end == "length" and kind != "sound")
        self.ended.setdefault(kind, Counter())[end] += 1
        self.pair.prefill.tell(Release(name, 0))
        # Both lists are searched from their beginning.
        self.pair.prefill.said.clear()
        self.pair.decode.said.clear()


def leave(tampering: Tampering, name: str, ticket: bytes) -> bytes:
    """The ticket as it is."""
    return ticket


def flip(tampering: Tampering, name: str, ticket: bytes) -> bytes:
    """Flip a bit of the KV that is offered, in the buffer of the prefill worker."""
    pair, chance = tampering.pair, tampering.chance
    size, chunk = pair.prefill.ready["slab_bytes"], chance.choice(decode_ticket(ticket, KEY).chunks)
    pair.prefill.memory[chunk.slab * size + chance.randrange(size)] ^= 1 << chance.randrange(8)
    return ticket


def alter(tampering: Tampering, name: str, ticket: bytes) -> bytes:
    """Flip a bit of the ticket."""
    changed = bytearray(ticket)
    changed[tampering.chance.randrange(len(changed))] ^= 1 << tampering.chance.randrange(8)
    return bytes(changed)


def replay(tampering: Tampering, name: str, ticket: bytes) -> bytes:
    """The ticket of another request, which was served before."""
    pair, prompt = tampering.pair, tampering.prompts[0]
    served = f"served before {name}"
    offer = pair.offer(served, prompt, GREEDY, scope=served)
    pair.admit(served, prompt, GREEDY, offer.ticket, scope=served)
    pair.decode.wait_first(Pulled, served)
    pair.prefill.tell(Release(served, 0))
    pair.decode.wait_end(served)
    return offer.ticket


def resign(change: Callable[[Ticket], Ticket], key: bytes = KEY) -> Callable[[Tampering, str, bytes], bytes]:
    """A spoiler that signs the changed ticket with `key`."""
    return lambda tampering, name, ticket: encode_ticket(change(decode_ticket(ticket, KEY)), key)


def outdate(ticket: Ticket) -> Ticket:
    """The ticket of a life of the prefill worker that is over."""
    return replace_fields(ticket, incarnation="0" * len(ticket.incarnation))


def replace_fields(ticket: Ticket, **changes: str) -> Ticket:
    """The ticket with other fields."""
    return Ticket(**({name: getattr(ticket, name) for name in ticket.__struct_fields__} | changes))


SPOILERS: dict[str, Callable[[Tampering, str, bytes], bytes]] = {
    "sound": leave,
    "flipped": flip,
    "altered": alter,
    "replayed": replay,
    "stale": resign(outdate),
    "foreign": resign(lambda ticket: ticket, OTHER_KEY),
}


def measure_tampered(context: PartContext) -> None:
    """Each kind of tampering, and as many sound hand-offs among them; figures are written as they come."""
    chance, each = random.Random(0), max(10, int(EACH * context.share))
    with tempfile.TemporaryDirectory() as folder:
        pair = LinkedPair(
            vllm_command(os.environ[PYTHON_VARIABLE]), link_model(Path(folder)), 1, Path(folder)
        )
        try:
            vocab = pair.prefill.ready["vocab"]
            prompts = [
                [chance.randrange(260, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)
            ]
            right = pair.references({str(i): prompt for i, prompt in enumerate(prompts)}, GREEDY)
            tampering = Tampering(pair, chance, prompts, list(right.values()), {})
            for number in range(each):
                for kind, spoiler in SPOILERS.items():
                    tampering.spoil(kind, spoiler)
                if number % 50 == 0 or number == each - 1:
                    context.record(figures_of(tampering))
            pair.check_rest()
            context.record(figures_of(tampering) | {"tampered_held": 0})
            context.record({"waiting_percent": watch_waiting(pair, chance)})
            pair.check_rest()
        finally:
            pair.close()


def watch_waiting(pair: LinkedPair, chance: random.Random) -> float:
    """The CPU time of the busier process in percent of a core, while vLLM holds prompts that wait for the buffer."""
    names, vocab = [f"waiting {number}" for number in range(NUM_WAITING)], pair.prefill.ready["vocab"]
    for name in names:
        prompt = [chance.randrange(260, vocab) for _ in range(WAITING_TOKENS)]
        pair.prefill.tell(Prefill(name, 0, prompt, [], GREEDY, 600.0))
    for name in names:
        pair.prefill.wait_outputs(name)
    time.sleep(SETTLE_S)
    offered = [name for name in names if pair.prefill.first(Offer, name)]
    assert 0 < len(offered) < len(names), f"{offered} fit into the buffer"
    percent = watch_cpu([worker.process.pid for worker in (pair.prefill, pair.decode)])
    pair.prefill.tell(*(Abort(name, 0) for name in names))
    return percent


def figures_of(tampering: Tampering) -> dict[str, object]:
    """What came of the hand-offs so far. A worker that ends raises an error in place of a figure."""
    sound = tampering.ended["sound"]
    alive = [worker.process.poll() is None for worker in (tampering.pair.prefill, tampering.pair.decode)]
    return {
        "wrong": tampering.wrong,
        "engine_ends": alive.count(False),
        "sound_failed": sound.total() - sound["length"],
        "ended": {kind: dict(ends) for kind, ends in tampering.ended.items()},
    }


def link_model(folder: Path) -> str:
    """The embedded model without the file of our own that vLLM would take for weights."""
    target = folder / "model"
    target.mkdir()
    for path in Path(resolve_embedded(EMBEDDED_MODEL)).iterdir():
        if path.name != "kvquant.safetensors":
            (target / path.name).symlink_to(path)
    return str(target)
