"""A toy in vLLM's place, for everything above `vllm_worker.port.EnginePort`: its tokens are hashes of the KV it reads.

    token i has 8 bytes of KV    a hash of token i - 1's, as they lie in the block, and of token i
    the next token               a hash of all KV before it, as it lies in the blocks

So KV that is missing, stale, of another request or altered gives other tokens. Blocks are full of junk when somebody
gets them. It schedules as vLLM does: chunked steps, a prefix cache, preemption, loads before the step that uses them,
saves before the step after; copies are those of `vllm_worker.rank_copies`, between its blocks and a real buffer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

import numpy as np
import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.request import SamplingParams
from kvtransfer.transfer_buffer import TransferBuffer
from vllm_worker.blocks import BlockRegion, layer_parts
from vllm_worker.exchange import BlockCopies, KvExchange, ScheduledTokens
from vllm_worker.port import ComputedPart, PortCounts, PortFacts, PortOutput, PortRequest, SavedKv
from vllm_worker.rank_copies import RankCopies

LAYERS, BYTES_PER_LAYER = 2, 4
LAYER_BLOCK_BYTES = CHUNK_TOKENS * BYTES_PER_LAYER
VOCAB = 500
# The tokens of answers; a prompt may have others too.
FIRST_TOKEN = 5
JUNK = 0xA5


def next_token(kv: bytes, sampling: SamplingParams, position: int, banned: Sequence[int] = ()) -> int:
    """The token that follows `kv`, which no `banned` one is. Only with a temperature the seed counts."""
    noise = b"" if sampling.temperature == 0.0 else f"{sampling.seed} {position}".encode()
    for salt in count():
        digest = blake2b(kv + noise + bytes([salt]), digest_size=8).digest()
        token = FIRST_TOKEN + int.from_bytes(digest, "big") % (VOCAB - FIRST_TOKEN)
        if token not in banned:
            return token
    raise AssertionError("every token is banned")


def extend_kv(before: bytes, token: int) -> bytes:
    """The KV of a token behind one whose KV is `before`."""
    return blake2b(before + token.to_bytes(4, "big"), digest_size=LAYERS * BYTES_PER_LAYER).digest()


def answer_alone(prompt: Sequence[int], sampling: SamplingParams, max_model_len: int) -> list[int]:
    """The whole answer to a prompt, from no blocks at all: what every engine with a toy port has to give."""
    tokens, layers = list(prompt), ([b""], [b""])
    last = b""
    for token in tokens:
        last = _append_kv(layers, last, token)
    answer: list[int] = []
    while len(answer) < sampling.max_tokens and len(tokens) < max_model_len:
        token = next_token(_join(layers), sampling, len(tokens), _banned(sampling, len(answer)))
        answer.append(token)
        tokens.append(token)
        if token in sampling.stop_token_ids:
            break
        last = _append_kv(layers, last, token)
    return answer


def _append_kv(layers: tuple[list[bytes], ...], before: bytes, token: int) -> bytes:
    kv = extend_kv(before, token)
    for index, layer in enumerate(layers):
        layer.append(kv[index * BYTES_PER_LAYER : (index + 1) * BYTES_PER_LAYER])
    return kv


def _join(layers: tuple[list[bytes], ...]) -> bytes:
    return b"".join(b"".join(layer) for layer in layers)


def _banned(sampling: SamplingParams, generated: int) -> Sequence[int]:
    return sampling.stop_token_ids if generated < sampling.min_tokens else ()


@dataclass(eq=False)
class _Running:
    """A request in the toy. `computed` tokens have KV in `blocks`."""

    name: str
    request: PortRequest
    tokens: list[int]
    order: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int | None = None
    silent: bool = True

    @property
    def rank(self) -> tuple[int, float, int]:
        """Whoever has the least starts first, and is preempted last."""
        return self.request.priority, self.request.arrived_s, self.order


class BlockPool:
    """The toy's blocks: who uses them, and which ones without a user still have a known prefix."""

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.caching = caching
        self.cache = torch.full((LAYERS * num_blocks * LAYER_BLOCK_BYTES,), JUNK, dtype=torch.uint8)
        self.kv = self.cache.numpy().reshape(LAYERS, num_blocks, CHUNK_TOKENS, BYTES_PER_LAYER)
        self.regions = tuple(
            BlockRegion(f"layer {layer}", layer * num_blocks * LAYER_BLOCK_BYTES, LAYER_BLOCK_BYTES)
            for layer in range(LAYERS)
        )
        self.users = [0] * num_blocks
        # Those without a user, the one that was used longest ago first.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.prefixes: dict[bytes, int] = {}
        self._prefix_of: dict[int, bytes] = {}

    @property
    def used(self) -> int:
        """Blocks that have a user."""
        return len(self.users) - len(self.free)

    def take(self, number: int) -> list[int]:
        """So many blocks without a user, full of junk."""
        taken = [self.free.popitem(last=False)[0] for _ in range(number)]
        for block in taken:
            self._forget(block)
            self.users[block] = 1
            self.kv[:, block] = JUNK
        return taken

    def share(self, block: int) -> None:
        """One more user of a block."""
        self.users[block] += 1
        self.free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """A user of these blocks is gone."""
        for block in reversed(blocks):
            self.users[block] -= 1
            assert self.users[block] >= 0
            if not self.users[block]:
                self.free[block] = None

    def name(self, prefix: bytes, block: int) -> None:
        """A block has the whole KV of this prefix."""
        if self.caching and prefix not in self.prefixes:
            self._forget(block)
            self.prefixes[prefix], self._prefix_of[block] = block, prefix

    def forget_all(self) -> None:
        """No block has a known prefix any more."""
        self.prefixes.clear()
        self._prefix_of.clear()

    def _forget(self, block: int) -> None:
        if (prefix := self._prefix_of.pop(block, None)) is not None:
            del self.prefixes[prefix]


