"""What comes from outside is read with care: nothing unpickles, nothing foreign is believed, nothing is unbounded."""

from __future__ import annotations

import ast
import asyncio
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from diptych.channel import frames
from diptych.channel.hub import ChannelHub
from diptych.channel.keys import load_server_keys, load_worker_keys, make_keys
from diptych.errors import ChannelError, RequestError, TransferError
from diptych.messages import Admit, Fetch, Hello, Prefill, Staging, Step
from diptych.request import SamplingParams
from diptych.specs import WorkerSpec
from kvcache.layout import KvLayout
from kvtransfer import ticket as tickets
from kvtransfer.cooperative import run_to_end
from kvtransfer.digests import DigestContext
from kvtransfer.resharding import unsharded_pool
from kvtransfer.ticket import OfferedChunk, StagingHint, Ticket
from kvtransfer.transports import nixl, shm
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.schemas.request_schema import ChatRequest, CompletionRequest

ROOT = Path(__file__).resolve().parents[2]
KEY, OTHER = b"the key of this deployment", b"the key of another one....."
PATIENCE_S = 120.0
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32")

# ---- nothing unpickles

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "eval", "exec", "yaml.load"}
# A file without any of these has no danger, and need not be parsed.
SUSPICIOUS = re.compile(
    rf"\b(?:{'|'.join(sorted({*MODULES, *CALLS} - {'yaml.load'}))}|allow_pickle|(?:torch|yaml)\s*\.\s*load)\b"
)
CHECKPOINT = "models/train.py"  # of one's own training run, on one's own disk, and tensors only


def sources() -> list[Path]:
    """Every Python file of the repository."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    found = [file for folder in folders for file in folder.rglob("*.py") if "build" not in file.parts]
    return sorted({*found, *ROOT.glob("*.py")})


def dangers(text: str, name: str = "") -> list[str]:
    """What in a file can turn bytes into code."""
    if SUSPICIOUS.search(text) is None:
        return []
    dangerous = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            dangerous += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            dangerous.append(node.module or "")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in CALLS or called.rpartition(".")[2] in CALLS - {"eval"}:
                dangerous.append(called)
            if called == "torch.load" and (name != CHECKPOINT or options.get("weights_only") != "True"):
                dangerous.append(called)
            if options.get("allow_pickle", "False") != "False":
                dangerous.append(f"{called}(allow_pickle)")
            if called in ("__import__", "importlib.import_module") and any(
                isinstance(word, ast.Constant) and word.value in MODULES for word in node.args
            ):
                dangerous.append(called)
    return dangerous


def test_nothing_in_this_repository_unpickles() -> None:
    files = sources()
    assert len(files) > 200, "where is the repository?"
    found = {}
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        if dangerous := dangers(file.read_text("utf-8"), name):
            found[name] = dangerous
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import numpy as np, dill as d",
        "from cloudpickle import loads",
        "def f():\n  from marshal import loads",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "importlib.import_module('pickle')",
        "eval(text)",
    ],
)
def test_the_search_finds(text: str) -> None:
    assert dangers(text)


# ---- no client says anything about a transfer

GOOD: dict[type[Any], dict[str, Any]] = {
    ChatRequest: {"model": "toy", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "toy", "prompt": "hi"},
}
FOREIGN = [
    "kv_transfer_params",
    "do_remote_prefill",
    "do_remote_decode",
    "remote_engine_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disaggregated_params",
    "data_parallel_rank",
    "prefill_worker",
    "decode_worker",
    "worker",
    "incarnation",
    "ticket",
    "hint",
    "slabs",
    "epoch",
    "request",
    "endpoint",
    "lease",
    "stage",
    "output",
    "origin",
    "scope",
    "tenant",
]


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("field", FOREIGN)
def test_no_client_says_anything_about_a_transfer(kind: type[Any], field: str) -> None:
    parse_body(msgspec.json.encode(GOOD[kind]), kind, 64)
    for value in (None, "x", 1, {}, {"remote_host": "elsewhere", "remote_port": 1}):
        with pytest.raises(RequestError) as caught:
            parse_body(msgspec.json.encode({**GOOD[kind], field: value}), kind, 64)
        assert (caught.value.failure.status, caught.value.failure.param) == (400, field)


def test_no_field_of_a_request_is_one_of_the_transfer() -> None:
    """Whatever is added to the API or to the wire: the two have no word in common."""
    asked = {name for kind in GOOD for name in kind.__struct_fields__}
    wire = {
        name for kind in (Ticket, StagingHint, DigestContext, OfferedChunk) for name in kind.__struct_fields__
    }
    assert not asked & wire


# ---- keys


def ticket() -> Ticket:
    terms = DigestContext("r", 1, 100, (0, 2), "float32", (2, 2, 2, 64, 8), "f" * 64, 16384)
    return Ticket(terms, "prefill-0", "life", (OfferedChunk(3, bytes(16)), OfferedChunk(5, bytes(16))))


def hint() -> StagingHint:
    return StagingHint("r", 1, "prefill-0", "life", 0, (3, 5), 7)


def test_another_key_opens_nothing() -> None:
    assert tickets.decode_ticket(tickets.encode_ticket(ticket(), KEY), KEY) == ticket()
    assert tickets.decode_hint(tickets.encode_hint(hint(), KEY), KEY) == hint()
    for read, raw in (
        (tickets.decode_ticket, tickets.encode_ticket(ticket(), OTHER)),
        (tickets.decode_hint, tickets.encode_hint(hint(), OTHER)),
        (tickets.decode_ticket, tickets.encode_hint(hint(), KEY)),
        (tickets.decode_hint, tickets.encode_ticket(ticket(), KEY)),
    ):
        with pytest.raises(TransferError, match="refused"):
            read(raw, KEY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The keys of two deployments."""
    both = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    for folder in both:
        make_keys(folder)
    return both


