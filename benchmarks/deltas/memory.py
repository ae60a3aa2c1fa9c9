"""What sending changes of many weights takes of memory and processor time, for `measure.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import process_time

import torch
from safetensors.torch import load_file

from benchmarks.deltas.ways import WAYS, Weights
from benchmarks.record import Row

LENGTH = 8
"""Bytes that tell the length of a buffer in a file."""


def remembered(before: Path, after: Path, elements: int) -> Iterator[Row]:
    """Yield what each way takes at most, for a pair of weights repeated till it is large.

    Each measurement has a process of its own, whose resident set has nothing but modules, weights
    and what is measured. Buffers are written to a file as they come, and read as they are asked
    for.
    """
    with (
        ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        for place in range(len(WAYS)):
            file = Path(folder) / str(place)
            encoded = pool.submit(_encoded, place, before, after, elements, file).result()
            applied = pool.submit(_applied, place, before, elements, file).result()
            yield {
                "what": "memory",
                "way": WAYS[place].label,
                **encoded,
                "message_bytes": file.stat().st_size,
                **applied,
            }
            file.unlink()


def _encoded(place: int, before: Path, after: Path, elements: int, file: Path) -> Row:
    torch.set_num_threads(1)
    old, now = tiled(before, elements), tiled(after, elements)
    before_bytes, busy = resident(), 0.0
    with file.open("wb") as out:
        start = process_time()
        for buffer in WAYS[place].encode(now, old):
            busy += process_time() - start
            out.write(len(buffer).to_bytes(LENGTH, "little"))
            out.write(buffer)
            start = process_time()
    elements = sum(tensor.numel() for tensor in old.values())
    return {
        "elements": elements,
        "model_bytes": sum(tensor.nbytes for tensor in old.values()),
        "encode_peak_bytes": process_bytes("VmHWM") - before_bytes,
        "encode_cpu_g": elements / busy / 1e9,
    }


def _applied(place: int, before: Path, elements: int, file: Path) -> Row:
    torch.set_num_threads(1)
    target = tiled(before, elements)
    before_bytes, start = resident(), process_time()
    WAYS[place].apply(target, _buffers(file))
    busy = process_time() - start
    return {
        "apply_peak_bytes": process_bytes("VmHWM") - before_bytes,
        "apply_cpu_g": sum(tensor.numel() for tensor in target.values()) / busy / 1e9,
    }


def _buffers(file: Path) -> Iterator[bytes]:
    with file.open("rb") as there:
        while length := there.read(LENGTH):
            yield there.read(int.from_bytes(length, "little"))


def tiled(file: Path, elements: int) -> Weights:
    """Return weights, each repeated till its tensor is as large as one of a large model."""
    weights = load_file(file)
    copies = -(-elements // sum(tensor.numel() for tensor in weights.values()))
    return {name: torch.cat([tensor] * copies) for name, tensor in weights.items()}


def resident() -> int:
    """Return the bytes that are resident, which the peak begins from."""
    Path("/proc/self/clear_refs").write_text("5")
    return process_bytes("VmRSS")


def process_bytes(name: str) -> int:
    """Return what the kernel says of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found)
