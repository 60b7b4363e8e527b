"""Settings of KV below the pools that do not go together are refused, each with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.config.load import load_config
from diptych.errors import ConfigError
from services.cli.serve.specs import worker_spec
from services.host.device_settings import apply_device
from services.host.model_probe import ProbedModel, probe_request

HOST, BYTES, FOLDER = {"kv_host_bytes": "1GiB"}, {"kv_disk_bytes": "2GiB"}, {"kv_disk_folder": "kv"}
BULK = {"bulk": "1", "prefill": "0", "decode": "0", "kv_host_bytes": "1GiB"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (BYTES | FOLDER, "--kv-disk-bytes needs --kv-host-bytes"),
        (FOLDER, "--kv-disk-folder needs --kv-host-bytes"),
        (HOST | BYTES, "--kv-disk-bytes needs --kv-disk-folder"),
        (HOST | FOLDER, "--kv-disk-folder needs --kv-disk-bytes"),
        (
            HOST | {"enable_prefix_caching": "false"},
            "--kv-host-bytes does not go with --no-enable-prefix-caching",
        ),
        (BULK, "--kv-host-bytes has no effect on bulk workers"),
        ({"kv_host_bytes": "much"}, "--kv-host-bytes"),
        ({"kv_host_bytes": "0"}, "--kv-host-bytes"),
        (HOST | {"device": "emulated"}, "workers on GPUs do not store it yet"),
        (HOST | {"engine": "vllm", "vllm_python": "python"}, "--kv-host-bytes has no effect on vLLM"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        apply_device(load_config("serve", given, {}))
    lines = refused.value.lines()
    assert said in "\n".join(lines) and refused.value.fix and len(lines) <= 6


def test_workers_and_the_probe_get_them() -> None:
    config = load_config("serve", HOST | BYTES | FOLDER, {}).config
    model = ProbedModel("/models/some", "a model", True, 512, 1 << 20)
    spec = worker_spec(config, model, "prefill", "prefill-0", "tcp://127.0.0.1:1", "/keys", None)
    assert (spec.kv_host_bytes, spec.kv_disk_bytes) == (1 << 30, 2 << 30)
    assert spec.kv_disk_folder == str(Path("kv").absolute())
    tiers = probe_request(config, 2).tiers
    assert tiers is not None and (tiers.host_bytes, tiers.disk_folder) == (1 << 30, spec.kv_disk_folder)
    plain = load_config("serve", {}, {}).config
    assert probe_request(plain, 2).tiers is None
    spec = worker_spec(plain, model, "prefill", "prefill-0", "tcp://127.0.0.1:1", "/keys", None)
    assert (spec.kv_host_bytes, spec.kv_disk_bytes, spec.kv_disk_folder) == (0, 0, "")
