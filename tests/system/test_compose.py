"""docker-compose.yml as it stands, up, hurt, and down again, each service in name spaces of its own."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.kernels.cache import machine_kernel_folder
from engine.model.checkpoint import Checkpoint
from tests.support.factories import make_folder
from tests.support.model_folder import make_folder as make_description
from tests.support.network_namespaces import why_unavailable
from tests.support.waiting import wait_for
from tests.system.compose_runner import OUTSIDE, USER, ComposeRunner, project

# A model of 4 GiB in bfloat16.
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 16384,
    "num_attention_heads": 32, "num_hidden_layers": 8, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
    "vocab_size": 320, "max_position_embeddings": 256, "eos_token_id": 0, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
ASK = """
import json, sys, urllib.request
path, body = sys.argv[1], sys.argv[2].encode() or None
key = open("/keys/clients/api-key").read().strip()
request = urllib.request.Request("http://127.0.0.1:8000" + path, body, {"Authorization": "Bearer " + key,
    "Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=120).read().decode())
"""


def inside_gateway(runner: ComposeRunner, *words: str) -> str:
    """`docker compose exec gateway ...`"""
    command = [
        "nsenter",
        f"--target={runner.inner_pid('gateway')}",
        "--mount",
        "--pid",
        "--net",
        "--root",
        "--wd",
    ]
    command += [f"--setuid={USER}", f"--setgid={USER}", "--", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr + runner.parts["gateway"].text()
    return done.stdout


def complete(runner: ComposeRunner, model: str) -> str:
    body = {"model": model, "prompt": "a list of words " * 4, "max_tokens": 8, "temperature": 0}
    said = inside_gateway(runner, "/opt/diptych/bin/python", "-c", ASK, "/v1/completions", json.dumps(body))
    assert json.loads(said)["usage"]["completion_tokens"] == 8
    return str(json.loads(said)["choices"][0]["text"])


def moved(runner: ComposeRunner) -> dict[str, float]:
    """Bytes of KV by transport, from the metrics; the key for them is the operator's, not a client's."""
    script = ASK.replace("clients/api-key", "metrics/metrics-key")
    text = inside_gateway(runner, "/opt/diptych/bin/python", "-c", script, "/metrics", "")
    found = re.findall(r'^diptych:transfer_bytes_total\{.*transport="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


BATCH = """
import json, sys, time, urllib.request
key = open("/keys/clients/api-key").read().strip()
def ask(path, body=None, kind="application/json"):
    headers = {"Authorization": "Bearer " + key, "Content-Type": kind}
    request = urllib.request.Request("http://127.0.0.1:8000" + path, body, headers)
    return urllib.request.urlopen(request, timeout=60).read()
mark = "--part"
def field(name, value):
    return "%s\\r\\nContent-Disposition: form-data; name=%s\\r\\n\\r\\n%s\\r\\n" % (mark, name, value)
form = field('"purpose"', "batch") + field('"file"; filename="lines.jsonl"', sys.argv[1]) + mark + "--\\r\\n"
file = json.loads(ask("/v1/files", form.encode(), "multipart/form-data; boundary=" + mark[2:]))
order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
batch = json.loads(ask("/v1/batches", json.dumps(order).encode()))
while batch["status"] in ("validating", "in_progress", "finalizing"):
    time.sleep(0.2)
    batch = json.loads(ask("/v1/batches/" + batch["id"]))
print(json.dumps([batch["status"], batch["request_counts"]]))
"""


def run_batch(runner: ComposeRunner, model: str) -> None:
    """A batch of three lines, whose files lie in the gateway's volume."""
    body = {"model": model, "prompt": "a list of words", "max_tokens": 4, "temperature": 0}
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number in range(3)
    ]
    said = inside_gateway(runner, "/opt/diptych/bin/python", "-c", BATCH, "\n".join(lines))
    assert json.loads(said) == ["completed", {"total": 3, "completed": 3, "failed": 0}]
    folder = runner.volume("data", "/home/diptych/data")
    assert folder.stat().st_uid == USER and any(file.is_file() for file in folder.rglob("*"))


def until(condition: Callable[[], bool], runner: ComposeRunner) -> None:
    wait_for(condition, 300.0, 0.5, lambda: "\n".join(part.text() for part in runner.parts.values()))


@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "namespaces")
def test_up_a_killed_worker_and_down(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    inside = "/home/diptych/models/toy"
    with project(tmp_path, MODEL=inside) as runner:
        models = runner.volume("models", "/home/diptych/models")
        make_folder(models / "toy")
        fill_kernels(runner.volume("kernels", "/home/diptych/.numba"))
        for place in (models / "toy", *(models / "toy").iterdir()):
            place.chmod(0o755 if place.is_dir() else 0o644)
        for name in ("keys", "processes", "gateway", "prefill", "decode"):
            runner.start(name)
        until(lambda: runner.check("gateway"), runner)
        assert runner.check("prefill") and runner.check("decode")
        said = complete(runner, inside)
        assert moved(runner).keys() == {"shm"}, "one machine: KV goes through shared memory"
        check_processes(runner, tmp_path)
        run_batch(runner, inside)

        runner.stop("decode", signal.SIGKILL)
        assert runner.parts["prefill"].process.poll() is None, "the name space outlives a worker"
        until(lambda: not runner.check("gateway"), runner)
        runner.start("decode")
        until(lambda: runner.check("gateway"), runner)
        assert complete(runner, inside) == said and moved(runner).keys() == {"shm"}
        everyone = [one for part in runner.parts.values() for one in part.family()]
        began_s = time.monotonic()
        for name in ("decode", "prefill", "gateway"):
            runner.stop(name)
        assert time.monotonic() - began_s < 120
    assert psutil.wait_procs(everyone, timeout=30)[1] == []


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "namespaces")
def test_a_gateway_of_a_model_of_4_gib_starts_within_the_file_s_limit(tmp_path: Path) -> None:
    """It holds no weights: they are there, four times what it may take."""
    tmp_path.chmod(0o755)
    inside = "/home/diptych/models/large"
    with project(tmp_path, MODEL=inside) as runner:
        model = make_description(runner.volume("models", "/home/diptych/models") / "large")
        (model / "config.json").write_text(json.dumps(SHAPE))
        write_holes(model / "model.safetensors")
        plan = Checkpoint.resolve(str(model)).memory(
            max_model_len=None, kv_bytes=1 << 28, available_bytes=1 << 40
        )
        assert plan.weight_bytes >= 4 << 30, "what a worker would load of it"
        model.chmod(0o755)
        runner.start("keys")
        runner.start("gateway")
        until(lambda: answers(runner), runner)
        programs = [one for one in runner.parts["gateway"].family() if one.name() not in OUTSIDE]
        assert len(programs) >= 2
        assert not [one for one in programs if "safetensors" in Path(f"/proc/{one.pid}/maps").read_text()]
        if why := runner.unlimited.get("gateway"):
            pytest.skip(f"{why}; without it, it maps no weights")
        group = runner.groups["gateway"]
        assert {one.pid for one in programs} <= group.members()
        peak_bytes = group.peak_bytes()
        assert peak_bytes is None or peak_bytes < group.limit_bytes == 1 << 30


