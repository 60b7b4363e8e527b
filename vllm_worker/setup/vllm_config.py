"""Opens vLLM: its configuration, before weights are read, and its engine.

    EngineOptions ─▶ vLLM's parser ─▶ VllmConfig ─checks─▶ EngineCore ─warm_up─▶ VllmPort

Only this file, `vllm_port` and the connector import vLLM. mypy cannot see it, so its objects are `Any` here. One engine
per process: vLLM keeps its parallel groups in globals.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from diptych.errors import ConfigError, DiptychError, ModelError, raise_if_lost
from diptych.request import Grammar, SamplingParams
from vllm_worker.port import PortRefused, PortRequest
from vllm_worker.setup.engine_args import EngineOptions, build_arguments, chunks_prompts, kv_arguments
from vllm_worker.setup.lone_rank import share_groups
from vllm_worker.setup.model_facts import check_blocks, check_model, check_options, check_ranks, read_facts
from vllm_worker.vllm_port import VllmPort

log = logging.getLogger(__name__)

# What vLLM reads from the environment when it is imported. The engine lives in this process, and nothing calls home.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# Defaults of vLLM's CPU build: the worker binds its own cores; kernels for servers' instructions are looked for.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_SGL_KERNEL": "0"}


def prepare_environment() -> None:
    """Set what vLLM reads from the environment when it is imported."""
    os.environ.update(ENVIRONMENT)
    # It is in whole GiB, and vLLM would prefer it to the option.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def _in_our_words() -> Iterator[None]:
    """Raises ModelError for whatever vLLM raises inside."""
    try:
        yield
    except DiptychError:
        raise
    except Exception as error:
        raise_if_lost(error)
        log.warning("vLLM cannot load the model", exc_info=True)
        fix = "see the worker's log; --vllm-args passes vLLM's own flags"
        raise ModelError("vLLM refuses the model or its options", shorten_error(error), fix) from error


def shorten_error(error: Exception) -> str:
    """One line of an error of vLLM. Errors of pydantic begin with a class, and end with a value and an address."""
    line = " ".join(str(error).split())
    for mark in ("Value error, ", "Assertion failed, "):
        line = line.split(mark, 1)[-1]
    return f"{type(error).__name__}: {line.split(' [type=', 1)[0]}"[:300]


def is_cpu_build() -> bool:
    """Whether this interpreter's vLLM computes on CPUs. Imports vLLM."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def create_config(options: EngineOptions) -> Any:
    """vLLM's `VllmConfig` for `options`, checked; reads the model's files, but no weights.

    Raises:
        ConfigError: vLLM's parser refuses a flag, or one contradicts ours.
        ModelError: vLLM refuses the model or its options, or its KV cannot be handed over.
    """
    prepare_environment()
    with _in_our_words():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        class Parser(FlexibleArgumentParser):  # type: ignore[misc]
            """vLLM's parser, which raises where it would end the process."""

            def error(self, message: str) -> NoReturn:
                fix = "vLLM's flags are listed by: vllm serve --help=all"
                raise ConfigError("vLLM does not accept --vllm-args", message, fix)

            def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
                self.error(message or "a flag ends vLLM's parser")

        is_cpu = is_cpu_build()
        parser = EngineArgs.add_cli_args(Parser(prog="--vllm-args", allow_abbrev=False))
        args = EngineArgs.from_cli_args(parser.parse_args(build_arguments(options, is_cpu)))
        model = args.create_model_config()
        check_model(model)
        if not chunks_prompts(options, is_cpu):
            # The longest prompt fits beside all that decode.
            longest = int(model.max_model_len) + options.max_num_seqs
            args.max_num_batched_tokens = max(longest, options.max_num_batched_tokens)
        config = args.create_engine_config()
        check_blocks(config)
        check_options(config, options.tp, chunks_prompts(options, is_cpu))
        return config


def open_vllm(options: EngineOptions) -> VllmPort:
    """Load a model and start an engine. Takes a minute or more.

    Raises:
        ConfigError: as `create_config`.
        ModelError: as `create_config`, or there is no room for the model or its KV.
    """
    config = create_config(options)
    with _in_our_words():
        from vllm import __version__
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.executor import Executor

        from vllm_worker.connector import find_copy_error

        if options.tp == 1 and is_cpu_build():
            share_groups()
        lost: list[str] = []
        core = EngineCore(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=True,
            executor_fail_callback=lambda: lost.append("a rank of the worker has ended"),
        )
        try:
            if options.connector is not None:
                check_ranks(core.collective_rpc(find_copy_error))
            facts = read_facts(core, str(__version__), is_cpu_build(), kv_arguments(options.vllm_args))
            port = VllmPort(core, InputProcessor(config), facts, lost)
            warm_up(port)
            return port
        except BaseException:
            core.shutdown()
            raise


def warm_up(port: VllmPort) -> None:
    """Run what vLLM compiles at its first use, such as log-probabilities and grammars; it can take a minute."""
    every = SamplingParams(
        max_tokens=2,
        seed=0,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 0.1},
        logprobs=1,
        prompt_logprobs=1,
    )
    greedy = SamplingParams(max_tokens=2, seed=0, temperature=0.0, logprobs=1)
    grammar = SamplingParams(max_tokens=2, seed=0, temperature=0.0, grammar=Grammar("regex", "[a-z]{2}"))
    for number, sampling in enumerate((every, greedy, grammar)):
        try:
            port.add(PortRequest(f"warm up#{number}", [0] * 8, [], sampling))
        except PortRefused as refusal:
            # What cannot be served is refused request by request.
            log.info("vLLM refuses a request while it warms up: %s; %s", refusal.what, refusal.why)
    while port.has_work:
        port.step()
    port.clear_prefixes()
