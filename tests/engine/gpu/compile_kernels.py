"""Compiles every kernel that a step launches, for a GPU that need not be there, and prints what each one takes.

    TRITON_INTERPRET=0 python -m tests.engine.gpu.compile_kernels DTYPE [CODEC ...]

The decoder runs on CPU tensors with recorders in place of its kernels, so the compiler sees the arguments of real
launches: their types, and which numbers are divisible by 16. One line of JSON per kernel: its name, bytes of shared
memory, bytes of stack (what registers did not hold).
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.batching.batch import pack_batch
from engine.gpu import attention, rowwise
from engine.gpu.coded import attention as coded_attention
from engine.gpu.decoder import GpuDecoder
from engine.gpu.launch import LaunchTuning
from engine.gpu.triton_kernel import UNSPECIALIZED
from engine.gpu.triton_kernels import TritonKernels
from engine.step_work import StepWork
from tests.support.gpu_pages import LLAMA_8B, Place, Random, open_pages

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int16: "*i16",
    torch.uint8: "*u8",
}  # fmt: skip


class Recorder:
    """A kernel that compiles itself for the arguments it is launched with, and does nothing else."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.seen: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        constants = {name: value for name, value in kwargs.items() if name.isupper()}
        values = dict(zip(self.names, args, strict=False)) | kwargs
        signature = {name: "constexpr" if name in constants else _type(values[name]) for name in self.names}
        aligned = {
            (self.names.index(name),): [["tt.divisibility", 16]]
            for name, value in values.items()
            if name not in constants and name not in UNSPECIALIZED and _aligned(value)
        }
        key = str((signature, sorted(aligned), constants, options))
        if key in self.seen:
            return
        self.seen.add(key)
        found = {(self.names.index(name),): value for name, value in constants.items()}
        source = ASTSource(self.kernel, signature, found, aligned)
        compiled = triton.compile(source, target=TARGET, options=options)
        figures = {"kernel": self.kernel.fn.__name__, "shared": compiled.metadata.shared}
        print(json.dumps(figures | {"stack": _stack(compiled.asm["cubin"])}), flush=True)


def _aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _stack(cubin: bytes) -> int:
    """Bytes of local memory per thread, as the assembler says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.findall(r"STACK:(\d+)", result.stdout)[-1])


def main(dtype: str, *codecs: str) -> None:
    """For raw pages and for pages of each codec: a step with decoding rows that share a prefix, one without, and a
    prefill.
    """
    for module, names in (
        (attention, ("_decode", "_merge", "_prefill", "_write")),
        (rowwise, ("_add_norm", "_gate")),
        (coded_attention, ("_decode_coded", "_encode", "_expand")),
    ):
        for name in names:
            setattr(module, name, Recorder(getattr(module, name)))
    shape = replace(LLAMA_8B, layers=1, vocab=64, mlp=1024, windows=(0,))
    place = torch.device("cpu")
    decoder = GpuDecoder(shape, Random(), 4096, place, getattr(torch, dtype), TritonKernels())
    tuning = LaunchTuning(programs=1056, saving_bytes=0)
    for codec in ("", *codecs):
        launch_steps(decoder, open_pages(shape, Place(place, dtype, layers=1), codec, 128, tuning))


def launch_steps(decoder: GpuDecoder, pages: attention.GpuAttention) -> None:
    """Every kind of step once."""
    alike = [[*range(60), 100 + n] for n in range(2)]
    apart = [[n] for n in range(40)]
    for batch in (
        [StepWork([1], 60 * 64, row, "last") for row in alike],
        [StepWork([1], 59 * 64, [*range(60 * n, 60 * n + 60)], "last") for n in range(2)],
        [StepWork([1], 5, row, "last") for row in apart],
        [StepWork([1] * 70, 10, [0, 1], "last")],
    ):
        with torch.no_grad():
            decoder.forward(pages.load(pack_batch(batch)), pages)


if __name__ == "__main__":
    main(*sys.argv[1:])
