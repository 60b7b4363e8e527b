"""The whole server, and the engine in process, beside what people would pick instead: as many as this machine has.

    python -m benchmarks.rivals --rivals DIR [--json] [--rounds 5] [--only NAME ...]

DIR holds one virtual environment per rival, under the name below; `RIVAL_<NAME>` (upper case, _ for -) names another
place for one. Those that are not there are reported as absent. Nothing is installed; models are converted here.

    vllm, transformers        servers in virtual environments (`vllm serve`, `transformers serve`)
    llama-server              a binary, and beside it the model as llama-server.gguf
    openvino                  in process: a virtual environment with openvino-genai and optimum-intel
    onnxruntime-genai         in process: a virtual environment with onnxruntime-genai, onnx and torch

Servers answer over HTTP: streaming, prompts of about 128 tokens of which no two begin alike, 64 new tokens, greedy, at
1 and at 16 streams; all servers are up, one answers at a time, in turn; medians over rounds.

    http.<rival>.c1, c16           output tokens per second of wall time, diptych (prefill 1, decode 1) / rival
    http.<rival>.cpu_c1, cpu_c16   output tokens per CPU second of all its processes: firm against a neighbour's load
    process.<rival>.b1, b8, b32    decoded tokens per CPU second of one thread, engine / rival
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import psutil
import torch
import uvloop
from tokenizers import Tokenizer

import benchmarks.script_path  # noqa: F401
from benchmarks.engine import BATCHES, EMBEDDED, NEW, PROMPT, Ours, make_prompts
from benchmarks.load.deployment import START_S, STOP_S, StampedStream, serving_deployment
from services.host.ports import claim_port

STREAMS = (1, 16)
TIMES = {1: 4, 16: 1}  # requests per stream in a round
OURS = {"diptych": ("--prefill", "1", "--decode", "1"), "diptych-colocated": ("--colocated", "1")}
PATH = "/v1/chat/completions"

# Commands of servers, from the folder of the virtual environment (or the binary); {model} and {port} are filled in.
SERVERS: dict[str, tuple[str, ...]] = {
    "vllm": (
        "{home}/bin/vllm", "serve", "{model}", "--port", "{port}", "--enforce-eager", "--dtype", "float32",
        "--max-model-len", "1024",
    ),
    "transformers": (
        "{home}/bin/transformers", "serve", "{model}", "--port", "{port}", "--device", "cpu", "--dtype", "float32",
        "--continuous-batching", "--cb-block-size", "16", "--cb-num-blocks", "2048", "--cb-max-batch-tokens", "512",
        "--no-cb-use-cuda-graph",
    ),
    "llama-server": (
        "{home}", "-m", "{home}.gguf", "--port", "{port}", "-c", "16384", "-np", "16", "-t", "2", "-ctk", "f32",
        "-ctv", "f32",
    ),
}  # fmt: skip
# Measured best on two cores: with two OpenMP threads vLLM's spin against its own API server.
ENVIRON = {
    "vllm": {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    },
    "transformers": {"OMP_NUM_THREADS": "2"},
    "llama-server": {},
}  # fmt: skip

LOOP = """
import json, sys, time
order = json.load(sys.stdin)
found = {}
for batch, rounds in order["prompts"].items():
    rates = []
    for prompts in rounds:
        begun = time.process_time(); run(prompts, 1); first = time.process_time() - begun
        begun = time.process_time(); run(prompts, order["new"]); rest = time.process_time() - begun - first
        rates.append(len(prompts) * (order["new"] - 1) / rest)
    found[batch] = rates[1:]
print(json.dumps(found))
"""
# Each prepares `run(prompts, new)`; the folder with the converted model is the first argument.
PROGRAMS = {
    "openvino": """
import sys, numpy, openvino, openvino_genai as genai
pipe = genai.LLMPipeline(sys.argv[1], "CPU", scheduler_config=genai.SchedulerConfig(), INFERENCE_NUM_THREADS=1,
    KV_CACHE_PRECISION="f32", INFERENCE_PRECISION_HINT="f32")
def run(prompts, new):
    ids = openvino.Tensor(numpy.array(prompts, numpy.int64))
    mask = openvino.Tensor(numpy.ones((len(prompts), len(prompts[0])), numpy.int64))
    config = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
    return pipe.generate(genai.TokenizedInputs(ids, mask), config)
