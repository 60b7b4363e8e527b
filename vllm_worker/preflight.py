"""`python -m vllm_worker.preflight`: asks vLLM whether it would serve a model this way, before any worker starts.

A JSON object on standard input, one on the last line of standard output: {"facts": {...}} or {"error": {"what", "why",
"fix"}}. It runs under vLLM's interpreter, which may lack anything, so this module imports the standard library alone.
No weights are read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from typing import Any

MIN_PYTHON = (3, 11)
# Packages that Diptych's part of a worker imports, beside vLLM, and the names under which they are installed.
NEEDED = {
    "msgspec": "msgspec", "numpy": "numpy", "numba": "numba", "zmq": "pyzmq", "blake3": "blake3", "xxhash": "xxhash",
}  # fmt: skip
OTHER_PYTHON = "name the python of an environment that has vLLM: make vllm makes one in .vllm/"
# Most missing names, and most characters of a reason, that are shown.
MAX_NAMES, MAX_REASON = 4, 400


class Refusal(Exception):
    """The reason why workers cannot start, in three parts."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what)
        self.parts = {"what": what, "why": why, "fix": fix}


def check_interpreter() -> None:
    """Check this interpreter's own version and packages. Raises Refusal."""
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MIN_PYTHON:
        raise Refusal(
            f"{sys.executable} is Python {python}", "Diptych needs Python 3.11 or newer", OTHER_PYTHON
        )
    if importlib.util.find_spec("vllm") is None:
        raise Refusal(f"{sys.executable} has no vLLM", f"it is Python {python}", OTHER_PYTHON)
    missing = [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise Refusal(
            f"{sys.executable} has vLLM, but not {', '.join(missing)}",
            "Diptych's part of a worker imports these packages beside vLLM",
            f"{sys.executable} -m pip install {' '.join(missing)}",
        )


def check_version() -> None:
    """Check that this version of vLLM is one on which the suite has passed, with all names in place. Raises Refusal."""
    from vllm_worker.setup.used_names import (
        SUPPORTED_VERSIONS,
        installed_version,
        is_supported,
        missing_names,
    )

    version, missing = installed_version() or "of unknown version", missing_names()
    if is_supported(version) and not missing:
        return
    absent = ", ".join(missing[:MAX_NAMES]) + (
        f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
    )
    raise Refusal(
        f"vLLM {version} is not supported",
        f"the suite has passed on {', '.join(SUPPORTED_VERSIONS)}; "
        + (
            f"of the names that Diptych uses it lacks {absent}"
            if missing
            else "it has all names that are used"
        ),
        f"install vllm=={SUPPORTED_VERSIONS[-1]} there, or name another interpreter with --vllm-python",
    )


def inspect_model(question: dict[str, Any]) -> dict[str, Any]:
    """What vLLM says of the model with these options, which are those of `vllm_worker.setup.engine_args.EngineOptions`.

    `device` is the one that was asked for. Raises Refusal, or an error in three parts.
    """
    from vllm_worker.setup.engine_args import EngineOptions
    from vllm_worker.setup.model_facts import describe_config
    from vllm_worker.setup.used_names import installed_version
    from vllm_worker.setup.vllm_config import create_config, is_cpu_build

    asked, version = question.pop("device"), installed_version()
    device = "cpu" if is_cpu_build() else "cuda"
    if asked != device:
        raise Refusal(
            f"this build of vLLM computes on {device}, and workers are to compute on {asked}",
            f"it is vLLM {version} of {sys.executable}",
            f"use --device {device}, or another --vllm-python",
        )
    config = create_config(EngineOptions(**question | {"vllm_args": tuple(question["vllm_args"])}))
    facts, model = describe_config(config, device == "cpu"), config.model_config
    return {
        "version": version,
        "device": device,
        "dtype": facts.dtype,
        "max_model_len": facts.max_model_len,
        "architecture": "+".join(model.architectures),
        "layers": model.get_num_layers(config.parallel_config),
        "block_bytes": facts.block_bytes * config.parallel_config.tensor_parallel_size,
    }


def answer_question(question: dict[str, Any]) -> dict[str, Any]:
    """The reply to a question: facts, or an error in three parts."""
    try:
        check_interpreter()
        check_version()
        return {"facts": inspect_model(question)}
    except Refusal as refusal:
        return {"error": refusal.parts}
    except Exception as error:
        # Errors of Diptych have these parts; vLLM and its libraries raise anything.
        if hasattr(error, "what"):
            return {"error": {name: str(getattr(error, name, "")) for name in ("what", "why", "fix")}}
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        fix = "change --vllm-args or the model; vLLM's own words are in the log"
        return {
            "error": {"what": f"vLLM refuses {question.get('model', 'the model')}", "why": reason, "fix": fix}
        }


def main() -> None:
    """Answer the question on standard input. What libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if importlib.util.find_spec("msgspec") is not None:
        from diptych.process import die_with_parent

        die_with_parent()
    reply = answer_question(json.loads(sys.stdin.read()))
    print("\n" + json.dumps(reply), file=out, flush=True)
    # Libraries leave threads behind, which nobody has to wait for.
    os._exit(0)


if __name__ == "__main__":
    main()
