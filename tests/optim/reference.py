"""LARS and LAMB in plain torch, one tensor at a time, as their papers write them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparcel.core import kernels

State = dict[str, Any]


def norm(tensor: Tensor) -> float:
    """Return the norm, summed in float64 in the order of memory, by chunks as the kernels do."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return kernels.norm(tensor.permute(order).reshape(-1).contiguous())


def lars(w: Tensor, g: Tensor, state: State, settings: dict[str, Any]) -> None:
    """Change ``w`` and its state by You et al. 2017, with CommLib's equation 11."""
    decay, ratio = settings["weight_decay"], 1.0
    if settings["exclude_vectors"] and w.ndim <= 1:
        decay = 0.0
    elif norm(w) and norm(g):
        ratio = settings["trust"] * norm(w) / (norm(g) + decay * norm(w))
    step = (g.add(w, alpha=decay) if decay else g) * (settings["lr"] * ratio)
    state["trust_ratio"] = ratio
    if settings["momentum"]:
        if "momentum_buffer" in state:
            step = step.add(state["momentum_buffer"], alpha=settings["momentum"])
        state["momentum_buffer"] = step
    w.sub_(step)


def lamb(w: Tensor, g: Tensor, state: State, settings: dict[str, Any]) -> None:
    """Change ``w`` and its state by You et al. 2020, Algorithm 2."""
    (beta1, beta2), decay = settings["betas"], settings["weight_decay"]
    t = state["step"] = state.get("step", 0) + 1
    m = state.get("exp_avg", torch.zeros_like(w)).lerp(g, 1 - beta1)
    v = (state.get("exp_avg_sq", torch.zeros_like(w)) * beta2).addcmul(g, g, value=1 - beta2)
    state |= {"exp_avg": m, "exp_avg_sq": v}
    u = m / (v.sqrt() / math.sqrt(1 - beta2**t) + settings["eps"]) / (1 - beta1**t)
    adapted = not (settings["exclude_vectors"] and w.ndim <= 1)
    if adapted and decay:
        u = u.add(w, alpha=decay)
    ratio = norm(w) / norm(u) if adapted and norm(w) and norm(u) else 1.0
    state["trust_ratio"] = ratio
    w.sub_(u * (settings["lr"] * ratio))
