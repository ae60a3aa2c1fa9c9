"""What islands share of a model: its tensors by name, as they are at the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from sparcel.core._checks import FLOAT_DTYPES, all_finite
from sparcel.core.training.driver import model_names
from sparcel.errors import InputError

_WAY_OUT = (
    "change a model on all islands alike right after an outer step: close(), change it, and attach"
    " again"
)

_MOMENTS = "exp_avg_sq", "square_avg"
"""What Adam and RMSprop, and those made after them, call the mean of squared gradients."""


class Moment(NamedTuple):
    """What an optimiser keeps of a parameter's squared gradients.

    Attributes
    ----------
    kept
        The decaying mean as it is kept.
    bias
        What the optimiser divides it by, because it began with zero.
    decay
        What it is multiplied by in each step.
    """

    kept: Tensor
    bias: float
    decay: float


class Model:
    """A model whose parameters are exchanged, and its buffers averaged.

    Memory may be moved, and modules replaced, as long as the parameters to train keep their names
    and shapes. Of a sharded model, tensors are this rank's shards. Complex tensors have one more
    dimension, of 2. Where an optimiser keeps copies of parameters in more bits, from which it makes
    them in each step, the copies are exchanged.

    Parameters
    ----------
    module
        The model, which may be wrapped.
    averages
        Whether buffers become averages.

    Attributes
    ----------
    optimizers
        Those that train it, in the order of their steps.
    parameters
        The parameters to train, by their names in the model before it was wrapped.
    whole
        Those of them that are sharded, whole.
    buffers
        The buffers that become averages if any island changes them: dense ones of floats, on the
        parameters' device, but no vectors of a power iteration, which belong to the weights of one
        island, and no masks.

    Raises
    ------
    InputError
        When a model cannot be exchanged, or has changed since.
    """

    def __init__(self, module: nn.Module, averages: bool, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._averages, self.optimizers = module, averages, optimizers
        self._copied: set[tuple[int, str]] = set()
        """The optimisers that keep copies, by their places, and under which names."""
        self.parameters: dict[str, Tensor] = {}
        self.look()
        if not self.parameters:
            raise InputError("the model has no parameters to train")
        self._agreed = {name: _described(one) for name, one in self.parameters.items()}
        self._kept: dict[str, Tensor] = {}
        self.keep()

    def look(self) -> None:
        """Look for the tensors anew."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        named, buffered = dict(self._module.named_parameters()), dict(self._module.named_buffers())
        plain = model_names([*named, *buffered])
        found = {
            plain[name]: one
            for name, one in named.items()
            if one.requires_grad or plain[name] in self.parameters
        }
        if self.parameters:
            self._check(found)
        else:
            _check_trainable(found)
        self.whole: dict[str, DTensor] = {
            name: one for name, one in found.items() if isinstance(one, DTensor)
        }
        self._trained = found
        copies = self._find_copies()
        self.parameters = {name: _local(copies.get(one, one)) for name, one in found.items()}
        self._rounded = {name: _local(one) for name, one in found.items() if one in copies}
        iterated = set(_power_iterations(self._module))
        device = next((one.device for one in self.parameters.values()), None)
        self.buffers, self._local = dict[str, Tensor](), dict[str, Tensor]()
        for name, one in buffered.items():
            is_dense = one.dtype in FLOAT_DTYPES and one.layout == torch.strided
            is_mask = "mask" in name.rpartition(".")[2]
            if is_dense and one.device == device and not is_mask:
                averaged = self._averages and id(one) not in iterated
                (self.buffers if averaged else self._local)[plain[name]] = _local(one)

    def settle(self) -> None:
        """Let parameters become what the optimisers' copies of them, which were written to, are."""
        for name, one in self._rounded.items():
            one.copy_(self.parameters[name])

    def moments(self) -> dict[str, Moment]:
        """Return the second moments that the optimisers keep, as `parameters` are."""
        names, found = {one: name for name, one in self._trained.items()}, dict[str, Moment]()
        groups = [(one.state, group) for one in self.optimizers for group in one.param_groups]
        for states, group in groups:
            for parameter in filter(names.__contains__, group["params"]):
                state = states.get(parameter, {})
                kept = next((state[key] for key in _MOMENTS if key in state), None)
                if isinstance(kept, Tensor) and kept.shape == parameter.shape:
                    decay, bias = group.get("alpha", 1.0), 1.0
                    if "betas" in group and "step" in state:
                        decay = group["betas"][1]
                        bias -= decay ** float(state["step"])
                    found[names[parameter]] = Moment(_local(kept), bias, decay)
        return found

    def _find_copies(self) -> dict[Tensor, Tensor]:
        """Return the copies in more bits that optimisers keep of parameters."""
        found = dict[Tensor, Tensor]()
        for place, optimizer in enumerate(self.optimizers):
            states = optimizer.state
            for key in {key for state in states.values() for key in state}:
                kept = {one: state[key] for one, state in states.items() if key in state}
                if (place, key) in self._copied or _are_copies(kept):
                    self._copied.add((place, key))
                    found |= kept
        return found

    def keep(self) -> None:
        """Keep what this island's own buffers hold, if it is finite."""
        if all(map(all_finite, self._local.values())):
            self._kept = {name: one.clone() for name, one in self._local.items()}

    def restore(self) -> None:
        """Bring back what `keep` has kept of buffers that hold NaN or Inf now."""
        for name, one in self._local.items():
            kept = self._kept.get(name)
            if kept is not None and kept.shape == one.shape and not all_finite(one):
                one.copy_(kept)

    def after_steps(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call after each step of the last optimiser; return what ends that.

        Fused optimisers find out themselves, on the device, that a GradScaler wants the step
        skipped.
        """

        def after(optimizer: Optimizer, *_: object) -> None:
            found = getattr(optimizer, "found_inf", None)
            if found is None or not bool(found):
                call()

        return self.optimizers[-1].register_step_post_hook(after).remove

    def forget_spoilt(self) -> None:
        """Clear what the optimisers remember of parameters, where it holds NaN or Inf."""
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                tensors = [one for one in state.values() if isinstance(one, Tensor)]
                if not all(map(all_finite, tensors)):
                    state.clear()

    def _check(self, found: dict[str, nn.Parameter]) -> None:
        for name in dict.fromkeys([*self._agreed, *found]):
            agreed = self._agreed.get(name, "frozen, or not there")
            now = _described(_local(found[name])) if name in found else "no parameter of the model"
            if now != agreed:
                raise InputError(
                    f"when islands began, {name!r} was {agreed}, and is {now} now; {_WAY_OUT}"
                )


def unwrapped(module: nn.Module) -> list[nn.Module]:
    """Return a model as it is given, and what is inside of DDP and `torch.compile`, in order."""
    found = [module]
    while True:
        last = found[-1]
        ddp = isinstance(last, DistributedDataParallel)
        inside = last.module if ddp else getattr(last, "_orig_mod", None)
        if not isinstance(inside, nn.Module):
            return found
        found.append(inside)


def _check_trainable(found: dict[str, nn.Parameter]) -> None:
    for name, one in found.items():
        if is_lazy(one) or one.is_meta:
            raise InputError(
                f"{name!r} has no values yet; attach after it was made on a device and initialised"
            )
        local = _local(one)
        if local.dtype not in FLOAT_DTYPES:
            raise InputError(
                f"{name!r} must hold floats of 16 bits or more to be exchanged, got {one.dtype}"
            )
        if not all_finite(local):
            raise InputError(f"{name!r} holds NaN or Inf; initialise or load it before attach")


def _local(tensor: Tensor) -> Tensor:
    """Return a tensor's values, or this rank's, as floats that share its memory."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return torch.view_as_real(local) if local.is_complex() else local


def _are_copies(kept: dict[Tensor, object]) -> bool:
    """Tell whether what an optimiser keeps of each parameter is a copy of it in more bits."""
    return all(
        isinstance(one, Tensor)
        and one.shape == parameter.shape
        and torch.promote_types(one.dtype, parameter.dtype) != parameter.dtype
        and torch.equal(_local(one).to(parameter.dtype), _local(parameter))
        for parameter, one in kept.items()
    ) and any(_local(parameter).any() for parameter in kept)


def _described(tensor: Tensor) -> str:
    return f"of shape {list(tensor.shape)} on {tensor.device}"


def _power_iterations(model: nn.Module) -> Iterator[int]:
    """Yield the ids of buffers that are vectors of spectral norms."""
    for module in model.modules():
        if isinstance(module, _SpectralNorm):
            yield from map(id, module.buffers(recurse=False))
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield from (id(getattr(module, f"{hook.name}_{end}")) for end in "uv")