""",
    "onnxruntime-genai": """
import sys, numpy, onnxruntime_genai as genai
config = genai.Config(sys.argv[1])
config.overlay('{"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}')
model = genai.Model(config)
def run(prompts, new):
    params, length = genai.GeneratorParams(model), len(prompts[0]) + new
    params.set_search_options(batch_size=len(prompts), max_length=length, min_length=length, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(numpy.array(prompts, numpy.int32))
    while not generator.is_done():
        generator.generate_next_token()
""",
}
CONVERT: dict[str, tuple[str, ...]] = {
    "openvino": (
        "{home}/bin/optimum-cli", "export", "openvino", "-m", "{model}", "--task", "text-generation-with-past",
        "--weight-format", "fp32", "{out}",
    ),
    "onnxruntime-genai": (
        "{home}/bin/python", "-m", "onnxruntime_genai.models.builder", "-m", "{model}", "-o", "{out}",
        "-p", "fp32", "-e", "cpu", "-c", "{out}-cache",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is up."""

    port: int
    model: str  # as requests name it
    process: psutil.Process
    # Refuses what OpenAI's API does not have; it must know from the model that nothing ends it.
    strict: bool = False

    def cpu_s(self) -> float:
        """CPU seconds of all its processes that are alive."""
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def home_of(name: str, folder: Path | None) -> Path | None:
    """Where a rival is on this machine."""
    given = os.environ.get("RIVAL_" + name.upper().replace("-", "_"))
    home = Path(given) if given else folder / name if folder else None
    return home if home is not None and home.exists() else None


def endless(folder: Path) -> Path:
    """A copy of the embedded model that no token ends, so that every server writes as many."""
    shutil.copytree(EMBEDDED, folder)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        config = json.loads(file.read_text())
        config["eos_token_id"] = None
        file.write_text(json.dumps(config))
    return folder


def make_text(tokenizer: Tokenizer, rng: random.Random) -> str:
    """About `PROMPT` tokens that begin like no other prompt."""
    words = (EMBEDDED.parent / "words.txt").read_text().split()
    text = str(rng.random())
    while len(tokenizer.encode(text).ids) < PROMPT - 8:
        text += " " + rng.choice(words)
    return text


async def answer(server: Server, texts: list[str]) -> None:
    """One stream: its requests, one after the other."""
    more: dict[str, Any] = {} if server.strict else {"ignore_eos": True}
    for text in texts:
        stream = await StampedStream.open(
            server.port, PATH, model=server.model, messages=[{"role": "user", "content": text}], max_tokens=NEW,
            temperature=0, **more,
        )  # fmt: skip
        await stream.done()
        await stream.leave()
        if not NEW // 4 <= len(stream.stamps_s) <= NEW + 4:
            raise RuntimeError(f"{server.model}: {len(stream.stamps_s)} events for {NEW} tokens")


async def load(server: Server, streams: int, texts: list[str]) -> dict[str, float]:
    """Output tokens per second, and per CPU second, of `streams` at a time."""
    begun_s, begun_cpu_s = time.monotonic(), server.cpu_s()
    await asyncio.gather(*(answer(server, texts[place::streams]) for place in range(streams)))
    tokens = len(texts) * NEW
    return {
        f"c{streams}": tokens / (time.monotonic() - begun_s),
        f"cpu_c{streams}": tokens / (server.cpu_s() - begun_cpu_s),
    }


@contextlib.contextmanager
def running(name: str, home: Path, model: Path, log: Path, parts: Sequence[str] = ()) -> Iterator[Server]:
    """A rival's server, not ready yet. Stopped at the end, with all its processes. `parts` replace its command's."""
    port = claim_port("127.0.0.1", 0)
    command = [part.format(home=home, model=model, port=port) for part in parts or SERVERS[name]]
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command, stdout=log_file, stderr=log_file, env=os.environ | ENVIRON[name], start_new_session=True
        )
    try:
        yield Server(port, str(model), psutil.Process(process.pid), strict=name == "transformers")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_up(server: Server) -> None:
    """Until a request is answered. Raises RuntimeError if that never happens."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "stream": True,
    }
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and server.process.is_running():
        with contextlib.suppress(httpx.HTTPError):
            if (
                httpx.post(f"http://127.0.0.1:{server.port}{PATH}", json=body, timeout=START_S).status_code
                == 200
            ):
                return
        time.sleep(0.5)
    raise RuntimeError("it did not come up")


def serve_all(
    names: list[str], homes: dict[str, Path], rounds: int, folder: Path
) -> dict[str, dict[str, float]]:
    """Medians over rounds of every server's figures."""
    model, tokenizer = endless(folder / "model"), Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    taken: dict[str, dict[str, list[float]]] = {}
    rng = random.Random(0)
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, arguments in OURS.items():
            ours = stack.enter_context(serving_deployment("--model", str(model), *arguments))
            ours.wait_ready()
            listed = ours.get("/v1/models")["data"][0]["id"]
            servers[name] = Server(ours.port, listed, psutil.Process(ours.process.pid))
        for name in names:
            servers[name] = stack.enter_context(running(name, homes[name], model, folder / f"{name}.log"))
            wait_up(servers[name])
        for number in range(rounds + 1):
            for streams in STREAMS:
                for name, server in servers.items():
                    texts = [make_text(tokenizer, rng) for _ in range(streams * TIMES[streams])]
                    for figure, value in uvloop.run(load(server, streams, texts)).items():
                        if number:  # the first round is warm-up
                            taken.setdefault(name, {}).setdefault(figure, []).append(value)
    return {name: {figure: median(values) for figure, values in one.items()} for name, one in taken.items()}


