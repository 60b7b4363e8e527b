"""The gateway's process with workers that are puppets: readiness, books, losses, shutdown, bad starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych.messages import Admit
from diptych.specs import GatewaySpec
from tests.support.fake_workers import HALF, HALF_TOKENS, MUTE, TOKENS, Puppet
from tests.support.gateway_process import ROOT, WAIT_S, Gateway, serving, specification, start, until

LOG = "requests.jsonl"


def muted(decode: Puppet) -> bool:
    """Whether a client's request, not a canary, has reached it; it holds that until it is asked to let go."""
    return any(isinstance(message, Admit) and message.prompt[0] == MUTE for message in list(decode.seen))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with serving(folder, local_prefill="never", recovery_s=2.0, request_log=str(folder / LOG)) as running:
        yield running


@pytest.fixture
def puppets(gateway: Gateway) -> Iterator[tuple[Puppet, Puppet]]:
    """A prefill and a decode worker, ready."""
    prefill, decode = gateway.puppet("prefill"), gateway.puppet("decode")
    try:
        until(lambda: gateway.ready()["ready"])
        yield prefill, decode
    finally:
        prefill.kill()
        decode.kill()
        until(lambda: not gateway.status()["workers"])


def test_readiness_is_a_hand_off_that_went_through(gateway: Gateway) -> None:
    answer = gateway.http.get("/ready")
    assert answer.status_code == 503
    assert gateway.ready()["reasons"] == ["0 of 1 prefill workers are up", "0 of 1 decode workers are up"]
    decode = gateway.puppet("decode")
    until(lambda: gateway.ready()["reasons"] == ["0 of 1 prefill workers are up"])
    decode.deaf = True  # alive, but it does not work
    prefill = gateway.puppet("prefill")
    until(lambda: gateway.ready()["reasons"] == ["no prefill worker is linked to a decode worker yet"])
    prefill.kill()
    until(lambda: len(gateway.status()["workers"]) == 1)
    decode.deaf = False
    prefill = gateway.puppet("prefill")
    until(lambda: gateway.ready()["ready"])
    assert any(type(message).__name__ == "Admit" for message in decode.seen)
    assert gateway.http.get("/health").status_code == 200
    decode.kill()
    until(lambda: gateway.ready() == {"ready": False, "reasons": ["0 of 1 decode workers are up"]})
    prefill.kill()
    until(lambda: not gateway.status()["workers"])


def test_tokens_go_through_both_pools(gateway: Gateway, puppets: tuple[Puppet, Puppet]) -> None:
    with gateway.openai() as client:
        answer = client.completions.create(model="toy", prompt=[9, 9, 9], max_tokens=12)
        stream = client.completions.create(model="toy", prompt=[9, 9, 9], max_tokens=12, stream=True)
        text = "".join(chunk.choices[0].text for chunk in stream)
    expected = gateway.http.post(
        "/detokenize", json={"tokens": TOKENS[:12], "skip_special_tokens": True}
    ).json()
    assert answer.choices[0].text == text == expected["prompt"]
    assert answer.system_fingerprint == "fp_same"


