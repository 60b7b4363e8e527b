"""`diptych gateway` by itself: config and tokenizer of the model are all that it needs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from diptych.channel.keys import make_keys
from services.host.ports import claim_port
from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 320,
    "max_position_embeddings": 256, "eos_token_id": 0, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip


def test_a_gateway_starts_without_weights_and_knows_the_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_bytes(msgspec.json.encode(SHAPE))
    (folder / "generation_config.json").write_bytes(msgspec.json.encode({"temperature": 0.6}))
    make_keys(tmp_path / "keys")
    port, log = claim_port("127.0.0.1", 0, "--port"), tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "services.cli.main", "gateway", str(folder), "--port", str(port),
                "--channel", "tcp://127.0.0.1:0", "--keys-dir", str(tmp_path / "keys"),
            ],
            cwd=ROOT, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:

            def answers() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    return http.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_for(answers, 120.0, explain=log.read_text)
            chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
            assert chat["count"] > 3 and chat["max_model_len"] == 256
        assert re.search(r"sampling defaults.*temperature 0\.6", log.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, 130), log.read_text()
    finally:
        process.kill()
        process.wait()