class _FailingCopies(RankCopies):
    """Copies of which some loads fail, as `fails` says."""

    fails: Callable[[], bool] = staticmethod(lambda: False)

    def _load(self, copies: BlockCopies) -> None:
        if self.fails():
            raise OSError("this load was chosen to fail")
        super()._load(copies)


class ToyPort:
    """An `EnginePort` of one rank. `fails` is asked at each load whether it fails."""

    def __init__(
        self,
        *,
        num_blocks: int = 34,
        max_model_len: int = 2048,
        max_num_seqs: int = 8,
        step_tokens: int = 512,
        prefix_caching: bool = True,
        fails: Callable[[], bool] = lambda: False,
    ) -> None:
        self.exchange = KvExchange()
        self.pool = BlockPool(num_blocks, prefix_caching)
        self.facts = PortFacts(
            version="toy", attention_backend="HASHES", device="cpu", dtype="uint8", block_tokens=CHUNK_TOKENS,
            num_blocks=num_blocks, max_model_len=max_model_len, max_num_batched_tokens=step_tokens, vocab_size=VOCAB,
            max_num_seqs=max_num_seqs, parts=layer_parts(self.pool.regions), seeds_by_position=True,
        )  # fmt: skip
        self._copies = _FailingCopies(self.pool.cache, self.pool.regions, num_blocks, 0)
        self._copies.fails = fails
        self._running: list[_Running] = []
        self._waiting: list[_Running] = []
        # Blocks that ended requests hold until their KV was saved, by the request's name.
        self._held: dict[str, list[int]] = {}
        self._counts = PortCounts()
        self._numbers = count()
        self._idle = False
        # Whether a request has ended since the last step began: as in vLLM, ranks hear of it in the next one.
        self._ended = False
        self._parts: list[ComputedPart] = []

    def attach_buffer(self, buffer: TransferBuffer) -> None:
        """See `EnginePort.attach_buffer`."""
        self.exchange.attach_buffer(buffer, self.facts.ranks)

    # ---- requests

    def add(self, request: PortRequest) -> None:
        """See `EnginePort.add`."""
        number = next(self._numbers)
        name = f"{request.key}~{number}"
        assert all(one.request.key != request.key for one in self._requests()), "added twice"
        self.exchange.expect(name, request.key, request.num_tokens, request.save, request.load)
        self._waiting.append(_Running(name, request, [*request.prompt, *request.output], number))
        self._idle = False

    def abort(self, keys: list[str]) -> None:
        """See `EnginePort.abort`."""
        self.exchange.abort_saves(keys)
        for one in [one for one in self._requests() if one.request.key in keys]:
            self._end(one, saved=False)
            self._idle = False

    def _requests(self) -> list[_Running]:
        return [*self._running, *self._waiting]

    def _end(self, one: _Running, saved: bool) -> None:
        """A request is over: its blocks are free, or held until they were saved."""
        (self._running if one in self._running else self._waiting).remove(one)
        self._ended = True
        if self.exchange.finish(one.name, one.blocks, saved):
            self._held[one.name] = one.blocks
        else:
            self.pool.release(one.blocks)

    # ---- a step

    def step(self) -> list[PortOutput]:
        """See `EnginePort.step`."""
        self._ended = False
        scheduled = self._schedule()
        parts = [ComputedPart(one.request.key, one.computed, tokens) for one, tokens in scheduled]
        plan = self.exchange.plan_step(
            [ScheduledTokens(one.name, one.computed, n, one.blocks) for one, n in scheduled]
        )
        self._copies.begin_step(plan)
        self._copies.load()
        invalid = self._copies.take_invalid()
        if invalid:
            self.pool.forget_all()
        outputs = [self._run(one, tokens, invalid) for one, tokens in scheduled]
        freed = self._copies.take_ended()
        for name in freed & self._held.keys():
            self.pool.release(self._held.pop(name))
        self.exchange.end_step(freed, self._copies.take_results())
        self._idle = not scheduled
        self._parts = parts
        self._note(step_tokens=sum(tokens for _, tokens in scheduled))
        return [output for output in outputs if output is not None]

    def _schedule(self) -> list[tuple[_Running, int]]:
        """The requests of this step, with the number of tokens that it computes of each."""
        budget, preempted = self.facts.max_num_batched_tokens, self._counts.preemptions
        scheduled: dict[_Running, int] = {}
        for one in list(self._running):
            tokens = min(len(one.tokens) - one.computed, budget)
            if tokens and one in self._running and self._make_room(one, one.computed + tokens, scheduled):
                scheduled[one] = tokens
                budget -= tokens
        self._waiting.sort(key=lambda one: one.rank)
        while self._waiting and budget and self._counts.preemptions == preempted:
            if len(self._running) == self.facts.max_num_seqs or not (
                tokens := self._start(self._waiting[0], budget)
            ):
                break
            one = self._waiting.pop(0)
            self._running.append(one)
            scheduled[one] = tokens
            budget -= tokens
        return list(scheduled.items())

    def _make_room(self, one: _Running, tokens: int, scheduled: dict[_Running, int]) -> bool:
        """Give a running request blocks for so many tokens; others are preempted for it, or it is itself."""
        while len(self.pool.free) < (needed := _num_blocks(tokens) - len(one.blocks)):
            last = max(self._running, key=lambda other: other.rank)
            self._running.remove(last)
            self._waiting.append(last)
            scheduled.pop(last, None)
            self.pool.release(last.blocks)
            last.blocks, last.computed = [], 0
            self._note(preemptions=self._counts.preemptions + 1)
            if last is one:
                return False
        one.blocks += self.pool.take(max(0, needed))
        return True

    def _start(self, one: _Running, budget: int) -> int:
        """Give a waiting request its blocks; returns how many tokens this step computes, 0 if there is no room."""
        known = self._find_prefix(one)
        local = len(known) * CHUNK_TOKENS
        loaded = self.exchange.missing_tokens(one.name, local)
        # The last token is always computed, since the next one depends on it.
        computed = min(local + loaded, len(one.tokens) - 1)
        tokens = min(len(one.tokens) - computed, budget)
        needed = _num_blocks(max(local + loaded, computed + tokens)) - len(known)
        if len(self.pool.free) - sum(not self.pool.users[block] for block in known) < needed:
            return 0
        for block in known:
            self.pool.share(block)
        one.blocks = known + self.pool.take(needed)
        # As in vLLM, whole blocks have their names before their KV is there.
        self._name_blocks(one, max(local + loaded, computed + tokens))
        self.exchange.begin_load(one.name, one.blocks, loaded)
        one.computed = computed
        if one.cached is None:
            one.cached = local
            queries, hits = self._counts.prefix_queries + len(one.tokens), self._counts.prefix_hits + local
            self._note(prefix_queries=queries, prefix_hits=hits)
        return tokens

    def _name_blocks(self, one: _Running, tokens: int) -> None:
        """The whole blocks of the first `tokens` tokens can be found by their prefixes."""
        for prefix, block in zip(self._prefixes(one, tokens // CHUNK_TOKENS), one.blocks, strict=False):
            self.pool.name(prefix, block)

    def _find_prefix(self, one: _Running) -> list[int]:
        """The blocks that have the beginning of a request already, but for its last token."""
        found = []
        for prefix in self._prefixes(one, (len(one.tokens) - 1) // CHUNK_TOKENS):
            if (block := self.pool.prefixes.get(prefix)) is None:
                break
            found.append(block)
        return found

    @staticmethod
    def _prefixes(one: _Running, number: int) -> list[bytes]:
        """Names of the first whole blocks of a request: of its salt, and all tokens up to their end."""
        name, names = one.request.salt.encode(), []
        for index in range(number):
            chunk = one.tokens[index * CHUNK_TOKENS : (index + 1) * CHUNK_TOKENS]
            name = blake2b(name + repr(chunk).encode(), digest_size=16).digest()
            names.append(name)
        return names

    def _run(self, one: _Running, tokens: int, invalid: set[int]) -> PortOutput | None:
        """Compute so many tokens of a request, whose KV before them must not be in `invalid` blocks."""
        if any(block in invalid for block in one.blocks[: _num_blocks(one.computed)]):
            self._end(one, saved=False)
            return PortOutput(one.request.key, [], finish="error", error="its KV could not be loaded")
        for position in range(one.computed, one.computed + tokens):
            before = self._read(one, position - 1) if position else b""
            self._write(one, position, extend_kv(before, one.tokens[position]))
        one.computed += tokens
        self._name_blocks(one, one.computed)
        return self._draw(one) if one.computed == len(one.tokens) else None

    def _draw(self, one: _Running) -> PortOutput:
        """The next token of a request whose tokens all have KV."""
        request, sampling = one.request, one.request.sampling
        generated = len(one.tokens) - len(request.prompt)
        whole = self.pool.kv[:, one.blocks].reshape(LAYERS, -1)[:, : one.computed * BYTES_PER_LAYER]
        token = next_token(whole.tobytes(), sampling, len(one.tokens), _banned(sampling, generated))
        one.tokens.append(token)
        finish = None
        if sampling.max_tokens == 0:
            finish = "length"
        elif token in sampling.stop_token_ids and not request.defer_first:
            finish = "stop"
        elif request.save:
            finish = "saved"
        elif generated + 1 >= sampling.max_tokens or len(one.tokens) >= self.facts.max_model_len:
            finish = "length"
        shown = [] if request.defer_first or sampling.max_tokens == 0 else [token]
        cached = one.cached or 0 if one.silent else 0
        one.silent = False
        if finish is not None:
            self._end(one, finish == "saved")
        return PortOutput(request.key, shown, finish=finish, cached_tokens=cached)

    def _read(self, one: _Running, position: int) -> bytes:
        block, place = divmod(position, CHUNK_TOKENS)
        return self.pool.kv[:, one.blocks[block], place].tobytes()

    def _write(self, one: _Running, position: int, kv: bytes) -> None:
        block, place = divmod(position, CHUNK_TOKENS)
        self.pool.kv[:, one.blocks[block], place] = np.frombuffer(kv, np.uint8).reshape(
            LAYERS, BYTES_PER_LAYER
        )

    # ---- what is asked of it

    @property
    def has_work(self) -> bool:
        """See `EnginePort.has_work`."""
        held = self._running or self._waiting or self._held or self._ended
        return bool(held) or self.exchange.can_progress

    @property
    def is_waiting_only(self) -> bool:
        """See `EnginePort.is_waiting_only`."""
        return self._idle and not self.exchange.can_progress

    def saved(self) -> list[SavedKv]:
        """See `EnginePort.saved`."""
        return self.exchange.take_saved()

    def loaded(self) -> list[str]:
        """See `EnginePort.loaded`."""
        return self.exchange.take_loaded()

    def failed_loads(self) -> list[str]:
        """See `EnginePort.failed_loads`."""
        return self.exchange.take_failed_loads()

    @property
    def held_blocks(self) -> int:
        """See `EnginePort.held_blocks`."""
        return self.pool.used

    @property
    def counts(self) -> PortCounts:
        """See `EnginePort.counts`."""
        cached = sum(block in self.pool.free for block in self.pool.prefixes.values())
        running, waiting = len(self._running), len(self._waiting)
        self._note(running=running, waiting=waiting, used_blocks=self.pool.used, cached_blocks=cached)
        return self._counts

    def _note(self, **counts: int) -> None:
        fields = {name: getattr(self._counts, name) for name in PortCounts.__slots__}
        self._counts = PortCounts(**fields | counts)

    def computed(self) -> list[ComputedPart]:
        """See `EnginePort.computed`."""
        return self._parts

    def clear_prefixes(self) -> None:
        """See `EnginePort.clear_prefixes`."""
        self.pool.forget_all()

    def close(self) -> None:
        """See `EnginePort.close`."""
        self.exchange.close()


def _num_blocks(tokens: int) -> int:
    return -(-tokens // CHUNK_TOKENS)