def test_metrics_tell_where_the_time_went(gateway: Gateway, puppets: tuple[Puppet, Puppet]) -> None:
    gateway.http.post("/v1/completions", json={"model": "toy", "prompt": [9], "max_tokens": 5})
    until(lambda: all(worker["stats"]["slabs_total"] for worker in gateway.status()["workers"]))
    text = gateway.http.get("/metrics").text

    def total(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    assert total("diptych:ttft_stage_seconds_sum") == pytest.approx(
        total("vllm:time_to_first_token_seconds_sum")
    )
    assert total("diptych:handoff_stage_seconds_count") > 0
    assert total('diptych:transfer_bytes_total{transport="shm"}') > 0
    assert total('diptych:slo_attainment{objective="ttft"}') == 1
    assert total('diptych:kv_slabs{role="decode",worker="decode-0"}') == 64
    assert "vllm:inter_token_latency_seconds_bucket" in text


def test_status_has_pools_workers_and_links(gateway: Gateway, puppets: tuple[Puppet, Puppet]) -> None:
    seen: list[Any] = []

    def quiet() -> bool:
        """No canary is on its way."""
        seen.append(gateway.status())
        used = any(pool["slabs_used"] for pool in seen[-1]["pools"].values())
        return bool(seen[-1]["ready"] and not seen[-1]["sequences"] and not used)

    until(quiet)
    state = seen[-1]
    assert [(worker["worker"], worker["state"]) for worker in state["workers"]] == [
        ("decode-0", "up"),
        ("prefill-0", "up"),
    ]
    link = {
        "source": "prefill-0",
        "target": "decode-0",
        "transport": "shm",
        "gb_per_s": 9.0,
        "latency_us": 12.0,
    }
    (found,) = state["links"]
    moved_bytes = found.pop("moved_bytes")
    assert found == link | {"kv_classes": {"raw": True}}
    assert moved_bytes > 0, "canaries move KV too"
    assert state["kv_classes"] == {"raw": True}


def test_visitors_that_say_so_share_a_status(gateway: Gateway, puppets: tuple[Puppet, Puppet]) -> None:
    def ask(**headers: str) -> tuple[float, int]:
        """When its body was made, by the gateway's clock, and its age."""
        answer = gateway.http.get("/status", headers=headers)
        return answer.json()["time_s"], int(answer.headers["age"])

    shared = {"cache-control": "max-age=5"}
    (first_s, _), (new_s, new_age_s) = ask(**shared), ask()
    assert new_s > first_s and new_age_s == 0
    until(lambda: ask(**shared)[0] == ask(**shared)[0])
    assert all(ask(**{"cache-control": "max-age=999999999"})[1] <= 5 for _ in range(5))
    now_s, age_s = ask(**{"cache-control": "no-cache, max-age=5"})
    assert now_s > new_s and age_s == 0


def test_a_client_that_leaves_frees_both_sides(gateway: Gateway, puppets: tuple[Puppet, Puppet]) -> None:
    body = {"model": "toy", "prompt": [MUTE], "max_tokens": 50, "stream": True}
    with gateway.http.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.iter_bytes()  # kept: a generator that is dropped closes the connection
        next(pieces)
        until(lambda: muted(puppets[1]) and puppets[1].held)
    until(lambda: not any(puppet.held for puppet in puppets))
    until(lambda: gateway.status()["sequences"] == 0)


def lines(gateway: Gateway) -> list[dict[str, Any]]:
    """The request log so far."""
    assert gateway.spec.request_log is not None
    text = Path(gateway.spec.request_log).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def ended(gateway: Gateway, name: str) -> list[dict[str, Any]]:
    """All that was logged of a request, once its end is."""
    until(lambda: any(line["event"] == "end" and line["request"] == name for line in lines(gateway)))
    return [line for line in lines(gateway) if line.get("request") == name]


def test_a_stream_goes_on_at_another_worker(gateway: Gateway, puppets: tuple[Puppet, Puppet]) -> None:
    old = puppets[1]
    with gateway.openai() as client:
        stream = client.completions.create(model="toy", prompt=[HALF], max_tokens=12, stream=True)
        chunks = iter(stream)
        name = next(chunks).id
        half = {"event": "tokens", "request": name, "total": HALF_TOKENS}
        until(lambda: any(line == line | half for line in lines(gateway)))
        new = gateway.puppet("decode", 1)
        until(lambda: len(gateway.status()["links"]) == 2)
        old.kill()
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
    events = ended(gateway, name)
    assert [line["event"] for line in events].count("end") == 1
    assert events[-1] == events[-1] | {"outcome": "done", "status": 200, "output_tokens": 12}
    (retried,) = [line for line in events if line["event"] == "retried"]
    assert (retried["code"], retried["delivered"]) == ("worker_lost", HALF_TOKENS)
    begun = [line for line in events if line["event"] == "begin"]
    assert [line["decode"] for line in begun] == ["decode-0", "decode-1"]
    totals = [line["total"] for line in events if line["event"] == "tokens"]
    assert totals == list(range(1, 13)), "each token once"
    text = gateway.http.get("/metrics").text
    assert 'diptych:migrated_streams_total{code="worker_lost"} 1.0' in text
    new.kill()


def test_a_lost_worker_ends_its_requests_with_an_error(gateway: Gateway) -> None:
    prefill, decode = gateway.puppet("prefill"), gateway.puppet("decode")
    until(lambda: gateway.ready()["ready"])
    caught: list[openai.APIError] = []

    def read() -> None:
        with gateway.openai() as client, pytest.raises(openai.APIError) as error:
            list(client.completions.create(model="toy", prompt=[MUTE], max_tokens=50, stream=True))
        caught.append(error.value)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: muted(decode))
    decode.kill()
    reader.join(WAIT_S)
    assert [error.code for error in caught] == ["worker_lost"]
    answer = gateway.http.post("/v1/completions", json={"model": "toy", "prompt": [9]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
    assert int(answer.headers["retry-after"]) > 0 and answer.headers["x-should-retry"] == "true"
    decode = gateway.puppet("decode")
    until(lambda: gateway.ready()["ready"])
    assert gateway.http.post("/v1/completions", json={"model": "toy", "prompt": [9]}).status_code == 200
    prefill.kill()
    decode.kill()
    until(lambda: not gateway.status()["workers"])


def test_a_worker_that_works_no_more_is_not_ready_though_it_is_alive(
    gateway: Gateway, puppets: tuple[Puppet, Puppet]
) -> None:
    puppets[1].deaf = True
    reasons = ["prefill-0 -> decode-0: a canary took longer than 5 s"]
    until(lambda: gateway.ready() == {"ready": False, "reasons": reasons})
    assert len(gateway.status()["workers"]) == 2


def test_a_worker_that_restarts_at_once_is_taken_in_once(
    gateway: Gateway, puppets: tuple[Puppet, Puppet]
) -> None:
    def lost() -> float:
        lines = gateway.http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("diptych:workers_lost_total"))

    before, old = lost(), puppets[1]
    old.kill()
    new = gateway.puppet("decode")
    try:
        until(lambda: any(type(message).__name__ == "Admit" for message in new.seen))  # a canary
        until(lambda: gateway.ready()["ready"])
        for _ in range(20):  # some beats
            time.sleep(0.05)
            assert lost() == before + 1
    finally:
        new.kill()


def test_pools_of_different_models_are_distinguished(gateway: Gateway) -> None:
    prefill = gateway.puppet("prefill", fingerprint="llama")
    until(lambda: len(gateway.status()["workers"]) == 1)
    decode = gateway.puppet("decode", fingerprint="qwen")
    until(lambda: len(gateway.status()["workers"]) == 2)
    reasons = [one for one in gateway.ready()["reasons"] if "does not fit" in one]
    assert len(reasons) == 2 and all("llama" in one and "qwen" in one for one in reasons)
    prefill.kill()
    decode.kill()
    until(lambda: not gateway.status()["workers"])


def test_colocated_needs_no_prefill_pool(tmp_path: Path) -> None:
    with serving(tmp_path, num_prefill=0) as gateway:
        assert gateway.ready()["reasons"] == ["0 of 1 decode workers are up"]
        assert gateway.status()["split"] is False


def test_sigterm_ends_it_well(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        workers = gateway.puppet("prefill"), gateway.puppet("decode")
        until(lambda: gateway.ready()["ready"])
        with gateway.openai() as client:
            stream = client.completions.create(model="toy", prompt=[HALF], max_tokens=12, stream=True)
            chunks = iter(stream)
            next(chunks)
            gateway.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError) as caught:
                list(chunks)
        assert caught.value.code == "server_shutting_down", "said within the stream"
        assert gateway.process.wait(WAIT_S) == 0
        for worker in workers:
            worker.kill()


def test_it_does_not_load_torch(tmp_path: Path) -> None:
    code = "import sys, services.gateway.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# ---- bad starts


def failed(spec: GatewaySpec) -> dict[str, str]:
    with start(spec) as process:
        assert process.stdout is not None
        out = process.stdout.read()
    assert process.returncode == 3
    error: dict[str, str] = json.loads(out.splitlines()[-1])["error"]
    assert set(error) == {"what", "why", "fix"}
    return error


def test_workers_that_cannot_evict_are_not_taken_by_a_gateway_that_always_does(tmp_path: Path) -> None:
    with serving(tmp_path, kv_keep=0.9) as gateway:
        worker = gateway.puppet("decode")
        try:
            until(lambda: any("decode-0 does not fit" in one for one in gateway.ready()["reasons"]))
            [reason] = [one for one in gateway.ready()["reasons"] if "does not fit" in one]
            assert "the class raw and can evict none" in reason and "--kv-keep 0.9" in reason
            assert not gateway.status()["workers"]
        finally:
            worker.kill()


def test_a_busy_port_names_its_holder(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        error = failed(specification(tmp_path, port=holder.getsockname()[1]))
    assert "in use" in error["what"]
    assert f"process {os.getpid()} holds it" in error["why"]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "tokenizer" in failed(specification(tmp_path, model=str(tmp_path / "empty")))["what"]


def test_missing_keys_are_named(tmp_path: Path) -> None:
    assert failed(specification(tmp_path, keys_dir=str(tmp_path / "nothing")))["what"]


def test_a_bad_specification_is_refused() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "services.gateway"], cwd=ROOT, input=b"{}\n", capture_output=True, check=False
    )
    assert process.returncode == 3
    assert "specification" in json.loads(process.stdout.splitlines()[-1])["error"]["what"]
