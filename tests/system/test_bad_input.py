"""Mistakes of the person at the keyboard: six lines at most, what and why and what to do, and an exit status not 0.

What can be wrong with a model folder is looked at one by one in tests/engine/test_model_probe.py.
"""

from __future__ import annotations

import json
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.host.ports import claim_port
from tests.support.terminal import ROOT, Terminal, run

TINY = ROOT / "models" / "tiny"
pytestmark = pytest.mark.timeout(600)


def refused(*arguments: str, status: int = 1) -> str:
    """The message of `diptych serve` with these arguments, which must be one of ours."""
    port = [] if "--port" in arguments else ["--port", "0"]
    result = run("serve", *arguments, *port)
    assert result.returncode == status, result
    lines = result.stderr.strip().splitlines()
    assert 2 <= len(lines) <= 6, result.stderr
    assert lines[0].startswith("error: ") and "Traceback" not in result.stdout + result.stderr
    return result.stderr


# ---- refused before anything is started


def test_a_missing_key_file() -> None:
    message = refused("--api-key-file", "/absent/keys", status=2)
    assert "the key file /absent/keys cannot be read" in message
    assert "No such file" in message and "openssl rand" in message


def test_an_unknown_yaml_key(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("max_model_length: 100\n")
    message = refused("--config", str(file), status=2)
    assert "unknown key 'max_model_length'" in message and "did you mean 'max_model_len'?" in message


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = refused("--port", str(port))
    assert (
        f"port {port} on 127.0.0.1 is in use" in message and "holds it: " in message and "--port " in message
    )


# ---- refused once the model's files were read


def test_a_model_that_is_not_there() -> None:
    message = refused("no-such-model")
    assert "there is no model at no-such-model" in message and "Qwen/Qwen2.5-0.5B-Instruct" in message


def test_a_model_that_does_not_fit_shows_the_arithmetic_and_what_would_fit() -> None:
    message = refused("tiny", "--kv-cache-memory-bytes", "1MiB")
    assert "does not fit in memory" in message
    assert "weights " in message and "KV pool 1.00 MiB" in message
    assert "the largest context that fits is 128 tokens" in message
    assert "--max-model-len 128 or less" in message


def test_a_split_that_does_not_divide_the_heads() -> None:
    message = refused("tiny", "--decode-tp", "3")
    assert (
        "cannot be split into 1 stages of 3 ranks" in message
        and "KV heads" in message
        and "tp of 1, 2, 4" in message
    )


def test_a_codec_that_there_is_not() -> None:
    message = refused("tiny", "--kv-cache-codec", "zip", status=2)
    assert "'zip' is not a KV codec" in message and "known codecs: raw, " in message and "nuq4-1%" in message


def test_a_calibration_that_the_codec_does_not_use(tmp_path: Path) -> None:
    message = refused("tiny", "--kv-cache-codec", "fp8", "--kv-cache-calibration", str(tmp_path), status=2)
    assert "the KV codec fp8 takes no calibration" in message and "nuq4-1%" in message


def test_prefill_ranks_without_prefill_workers() -> None:
    message = refused("tiny", "--colocated", "1", "--prefill-tp", "2", status=2)
    assert "no prefill workers to split" in message and "--decode-tp" in message


# ---- refused by a worker


def test_a_device_that_is_not_there() -> None:
    assert "there is no device 'cuda' here" in refused("tiny", "--device", "cuda", status=2)


# ---- pools of different models


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model whose KV looks like the embedded one's, and is not the same: one byte of the config differs."""
    path = tmp_path / "other"
    shutil.copytree(TINY, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    return path


@contextmanager
def unlike_pools(folder: Path, prefill: Sequence[str], decode: Sequence[str]) -> Iterator[str]:
    """The URL of a gateway whose prefill worker was started with other arguments than its decode worker."""
    keys = folder / "keys"
    assert run("keys", str(keys)).returncode == 0
    apart = ["--channel", f"tcp://127.0.0.1:{claim_port('127.0.0.1', 0)}", "--keys-dir", str(keys)]
    port = str(claim_port("127.0.0.1", 0))
    with (
        Terminal("gateway", "--port", port, *apart) as gateway,
        Terminal("worker", "prefill", *prefill, *apart) as first,
        Terminal("worker", "decode", *decode, *apart) as second,
    ):
        for terminal in (gateway, first, second):
            terminal.expect(": ready")
        gateway.expect("cannot serve with the others")
        yield f"http://127.0.0.1:{port}"
        for terminal in (second, first, gateway):
            assert terminal.interrupt() == 0
            assert terminal.left() == []


def shown_mismatch(url: str) -> str:
    """Why the two are not paired; the gateway is not ready, and `diptych status` says the same."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{url}/ready", timeout=120)
    with caught.value as answer:
        assert answer.code == 503
        reasons = json.loads(answer.read())["reasons"]
    mismatch = str(next(reason for reason in reasons if "does not fit" in reason))
    assert "prefill" in mismatch and "decode" in mismatch and len(mismatch.splitlines()) <= 6
    shown = run("status", "--url", url)
    assert shown.returncode == 1 and "not ready" in shown.stdout
    assert all(line in shown.stdout for line in mismatch.splitlines())
    return mismatch


def test_pools_of_different_models_are_not_paired_and_both_are_shown(other: Path, tmp_path: Path) -> None:
    with unlike_pools(tmp_path, (), ("--model", str(other))) as url:
        assert "config" in shown_mismatch(url)


def test_pools_of_different_types_and_devices_are_not_paired(tmp_path: Path) -> None:
    with unlike_pools(tmp_path, ("--device", "emulated"), ("--dtype", "float32")) as url:
        mismatch = " ".join(shown_mismatch(url).split())
    assert "dtype bfloat16 float32" in mismatch and "device_type emulated -" in mismatch
