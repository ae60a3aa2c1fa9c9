"""What engines serve of bfloat16 weights: copies in eight and four bits, with their scales.

Each cast takes the matrices of a checkpoint, and leaves what has one dimension as it is. The forms
are those of checkpoints that vLLM and SGLang load: names, shapes and the dtypes of scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

Weights = dict[str, Tensor]
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


def widened(name: str, weight: Tensor) -> Weights:
    """Float32 that holds bfloat16."""
    return {name: weight}


CASTS: dict[str, Callable[[str, Tensor], Weights]] = {
    "int8 rows": int8_rows,
    "fp8 blocks": fp8_blocks,
    "e5m2 blocks": partial(fp8_blocks, dtype=torch.float8_e5m2),
    "int4 by 128": int4_groups,
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
    "float32 of bf16": widened,
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
