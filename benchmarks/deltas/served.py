"""How short changes are of what engines serve: copies of bfloat16 weights in fewer bits.

    python -m benchmarks.deltas.served FOLDER

``FOLDER`` has pairs of weights of real fine-tuning, or gets them from `pairs.py`. Both weights of a
pair are cast to the forms of checkpoints that vLLM and SGLang load: names, shapes and the dtypes of
scales. What has one dimension stays as it is. ``bf16`` are the weights themselves. All runs in one
thread.

``bits`` are those of whole messages, headers included, for each element that changes: of what is
packed, a byte. ``entropy`` are those of places, and of new bits given the old ones (of dtypes
of more than a byte: of the steps between them), of each dtype apart. They come from counts of the
very pair: where there are fewer changes than old and new bits may have values, they say too little.
``encode_g`` and ``apply_g`` are weights, changed or not, for each nanosecond of processor time, the
median of all turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.clock import took
from benchmarks.deltas.measure import entropy
from benchmarks.deltas.pairs import pairs
from benchmarks.deltas.ways import Dense, Gaps, Plain, Sparcel, Way, Weights, bits_of, same
from benchmarks.record import RESULTS, Row, machine, options, show, write

GROUP, BLOCK, NV, MX = 128, 128, 16, 32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BETWEEN = (E2M1[1:] + E2M1[:-1]) / 2
MOST_E2M1, MOST_E4M3 = 6.0, 448.0


def int8_rows(name: str, weight: Tensor) -> Weights:
    """Eight bits, with a scale for each row."""
    scale = _scale(weight, 1, 127)
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def int4_groups(name: str, weight: Tensor) -> Weights:
    """Two values a byte, with a scale in bfloat16 for 128 of a row."""
    groups = weight.view(len(weight), -1, GROUP)
    scale = _scale(groups, 2, 7).bfloat16()
    values = (groups / scale.float()).round().clamp(-8, 7).to(torch.int8) + 8
    packed = _packed(values.to(torch.uint8).view(weight.shape))
    return {f"{name}_packed": packed, f"{name}_scale": scale.squeeze(2)}


def fp8_blocks(name: str, weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Weights:
    """Float8, with a scale in float32 for blocks of 128 by 128."""
    rows, columns = (side // BLOCK for side in weight.shape)
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / torch.finfo(dtype).max
    values = (blocks / scale).to(dtype).view(weight.shape)
    return {name: values, f"{name}_scale_inv": scale.view(rows, columns)}


def nvfp4(name: str, weight: Tensor) -> Weights:
    """Two values of E2M1 a byte, with a scale in E4M3 for 16 of a row, and one for the tensor."""
    whole = weight.abs().max() / (MOST_E2M1 * MOST_E4M3)
    blocks = weight.view(len(weight), -1, NV)
    scale = (_scale(blocks, 2, MOST_E2M1) / whole).to(torch.float8_e4m3fn)
    packed = _packed(_e2m1(blocks / (scale.float() * whole)).view(weight.shape))
    return {
        f"{name}_packed": packed,
        f"{name}_scale": scale.squeeze(2),
        f"{name}_global_scale": whole.view(1),
    }


def mxfp4(name: str, weight: Tensor) -> Weights:
    """Two values of E2M1 a byte, with an exponent in E8M0 for 32 of a row."""
    blocks = weight.view(len(weight), -1, MX)
    exponents = (blocks.abs().amax(2, keepdim=True).clamp(min=1e-30).log2().floor() - 2).int()
    packed = _packed(_e2m1(blocks * torch.exp2(-exponents.float())).view(weight.shape))
    scales = (exponents.squeeze(2) + 127).to(torch.uint8)
    return {f"{name}_blocks": packed, f"{name}_scales": scales}


CASTS: dict[str, Callable[[str, Tensor], Weights]] = {
    "int8 rows": int8_rows,
    "fp8 blocks": fp8_blocks,
    "e5m2 blocks": partial(fp8_blocks, dtype=torch.float8_e5m2),
    "int4 by 128": int4_groups,
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
    "float32 of bf16": lambda name, weight: {name: weight},
}


def cast(weights: Mapping[str, Tensor], how: str) -> Weights:
    """Return what is served of bfloat16 weights; vectors stay in bfloat16."""
    served: Weights = {}
    for name, weight in weights.items():
        if weight.dim() == 2:
            served |= CASTS[how](name, weight.float())
        else:
            served[name] = weight
    return served


def _scale(groups: Tensor, dim: int, most: float) -> Tensor:
    return groups.abs().amax(dim, keepdim=True).clamp(min=1e-12) / most


def _e2m1(values: Tensor) -> Tensor:
    """Return the nibbles of the nearest values: a sign, and the number of a magnitude."""
    magnitude = torch.bucketize(values.abs(), BETWEEN)
    return (magnitude + 8 * values.signbit()).to(torch.uint8)


def _packed(nibbles: Tensor) -> Tensor:
    """Pack two nibbles a byte, the first one low."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