@pytest.fixture
async def hub(folders: tuple[Path, Path]) -> Any:
    hub = ChannelHub("tcp://127.0.0.1:0", load_server_keys(folders[0]), "g", beat_s=0.05)
    hub.open()
    yield hub
    hub.close()


class UntrustedPeer:
    """A socket that says what it likes, with the keys in a folder."""

    def __init__(self, hub: ChannelHub, folder: Path, server: Path) -> None:
        keys, known = load_worker_keys(folder), load_worker_keys(server)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTING_ID, b"raw/1")
        self.socket.set(zmq.CURVE_SERVERKEY, known.server_public)
        self.socket.set(zmq.CURVE_PUBLICKEY, keys.public)
        self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        self.monitor = self.socket.get_monitor_socket()
        self.socket.connect(hub.address)

    def say(self, payload: bytes, session: bytes = b"session1", number: int = 0) -> None:
        self.socket.send_multipart([frames.HEADER.pack(session, number, 0), payload])

    def events(self) -> set[int]:
        """What has happened to the connection."""
        seen = set()
        while self.monitor.poll(0):
            seen.add(int.from_bytes(self.monitor.recv_multipart()[0][:2], "little"))
        return seen

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        self._context.term()


HELLO = Hello("raw", "decode", "life", "f", {}, "host", 1, 10, 100, 2048, {}, link=b"session1".hex())


@pytest.mark.parametrize("mine", [0, 1], ids=["our gateway's key only", "nothing of ours"])
async def test_who_has_another_key_is_refused(hub: ChannelHub, folders: tuple[Path, Path], mine: int) -> None:
    """A worker of another deployment; and one that takes our gateway for its own."""
    stranger = UntrustedPeer(hub, folders[1], folders[mine])
    hearing = asyncio.create_task(hub.receive_message())
    failed = {zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED}
    try:
        stranger.say(frames.pack_message(HELLO))
        async with asyncio.timeout(PATIENCE_S):
            while not stranger.events() & failed and not hub.refused["denied"]:
                await asyncio.sleep(0.01)
        assert not hearing.done()
    finally:
        stranger.close()
    friend = UntrustedPeer(hub, folders[0], folders[0])  # the control: the same words with the right key
    try:
        friend.say(frames.pack_message(HELLO))
        async with asyncio.timeout(PATIENCE_S):
            assert isinstance((await hearing)[1], Hello)
    finally:
        friend.close()


async def test_a_message_that_is_too_long_is_not_read(hub: ChannelHub, folders: tuple[Path, Path]) -> None:
    stranger = UntrustedPeer(hub, folders[0], folders[0])
    hearing = asyncio.create_task(hub.receive_message())
    try:
        stranger.say(frames.pack_message(HELLO))
        async with asyncio.timeout(PATIENCE_S):
            await hearing
            hearing = asyncio.create_task(hub.receive_message())
            stranger.say(bytes(frames.MAX_FRAME_BYTES + 4096), number=1)
            while zmq.EVENT_DISCONNECTED not in stranger.events():
                await asyncio.sleep(0.01)
        assert not hearing.done()
    finally:
        hearing.cancel()
        stranger.close()


def test_the_sender_of_a_message_that_is_too_long_gets_an_error() -> None:
    with pytest.raises(ChannelError, match="longer than the limit"):
        frames.pack_message(Admit("r", 1, [1], [], SamplingParams(8, 1), bytes(frames.MAX_FRAME_BYTES), 1.0))


# ---- parsers: whatever comes, the answer is the one error they promise

