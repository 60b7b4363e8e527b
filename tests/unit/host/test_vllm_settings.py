"""Settings of workers whose engine is vLLM: what is refused before vLLM is asked anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diptych.config.load import LoadedConfig, load_config
from diptych.config.options import Config
from diptych.errors import ConfigError
from services.cli.serve.specs import with_gpus, worker_spec
from services.cluster.spec import Bundle
from services.host.device_settings import apply_device
from services.host.gpu_probe import GpuShare
from services.host.model_probe import ProbedModel, probe_request
from services.host.vllm.settings import OWN_SETTINGS

VLLM = {"engine": "vllm", "vllm_python": sys.executable}


def settle(**given: str) -> LoadedConfig:
    return apply_device(load_config("serve", given, {}))


def refused(**given: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settle(**given)
    assert caught.value.fix and len(caught.value.lines()) <= 6
    return "\n".join(caught.value.lines())


def test_defaults_are_those_of_the_device() -> None:
    cpu, cuda = (settle(**VLLM, device=name).config for name in ("auto", "cuda"))
    assert (cpu.max_num_batched_tokens, cpu.max_num_seqs, cpu.threads) == (512, 64, 1)
    assert (cuda.max_num_batched_tokens, cuda.max_num_seqs, cuda.threads) == (4096, 256, 2)


@pytest.mark.parametrize("name", ["vllm_python", "vllm_args"])
def test_settings_of_vllm_mean_nothing_to_our_own_engine(name: str) -> None:
    assert "add --engine vllm" in refused(**{name: sys.executable})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_cache_codec": "tq4"}, "--kv-cache-codec has no effect on vLLM"),
        ({"kv_keep": "0.9"}, "--kv-keep has no effect on vLLM"),
        ({"swap_space": "1GiB"}, "--swap-space has no effect on vLLM"),
        ({"bulk": "1", "prefill": "0", "decode": "0"}, "--bulk has no effect on vLLM"),
        ({"pipelined_transfer": "false"}, "has no effect on vLLM"),
        ({"gpu_memory_utilization": "0.5"}, "add --device cuda, or use --kv-cache-memory-bytes"),
        ({"device": "emulated"}, "vLLM has no emulated device"),
        ({"prefill_pp": "2"}, "use --prefill-tp, and --prefill-pp 1"),
        ({"decode_pp": "2"}, "use --decode-tp, and --decode-pp 1"),
        ({"prefill_tp": "2"}, "--prefill-tp 2 and --decode-tp 1 differ"),
        ({"vllm_args": "--quantization 'fp8"}, "cannot be split into words"),
        ({"vllm_args": "--block-size 16"}, "--block-size cannot be given"),
        ({"vllm_args": "--max-model-len=64"}, "use --max-model-len"),
        ({"vllm_args": "--data-parallel-size 2"}, "data parallelism"),
        ({"vllm_args": "--enable-expert-parallel"}, "expert parallelism"),
        ({"vllm_args": "--pipeline-parallel-size 2"}, "pipeline parallelism"),
        ({"vllm_args": "-tp 2"}, "-tp"),
        ({"vllm_python": "/nowhere/python"}, "there is no interpreter at /nowhere/python"),
        ({"vllm_python": "/"}, "it is a folder"),
    ],
)
def test_what_vllm_workers_do_not_do_is_refused(given: dict[str, str], words: str) -> None:
    assert words in refused(**VLLM | given)


def test_every_setting_of_our_own_engine_is_refused_by_its_flag() -> None:
    assert set(OWN_SETTINGS) <= set(Config.model_fields)


def test_an_interpreter_is_needed_and_a_link_to_one_stays_a_link(tmp_path: Path) -> None:
    assert "--engine vllm needs --vllm-python" in refused(engine="vllm")
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    config = settle(engine="vllm", vllm_python=str(link), vllm_args="--a 'b c'").config
    spec = worker_spec(config, ProbedModel("/m", "", False, 64, 1), "decode", "d-0", "tcp://a:1", "/k", None)
    assert (spec.engine, spec.vllm_python, spec.vllm_args) == ("vllm", str(link), ("--a", "b c"))


def test_equal_splits_are_served_and_the_question_has_them() -> None:
    config = settle(**VLLM, prefill_tp="2", decode_tp="2", device="cuda", gpu_memory_utilization="0.5").config
    asked = probe_request(config, 2)
    assert asked.gpu is None and asked.vllm is not None
    assert (asked.vllm.device, asked.vllm.utilization, asked.splits["decode"]) == ("cuda", 0.5, (2, 1))
    [[bundle]] = with_gpus(((Bundle("d-0", 2),),), config, GpuShare(1, 0))
    assert bundle.demand == {"CPU": 1.0, "GPU": 2.0}
    [[bundle]] = with_gpus(((Bundle("d-0", 1),),), config, GpuShare(2, 0))
    assert bundle.demand == {"CPU": 1.0, "GPU": 0.5}


def test_one_worker_alone_knows_nothing_of_the_other_pool() -> None:
    given = {"role": "prefill", "channel": "tcp://a:1", "keys_dir": "/k", "prefill_tp": "2", **VLLM}
    assert apply_device(load_config("worker", given, {})).config.prefill_tp == 2
