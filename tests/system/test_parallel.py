"""Workers of several ranks: their tokens are those of `transformers`, and with one rank a whole worker ends."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from diptych.eviction_spec import KeepSpec
from diptych.messages import Offer, Output, Pulled, Release
from diptych.request import SamplingParams
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_classes
from kvcache.codecs.calibration import FILE_NAME, write_calibration
from tests.support.deployment import Served, serve, wait_for
from tests.system.worker_driver import Driver

pytestmark = pytest.mark.timeout(600)

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
NEW_TOKENS = 8
LENGTHS = (1, 2, 63, 64, 65, 128, 129, 200, 400, 513, 1025, 1900)
CODECS = ("int8:0.2", "nuq4-1%")
SPLITS = {"whole": {}, "tp": {"tp": 2}, "pp": {"pp": 2}}
PAIRS = [
    ("whole", "tp"), ("tp", "whole"), ("tp", "tp"), ("whole", "pp"), ("pp", "whole"), ("pp", "tp"),
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Real text, each prompt cut from another place."""
    tokens = AutoTokenizer.from_pretrained(TINY).encode(Path(random.__file__).read_text() * 2)
    rng = random.Random(2)
    return [tokens[start : start + n] for n in LENGTHS for start in [rng.randrange(len(tokens) - n)]]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What `transformers.generate` continues each prompt with."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def run(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )  # fmt: skip
        return list(out[0, len(prompt) :].tolist())

    return [run(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's own one, with values of half of the heads scaled together, which two ranks do not cut."""
    file = tmp_path_factory.mktemp("calibration") / FILE_NAME
    own = resolve_kv_classes(Checkpoint.resolve(str(TINY)), "nuq4-1%")[0].calibration
    assert own is not None
    write_calibration(dataclasses.replace(own, group=64), file)
    return file


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, calibration: Path) -> Iterator[Driver]:
    """A prefill and a decode worker of every split, all linked. Nothing is shared, so that all KV moves every time.

    Requests that name no class get raw KV.
    """
    driver = Driver(tmp_path_factory.mktemp("parallel"), TINY)
    settings = {
        "prefix_caching": False, "kv_bytes": 96 << 20, "kv_cache_codec": f"raw:0.7,{','.join(CODECS)}",
        "kv_cache_calibration": str(calibration),
    }  # fmt: skip
    try:
        for split, changes in SPLITS.items():  # not all at once: ten processes would start on two cores
            names = [f"{role}-{split}" for role in ("prefill", "decode")]
            for name in names:
                driver.start(name, **settings, **changes)
            driver.up(*names)
        for source, target in PAIRS:
            assert driver.peer(f"decode-{target}", f"prefill-{source}").transport
        yield driver
    finally:
        driver.close()


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=["_to_".join(pair) for pair in PAIRS])
def test_tokens_are_those_of_transformers(
    source: str, target: str, workers: Driver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """All at once: prompts and answers share steps on both sides."""
    prefill, decode, sampling = (
        f"prefill-{source}",
        f"decode-{target}",
        SamplingParams(NEW_TOKENS, 0, temperature=0.0),
    )
    requests = [f"{source}-{target}-{len(prompt)}" for prompt in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        workers.prefill(prefill, request, prompt, sampling)
    for request, prompt in zip(requests, prompts, strict=True):
        offer = workers.until(request, Offer)
        workers.admit(decode, request, prompt, sampling, offer.ticket)
    for request, want in zip(requests, expected, strict=True):
        assert isinstance(workers.over(request), Output)
        assert workers.tokens(request) == want, request
        workers.send(prefill, Release(request, 0))
    workers.rest(prefill, decode)


# KV class, source and target.
KEPT_PAIRS = [
    ("raw", "whole", "tp"), ("raw", "tp", "whole"), ("raw", "tp", "tp"), ("raw", "pp", "tp"), ("int8", "whole", "tp"),
    ("nuq4-1%", "whole", "tp"), ("nuq4-1%", "tp", "whole"), ("nuq4-1%", "tp", "tp"), ("nuq4-1%", "pp", "tp"),
]  # fmt: skip
KEEPS = {"raw": KeepSpec(0.4, 64), "int8": KeepSpec(0.95), "nuq4-1%": KeepSpec(0.95)}
# Tokens of an answer whose worker is killed while it is decoded.
STREAMED = 300
# Past the first decision point of the answer; of prompts with 400, 1,025 and 1,900 tokens.
KEPT_SAMPLING, KEPT_PROMPTS = (
    SamplingParams(80, 0, temperature=0.0),
    [LENGTHS.index(n) for n in (400, 1025, 1900)],
)


class KeptAlone:
    """What a worker of one rank answers that does everything itself, with eviction, in any class."""

    def __init__(self, workers: Driver, prompts: list[list[int]]) -> None:
        self._workers, self._prompts = workers, prompts
        self._found: dict[str, list[list[int]]] = {}

    def answers(self, name: str) -> list[list[int]]:
        """To each of `KEPT_PROMPTS`, by the name of a class."""
        if name not in self._found:
            kv_class, workers = find_class(self._workers, "decode-whole", name), self._workers
            self._found[name] = [
                workers.alone(
                    "decode-whole", f"alone-{name}-{index}", self._prompts[index], KEPT_SAMPLING, KEEPS[name], kv_class
                )
                for index in KEPT_PROMPTS
            ]  # fmt: skip
        return self._found[name]


@pytest.fixture(scope="module")
def kept_alone(workers: Driver, prompts: list[list[int]]) -> KeptAlone:
    return KeptAlone(workers, prompts)


def find_class(workers: Driver, worker: str, name: str) -> str:
    """The canonical id of the class `name`, in which a worker can evict."""
    hello = workers.members[worker].hello
    assert hello is not None
    (found,) = (one for one in hello.keep_classes if one.startswith(name))
    return found


@pytest.mark.parametrize(
    ("name", "source", "target"), KEPT_PAIRS, ids=["{}-{}_to_{}".format(*one) for one in KEPT_PAIRS]
)
def test_evicted_answers_are_those_of_one_rank(
    name: str, source: str, target: str, workers: Driver, prompts: list[list[int]], kept_alone: KeptAlone
) -> None:
    """Bags move whole where ranks split alike, and are repacked where they do not; less is moved than with all rows."""
    prefill, decode, keep = f"prefill-{source}", f"decode-{target}", KEEPS[name]
    kv_class = find_class(workers, prefill, name)
    assert find_class(workers, decode, name) == kv_class
    hello = workers.members[prefill].hello
    assert hello is not None
    chunk_bytes = hello.kv_classes[kv_class][1]
    requests = [f"kept-{name}-{source}-{target}-{index}" for index in KEPT_PROMPTS]
    for request, index in zip(requests, KEPT_PROMPTS, strict=True):
        workers.prefill(prefill, request, prompts[index], KEPT_SAMPLING, keep=keep, kv_class=kv_class)
    for request, index in zip(requests, KEPT_PROMPTS, strict=True):
        ticket = workers.until(request, Offer).ticket
        workers.admit(decode, request, prompts[index], KEPT_SAMPLING, ticket, keep=keep, kv_class=kv_class)
    for request, index, want in zip(requests, KEPT_PROMPTS, kept_alone.answers(name), strict=True):
        ending = workers.over(request)
        assert isinstance(ending, Output), ending
        assert workers.tokens(request) == want, request
        moved = workers.until(request, Pulled).num_bytes
        assert moved < -(-len(prompts[index]) // 64) * chunk_bytes
        workers.send(prefill, Release(request, 0))
    workers.rest(prefill, decode)


@pytest.mark.parametrize("name", ["raw", "nuq4-1%"])
@pytest.mark.parametrize("split", ["tp", "pp"])
def test_evicted_answers_of_a_worker_that_prefills_itself_are_those_of_one_rank(
    split: str, name: str, workers: Driver, prompts: list[list[int]], kept_alone: KeptAlone
) -> None:
    prompt, worker = prompts[KEPT_PROMPTS[0]], f"decode-{split}"
    kv_class = find_class(workers, worker, name)
    found = workers.alone(worker, f"local-{name}-{split}", prompt, KEPT_SAMPLING, KEEPS[name], kv_class)
    assert found == kept_alone.answers(name)[0]
    workers.rest(worker)


@pytest.fixture(scope="module")
def served(calibration: Path) -> Iterator[Served]:
    kv = ("--kv-cache-codec", f"raw:0.7,{','.join(CODECS)}", "--kv-cache-calibration", str(calibration))
    # Requests wait for a killed worker however slow the machine is.
    with serve("--prefill-tp", "2", "--decode-tp", "2", "--recovery-s", "300", *kv) as deployment:
        yield deployment


@dataclasses.dataclass
class KeptStream:
    """A stream whose heads drop KV, in one class: its tokens so far, and in the end what it tells of its KV."""

    kv: str
    begun: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    tokens: list[str] = dataclasses.field(default_factory=list)
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)

    async def read(self, client: openai.AsyncOpenAI, prompt: list[int]) -> None:
        """Read it to its end; it has `begun` in the middle of the block behind the first decision of its answer."""
        try:
            stream = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=STREAMED, temperature=0, logprobs=0, stream=True,
                stream_options={"include_usage": True},
                extra_body={
                    "ignore_eos": True, "skip_special_tokens": False,
                    "diptych": {"kv": self.kv, "keep": KEEPS[self.kv].threshold},
                },
            )  # fmt: skip
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].logprobs is not None:
                    self.tokens += chunk.choices[0].logprobs.tokens or []
                if chunk.usage is not None:
                    self.usage = (chunk.usage.model_extra or {})["diptych"]
                if len(self.tokens) > 70:
                    self.begun.set()
        finally:
            # Nobody waits for one that failed.
            self.begun.set()