def answers(runner: ComposeRunner) -> bool:
    """Whether the gateway serves HTTP and knows the model; it needs no worker for that."""
    part = runner.parts["gateway"]
    assert part.process.poll() is None, part.text()
    try:
        said = inside_gateway(runner, "/opt/diptych/bin/python", "-c", ASK, "/v1/models", "")
    except AssertionError:
        return False
    return "large" in said


def write_holes(file: Path) -> None:
    """Write a checkpoint of `SHAPE` in bfloat16 whose tensors are holes of the file system."""
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    shapes = {"model.embed_tokens.weight": [SHAPE["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(SHAPE["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
                "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [hidden, hidden],
                "self_attn.v_proj": [hidden, hidden], "self_attn.o_proj": [hidden, hidden],
                "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner],
            }.items()
        }  # fmt: skip
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def copy_if_there(source: str, target: str) -> None:
    """Copy a file, unless it is gone: other tests compile kernels meanwhile, into files that are then renamed."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def fill_kernels(volume: Path) -> None:
    """What an earlier container has compiled: this user's kernels, as the volume's owner has them."""
    folder = machine_kernel_folder()
    if folder is not None and folder.is_dir():
        shutil.copytree(folder, volume / folder.name, copy_function=copy_if_there)
        subprocess.run(["chown", "-R", f"{USER}:{USER}", str(volume / folder.name)], check=True)


def check_processes(runner: ComposeRunner, folder: Path) -> None:
    """Every process is the image's user's, without capabilities; no list of processes shows a key."""
    keys = [file.read_text().strip() for file in folder.glob("volumes/*-keys/*-key")]
    assert len(keys) == 3
    seen = 0
    for part in runner.parts.values():
        for one in part.family():
            if one.name() in OUTSIDE:
                continue
            status = dict(
                line.split(":\t", 1) for line in Path(f"/proc/{one.pid}/status").read_text().splitlines()
            )
            assert status["Uid"].split() == [str(USER)] * 4 and int(status["CapEff"], 16) == 0
            assert status["NoNewPrivs"].strip() == "1"
            shown = " ".join(one.cmdline()) + json.dumps(one.environ())
            assert not [key for key in keys if key in shown]
            seen += 1
    assert seen >= 7