def in_process(name: str, home: Path, folder: Path, order: dict[str, Any]) -> dict[str, float]:
    """A library's decoded tokens per CPU second, by batch."""
    out = folder / name
    fill = {"home": home, "model": EMBEDDED, "out": out}
    command = [part.format(**fill) for part in CONVERT[name]]
    subprocess.run(command, check=True, capture_output=True, text=True)
    done = subprocess.run(
        [str(home / "bin" / "python"), "-c", PROGRAMS[name] + LOOP, str(out)],
        input=json.dumps(order), check=True, capture_output=True, text=True,
    )  # fmt: skip
    rates: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return {f"b{batch}": median(values) for batch, values in rates.items()}


def compare(
    names: list[str], homes: dict[str, Path], rounds: int, folder: Path
) -> dict[str, dict[str, float]]:
    """Rates of all that run in process; they never run at the same time."""
    torch.set_num_threads(1)
    prompts = {batch: [make_prompts(batch, number) for number in range(rounds + 1)] for batch in BATCHES}
    ours = Ours(EMBEDDED)
    rates = {
        "diptych": {f"b{batch}": median([ours(one).rate for one in prompts[batch]][1:]) for batch in BATCHES}
    }
    for name in names:
        rates[name] = in_process(name, homes[name], folder, {"prompts": prompts, "new": NEW})
    return rates


def ratios(rates: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """diptych / each of the others."""
    ours = rates["diptych"]
    return {
        name: {figure: round(ours[figure] / value, 2) for figure, value in one.items()}
        for name, one in rates.items()
        if name != "diptych"
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everyone = [*SERVERS, *PROGRAMS]
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rivals", type=Path, help="folder with their environments")
    parser.add_argument("--only", nargs="+", choices=everyone, default=everyone)
    options = parser.parse_args()
    homes = {name: home for name in options.only if (home := home_of(name, options.rivals)) is not None}
    found: dict[str, Any] = {"absent": [name for name in everyone if name not in homes]}
    servers, libraries = (
        [name for name in SERVERS if name in homes],
        [name for name in PROGRAMS if name in homes],
    )
    with tempfile.TemporaryDirectory() as folder:
        if servers or not libraries:
            found["rates_http"] = serve_all(servers, homes, options.rounds, Path(folder))
            found["http"] = ratios(found["rates_http"])
        if libraries:
            found["rates_process"] = compare(libraries, homes, options.rounds, Path(folder))
            found["process"] = ratios(found["rates_process"])
    if options.json:
        print(json.dumps(found))
        return
    for part, figures in found.items():
        print(f"{part}: {json.dumps(figures)}")


if __name__ == "__main__":
    main()