MESSAGES = [
    frames.pack_message(Prefill("r", 1, [1, 2, 3], [], SamplingParams(8, 1), 3.0, stage=True)),
    frames.pack_message(Staging("r", 1, b"hint")),
    frames.pack_message(Fetch("r", 1, [5], b"ticket", 3.0)),
    frames.pack_message(HELLO),
    frames.pack_message(Step([])),
]
NOISE = (msgspec.MsgspecError, UnicodeDecodeError)  # both ends of the channel take either for garbage
SIGNED = [tickets.encode_ticket(ticket(), KEY), tickets.encode_hint(hint(), KEY)]


def mutated(raw: bytes, seed: int) -> bytes:
    """A message with some bytes changed, some cut out, some put in."""
    rng, out = random.Random(seed), bytearray(raw)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(3):
            case 0:
                del out[at : at + rng.randint(1, 8)]
            case 1:
                out[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                out[at : at + 1] = rng.randbytes(1)
    return bytes(out)


def seeds(times: int) -> Iterator[int]:
    yield from range(times)


@pytest.mark.parametrize("raw", MESSAGES, ids=range(len(MESSAGES)))
def test_mutated_messages_are_read_or_refused(raw: bytes) -> None:
    for seed in seeds(2_000):
        for read in (frames.decode_from_worker, frames.decode_from_gateway):
            try:
                message = read(mutated(raw, seed))
            except NOISE:
                continue
            assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize(
    ("read", "raw"),
    [(frames.decode_from_gateway, MESSAGES[0]), (frames.decode_from_worker, frames.pack_message(HELLO))],
)
def test_unknown_fields_may_not_be_nested_without_end(read: Callable[[bytes], object], raw: bytes) -> None:
    """They are for messages of later versions. A parser that recurses into them must not take its process along."""
    fields = msgspec.msgpack.decode(raw)
    longer, depth = msgspec.msgpack.encode([*fields, None]), 100_000
    assert read(longer) == read(raw)
    with pytest.raises(NOISE):
        read(longer[:-1] + b"\x91" * depth + b"\xc0")


@given(st.binary(max_size=400))
def test_noise_is_refused_everywhere(noise: bytes) -> None:
    for read in (frames.decode_from_worker, frames.decode_from_gateway):
        with pytest.raises(NOISE):
            read(noise)
    with pytest.raises(NOISE):
        msgspec.json.decode(noise, type=WorkerSpec)
    for sealed in (
        noise,
        noise + tickets._compute_mac(noise, KEY, "ticket"),
        noise + tickets._compute_mac(noise, KEY, "hint"),
    ):
        for unseal in (tickets.decode_ticket, tickets.decode_hint):
            with pytest.raises(TransferError):
                unseal(sealed, KEY)


@pytest.mark.parametrize(
    ("kind", "raw"), [("ticket", SIGNED[0]), ("hint", SIGNED[1])], ids=["ticket", "hint"]
)
def test_whatever_is_rightly_signed_is_sound_or_refused(kind: str, raw: bytes) -> None:
    """Even one who has the key gets no contradiction past: bounds hold, numbers agree."""
    read: Callable[[bytes, bytes], Any] = tickets.decode_ticket if kind == "ticket" else tickets.decode_hint
    sound = 0
    for seed in seeds(4_000):
        body = mutated(raw[: -tickets.MAC_BYTES], seed)
        try:
            got = read(body + tickets._compute_mac(body, KEY, kind), KEY)
        except TransferError:
            continue
        sound += 1
        slabs = [chunk.slab for chunk in got.chunks] if kind == "ticket" else list(got.slabs)
        assert 0 < len(slabs) == len(set(slabs)) <= tickets.MAX_CHUNKS and min(slabs) >= 0
        assert kind == "hint" or len(slabs) == got.context.num_chunks
    assert sound < 4_000


def test_more_than_a_ticket_may_have_is_not_even_hashed() -> None:
    for read in (tickets.decode_ticket, tickets.decode_hint):
        with pytest.raises(TransferError) as caught:
            read(bytes(tickets.MAX_TICKET_BYTES + 1), KEY)
        assert "bytes, of at most" in caught.value.why


@pytest.mark.parametrize("make_puller", [shm.ShmPuller, nixl.NixlPuller], ids=["shm", "nixl"])
def test_mutated_endpoints_are_refused(make_puller: Any) -> None:
    """What a worker says of where it is: whatever does not lead there is an error, and one that is reported."""
    puller = make_puller(unsharded_pool(LAYOUT, memoryview(bytearray(4 * LAYOUT.chunk_bytes))))
    address = ["elsewhere", 1, 5, 4 * LAYOUT.chunk_bytes, bytes(16)]
    part: list[Any] = [[[0, 2], [0, 2]], address]
    good = msgspec.msgpack.encode([[part], None, 2])
    for seed in seeds(300):
        with pytest.raises(TransferError):
            run_to_end(puller.link_task("prefill-0", "life", mutated(good, seed)))
    puller.close()
