"""The check of vLLM's names, on modules of Python's own; importing the list loads no vLLM."""

from __future__ import annotations

import subprocess
import sys

from vllm_worker.setup.used_names import SUPPORTED_VERSIONS, USED_NAMES, is_supported, missing_names


def test_missing_names_are_listed() -> None:
    used = [
        ("dataclasses", ("dataclass", "Field.name", "nothing", "replace(obj)")),
        ("json", ("loads(s, object_hook)", "loads(missing)", "JSONDecoder.decode", "JSONDecoder.encode")),
        ("no_such_module", ("anything",)),
    ]
    assert missing_names(used) == [
        "dataclasses.nothing",
        "json.loads(missing)",
        "json.JSONDecoder.encode",
        "no_such_module",
    ]


def test_declared_fields_count_as_names() -> None:
    assert missing_names(
        [("vllm_worker.port", ("PortFacts.slab_bytes", "LoadPlan.slabs", "LoadPlan.other"))]
    ) == ["vllm_worker.port.LoadPlan.other"]


def test_versions_are_compared_without_their_build() -> None:
    version = SUPPORTED_VERSIONS[0]
    assert is_supported(version) and is_supported(f"{version}+cpu")
    assert not is_supported("0.1") and not is_supported("") and not is_supported(f"{version}1")


def test_names_are_listed_for_real_modules() -> None:
    assert all(module.split(".")[0] == "vllm" for module in USED_NAMES)


def test_nothing_of_vllm_or_torch_is_loaded_by_what_is_pure() -> None:
    code = (
        "import sys; from vllm_worker import sampling, port, engine;"
        "from vllm_worker.setup import used_names, engine_args, model_facts;"
        "print({'vllm', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