async def read_kept_streams(
    served: Served, prompt: list[int], victim: psutil.Process | None = None
) -> tuple[dict[str, KeptStream], dict[str, int]]:
    """One stream in each class, all at once; and how many tokens each had when `victim` was killed."""
    streams, had = {name: KeptStream(name) for name in KEEPS}, dict[str, int]()
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        tasks = [asyncio.create_task(one.read(client, prompt)) for one in streams.values()]
        if victim is not None:
            await asyncio.gather(*(one.begun.wait() for one in streams.values()))
            had = {name: len(one.tokens) for name, one in streams.items()}
            victim.kill()
        await asyncio.gather(*tasks)
    return streams, had


@pytest.fixture(scope="module")
def undisturbed(served: Served, prompts: list[list[int]]) -> dict[str, KeptStream]:
    """The streams of `read_kept_streams` when nothing happens, by class."""
    streams, _ = asyncio.run(read_kept_streams(served, prompts[LENGTHS.index(400)]))
    return streams


@pytest.mark.parametrize("rank", [0, 1])
def test_evicted_answers_go_on_when_a_rank_is_killed(
    rank: int, served: Served, prompts: list[list[int]], undisturbed: dict[str, KeptStream]
) -> None:
    """The worker ends with its rank, and answers in all classes are read again, decide as before, and go on.

    With a codec, a number of KV that is read again may move over the edge of a code, and a later token with it
    (docs/codecs.md).
    """
    migrated = served.metric("diptych:migrated_streams_total")
    victim = [served.worker("decode-0"), *ranks(served, "decode-0")][rank]
    streams, had = asyncio.run(read_kept_streams(served, prompts[LENGTHS.index(400)], victim))
    assert served.metric("diptych:migrated_streams_total") == migrated + len(streams)
    for name, stream in streams.items():
        whole, same = undisturbed[name], STREAMED if name == "raw" else had[name] + 60
        assert len(stream.tokens) == STREAMED and stream.tokens[:same] == whole.tokens[:same], name
        keep, expected = stream.usage["keep"], whole.usage["keep"]
        assert stream.usage["kv_class"].startswith(name) and keep["kept_rows"] < keep["all_rows"]
        assert (keep["heads"], keep["all_rows"]) == (expected["heads"], expected["all_rows"])
    wait_for(lambda: served.held() == {})


