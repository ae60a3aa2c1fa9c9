"""Compiles the kernels as for a GPU of CUDA, without one: `test_compile.py` runs this file.

Triton compiles for a target by its own copy of NVIDIA's assembler. What cannot be compiled,
although Triton's interpreter runs it, ends this program with Triton's error. Nothing is computed,
so all that a kernel would have written is 0.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from sparcel.core import device, ops
from sparcel.core.formats import format_named
from sparcel.core.kernels import Addition, Regions, gpu
from sparcel.core.regions import leg

ARCHITECTURE = 90  # that of the H100

compiled: set[str] = set()


def compile_only(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    kernel.warmup(*args, grid=(max(programs, 1),), **constants)
    assert not kernel.used_global_vals, f"each launch of {kernel.__name__} compares these"
    compiled.add(kernel.__name__)


def call_all() -> None:
    """Call every function of the kernels for GPUs, with numbers of 16, 32 and 64 bits."""
    x, memory = torch.ones(300_000, dtype=torch.bfloat16), torch.ones(300_000)
    gpu.topk(x, 300)
    gpu.topk(memory.double(), 300)
    gpu.topk_chunked(x, 2, 100)
    gpu.threshold_select(x, 0.5)
    gpu.accumulate_topk(Addition(memory, x, memory.clone()), 300)
    gpu.quantize(x, 4, 64)
    stream = torch.arange(300, dtype=torch.int32), x[:300]
    gpu.merge([stream, stream], ops.SUM)
    gpu.merge([(stream[0], memory.view(300, -1))] * 2, ops.MAX)
    for vector in (memory, memory.double()):
        gpu.average(vector, 3)
    gpu.scatter(x, *stream)
    gpu.scatter_reduce(x, *stream, ops.MAX)
    gpu.within(*stream, stream[0])
    corrected = Addition(memory, x, memory.clone(), 0.5, 0.9, memory, memory.clone(), clear=True)
    gpu.accumulate_topk(corrected, 300)
    gpu.accumulate_topk(corrected, 1, 10_000)
    gpu.magnitude_histogram(memory, 20, 2048)
    gpu.magnitude_histogram(memory, 7, 8192, prefix=3)
    for vector in (x, memory, memory.double()):
        gpu.bracket(vector, vector[:1025], 300)
    gpu.add_saturated(x, *stream)
    header = bytes(32) + (40 + 8 * (75 + 150)).to_bytes(8, "little")
    for finite in (None, torch.tensor(True)):
        gpu.join_message([stream[1], stream[0]], header, finite)
    gpu.indices_fault(stream[0], 300)
    for bits, seed in ((8, 7), (2, None), (5, None)):
        made = gpu.quantize(memory.float(), bits, 32, seed)
        gpu.dequantize(made.codes, made.scales, memory.numel(), bits, 32)
    for size in (10_000, 2**40):
        indices = torch.arange(300, dtype=torch.int32 if size < 2**31 else torch.int64)
        gpu.unpack_indices(gpu.pack_indices(indices, size), 300, size)
    regions = Regions.of(memory.numel(), 3)
    for names, shares, gradient in ((("4", "6"), 1, x), (("2", "3"), 2, memory)):
        stops = tuple((regions.size * part // shares, 0.1) for part in range(1, shares + 1))
        (part, everything), (back, all_back) = (
            [
                leg(regions, each, format_named(f"packed:{bits}"), torch.float32)
                for each in (stops, ((regions.size, 1.0),))
            ]
            for bits in names
        )
        addition = Addition(memory, gradient, memory.clone(), 0.5)
        pairs = ((part, back), (part, all_back), (everything, all_back), (everything, back))
        for up, down in pairs:
            messages = gpu.enter(addition, up, 1, 7).messages
            gpu.collect(addition, messages, up, down, 1, 7)
            gpu.deliver(gradient, messages, down, 3.0)


if __name__ == "__main__":
    target = GPUTarget("cuda", ARCHITECTURE, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )
    device.read = torch.zeros_like
    device.later = lambda *_: None
    for name, module in sys.modules.items():
        if name.startswith(f"{gpu.__name__}.") and hasattr(module, "launch"):
            module.launch = compile_only
    call_all()
    print(*sorted(compiled))