LEARNING_RATES = (1e-6, 3e-6, 1e-5)
VERSIONS = 4
WAYS: tuple[Way, ...] = (Sparcel("exponents"), Gaps(1, xor=True), Dense(), Plain())


def served(how: str, lr: float, weights: Sequence[Weights], repeats: int) -> Row:
    """Return the row of a cast."""
    elements = sum(tensor.numel() for tensor in weights[0].values())
    versions = weights if how == "bf16" else [cast(one, how) for one in weights]
    both = list(pairwise(versions))
    changed = sum(_changed(*pair) for pair in both)
    row = {
        "cast": how,
        "lr": lr,
        "elements": elements,
        "pairs": len(both),
        "changed": changed / len(both),
        "entropy": sum(_entropy(*pair) for pair in both) / changed,
        "bits": {},
        "encode_g": {},
        "apply_g": {},
    }
    for way in WAYS:
        size, times = 0, []
        for turn in range(repeats):
            old, now = both[turn % len(both)]
            target = {name: tensor.clone() for name, tensor in old.items()}
            told = took(lambda way=way, both=(now, old): [*way.encode(*both)])
            message = told.result
            times.append((told.cpu_s, took(way.apply, target, message).cpu_s))
            if turn < len(both):
                size += sum(map(len, message))
                if not same(target, now):
                    raise SystemExit(f"{way.label} does not make the new weights of {how}")
        row["bits"][way.label] = 8 * size / changed
        for stage, busy in zip(("encode_g", "apply_g"), zip(*times, strict=True), strict=True):
            row[stage][way.label] = elements / median(busy) / 1e9
    return row


def _changed(old: Weights, now: Weights) -> int:
    return sum(int((bits_of(old[name]) != bits_of(now[name])).sum()) for name in old)


def _entropy(old: Weights, now: Weights) -> float:
    """Return the bits of places and of new bits, of each dtype apart."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for name, tensor in old.items():
        by_dtype[tensor.dtype].append((bits_of(tensor), bits_of(now[name])))
    total = 0.0
    for pieces in by_dtype.values():
        before, after = (torch.cat(side).long() for side in zip(*pieces, strict=True))
        there = before != after
        if not there.any():
            continue
        total += entropy(torch.zeros_like(before), there.long())
        narrow = pieces[0][0].itemsize == 1
        given = before[there] & 0xFF if narrow else torch.zeros_like(before[there])
        told = after[there] & 0xFF if narrow else after[there] - before[there]
        total += entropy(given, told.unique(return_inverse=True)[1])
    return total


def main() -> None:
    given = options(
        __doc__, "folder", lr=LEARNING_RATES, repeats=9, output=RESULTS / "deltas_served.json"
    )
    torch.set_num_threads(1)
    origin, rows = machine(), list[Row]()
    for lr, files in pairs(given.folder, given.lr, VERSIONS).items():
        versions = [load_file(file) for file in files]
        for how in ("bf16", *CASTS):
            rows.append(served(how, lr, versions, given.repeats))
            write(given.output, origin, rows)
    show({**row, **row["bits"]} for row in rows)


if __name__ == "__main__":
    main()