def complete(served: Served, prompt: list[int]) -> tuple[list[str], int]:
    """The new tokens, as strings, and how many prompt tokens were cached."""
    with served.client() as client:
        done = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, logprobs=0,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )  # fmt: skip
    logprobs, usage = done.choices[0].logprobs, done.usage
    assert logprobs is not None and logprobs.tokens is not None
    assert usage is not None and usage.prompt_tokens_details is not None
    return logprobs.tokens, usage.prompt_tokens_details.cached_tokens or 0


def pid(served: Served, worker: str) -> int:
    """Of the life of a worker that has introduced itself; 0 while there is none."""
    return next((int(one["pid"]) for one in served.status()["workers"] if one["worker"] == worker), 0)


def ranks(served: Served, worker: str) -> list[psutil.Process]:
    """The processes of a worker besides its own."""
    return [child for child in served.worker(worker).children() if "worker.ranks" in child.cmdline()]


async def ask(client: openai.AsyncOpenAI, begun: asyncio.Event) -> str:
    """One long stream to whatever end it comes: "done", "silence", or the name of the error that the client raises."""
    try:
        stream = await client.completions.create(
            model="tiny", prompt="def read(self):\n", max_tokens=300, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        finish = None
        async for part in stream:
            begun.set()
            finish = part.choices[0].finish_reason if part.choices else finish
        return "done" if finish else "silence"
    except openai.APIError as error:
        return type(error).__name__


async def kill_under_load(served: Served, victim: psutil.Process) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        begun = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(ask(client, one)) for one in begun]
        await asyncio.gather(*(one.wait() for one in begun))
        victim.kill()
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_rank_is_a_worker_that_comes_back(
    role: str, served: Served, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    prompt, want = prompts[7], [tokenizer.decode([token]) for token in expected[7]]
    assert complete(served, prompt)[0] == want
    assert complete(served, prompt) == (want, 192)  # 3 of its 200 tokens' chunks, on both ranks
    worker, before = f"{role}-0", served.worker(f"{role}-0").pid
    (victim,) = ranks(served, worker)
    ended = asyncio.run(kill_under_load(served, victim))
    assert "silence" not in ended, "a stream ended cleanly without a finish"
    wait_for(lambda: pid(served, worker) not in (0, before) and served.ready())
    assert not psutil.pid_exists(before) and len(ranks(served, worker)) == 1
    assert complete(served, prompt)[0] == want
    wait_for(lambda: served.held() == {})
