"""What FSDP reduces together: its parameter groups.

FSDP's public interface has hooks, and tells neither which parameters a hook is about nor what a
group is about to do. So this module, and no other, reads its private state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sparcel.core.training.driver import model_name
from sparcel.errors import InputError, warn_on_rank_0

MESH = 'mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))'
SHARD = f'{MESH}; fully_shard(module, mesh=mesh["shard"]) for each block and for the model'
_ATTACH = 'sparcel.attach(model, replicate=mesh["replicate"])'


class Held(NamedTuple):
    """A parameter of a group: its name in the model, and FSDP's own object for it."""

    name: str
    inner: Any

    @property
    def parameter(self) -> DTensor:
        """The parameter, sharded; loading a state may replace it."""
        found: DTensor = self.inner.sharded_param
        return found

    @property
    def shard(self) -> Tensor:
        """The shard of this rank: the same tensor each time, until FSDP replaces it."""
        shard: Tensor = self.parameter._local_tensor
        return shard

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of this rank's shard, None if there is none."""
        gradient: Any = self.parameter.grad
        return None if gradient is None else gradient._local_tensor

    def padded(self, values: Tensor | None) -> Tensor:
        """Return values of the shard, or the shard itself, with the padding that ranks need."""
        shape: torch.Size = self.inner.padded_sharded_param_size
        if values is None:
            shard: Tensor = self.inner._sharded_param_data
            return shard.view(shape)
        if values.shape == shape:
            return values
        padded = values.new_zeros(shape)
        padded.view(-1)[: values.numel()] = values.flatten()
        return padded

    def set_extension(self, before: Any, after: Any) -> None:
        """Let ``before`` and ``after`` be FSDP's extension of the parameter's all-gather.

        FSDP looks for these attributes of the shard. As they are the object's own, the shard is a
        plain tensor for everybody else.
        """
        shard: Any = self.shard
        if shard.__dict__.get("fsdp_pre_all_gather") is not before:
            shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
            self.inner._init_extensions()

    def remove_extension(self) -> None:
        """Undo `set_extension`."""
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            self.shard.__dict__.pop(name, None)


class ParameterGroup:
    """The parameters whose gradients one reduce-scatter reduces, and one hook gets.

    Attributes
    ----------
    module, modules
        A module that FSDP was applied to, which has this group, and all that share it.
    held
        The parameters that are trained, in the order in which their gradients lie.
    frozen
        Those that are not.
    """

    def __init__(self, module: FSDPModule, inner: Any, names: Mapping[int, str]) -> None:
        self.module, self._inner = module, inner
        self.modules: tuple[nn.Module, ...] = inner.modules
        all_held = [Held(names[id(one.sharded_param)], one) for one in inner.fsdp_params]
        self.held = [one for one in all_held if one.parameter.requires_grad]
        self.frozen = [one for one in all_held if not one.parameter.requires_grad]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients that there are, of this rank's shards, by name."""
        found = ((held.name, held.gradient) for held in self.held)
        return {name: gradient for name, gradient in found if gradient is not None}

    def set_aside(self) -> list[tuple[DTensor, DTensor]]:
        """Take the parameters' gradients away; return them, each with its parameter.

        Raises
        ------
        InputError
            When somebody waits for the next gradients, and would get them too early; when a
            parameter is trained that was not when the model was attached.
        """
        for held in self.frozen:
            if held.parameter.requires_grad:
                raise InputError(
                    f"{held.name!r} was frozen when the model was attached, and now requires a"
                    " gradient; close() the handle, attach again, and load the old handle's"
                    " state_dict(), with strict=False"
                )
        aside = []
        for held in self.held:
            parameter = held.parameter
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise InputError(
                    f"{held.name!r} has a hook that runs when its gradient is there"
                    " (register_post_accumulate_grad_hook), before the replicas are averaged; call"
                    " the optimiser's step() after backward()"
                )
            if isinstance(parameter.grad, DTensor):
                aside.append((parameter, parameter.grad))
                parameter.grad = None
        return aside

    def wait_for_gradients(self) -> None:
        """Let the current stream of a GPU go on after FSDP has made the gradients.

        FSDP waits itself at the end of a pass, but not if ``set_is_last_backward`` says no. Of
        gradients that are copied to the host, this waits for the copy.
        """
        if self._inner._post_reduce_event is not None:
            self._inner.device_handle.current_stream().wait_event(self._inner._post_reduce_event)
        for held in self.held:
            if held.inner.grad_offload_event is not None:
                held.inner.grad_offload_event.synchronize()

    @property
    def hook(self) -> Any:
        """The hook that the group has, or None."""
        return self._inner._all_reduce_hook

    @property
    def adds_up(self) -> bool:
        """Whether gradients are to be added up now, over several passes, before they are averaged.

        ``set_requires_all_reduce(False)`` asks for that. FSDP calls the hook all the same, and the
        gradients stay where it adds them up.
        """
        return not self._inner.all_reduce_grads

    @property
    def is_offloaded(self) -> bool:
        """Whether gradients are copied to the host, and have arrived only when the pass ends."""
        return bool(any(held.inner.offload_to_cpu for held in self.held))

    @property
    def is_gathered(self) -> bool:
        """Whether the whole parameters are there, or on their way."""
        return bool(self._inner.is_unsharded or self._inner._all_gather_result is not None)

    def reshard(self) -> None:
        """Free the whole parameters; FSDP's own does not if an exception ended a forward pass."""
        self._inner._to_sharded()

    def check(self) -> None:
        """Raise `InputError` unless shards are there, and FSDP leaves replicas alone."""
        replicas = getattr(self._inner.mesh_info, "replicate_mesh_size", 1)
        if replicas > 1 and "replicate" in (_get_registry(self.modules[0]) or {}):
            raise InputError(
                f"replicate averages gradients densely over the {replicas} ranks of its mesh; give"
                " it a mesh of one rank, and the ranks to sparcel: mesh ="
                ' init_device_mesh(device, (ranks, 1), mesh_dim_names=("replicate", "alone"));'
                f' replicate(module, mesh=mesh["alone"]); {_ATTACH}'
            )
        if replicas > 1:
            raise InputError(
                "fully_shard over a mesh of two dimensions averages gradients densely over its"
                f" {replicas} replicas; shard over the other dimension alone, and let sparcel"
                f" average: {SHARD}; {_ATTACH}"
            )
        for held in self.held:
            if held.shard.is_meta:
                raise InputError(
                    f"{held.name!r} is on the meta device; attach after"
                    " model.to_empty(device=...), and after its parameters were initialised or"
                    " loaded"
                )

    def check_ahead(self) -> None:
        """Raise `InputError` unless FSDP asks for the shards before it gathers them."""
        if self._inner._use_post_forward_mesh:
            raise InputError(
                "step-ahead needs parameters that are either whole or sharded, and"
                " reshard_after_forward gives a number of ranks that keep them; give True or False,"
                " or pass ahead=False to attach"
            )
        for held in self.held:
            if held.shard.device.type != held.inner.device.type:
                raise InputError(
                    "step-ahead does not reach parameters that CPUOffloadPolicy keeps on the host;"
                    " pass ahead=False to attach"
                )
            if hasattr(held.shard, "fsdp_pre_all_gather"):
                raise InputError(
                    f"{held.name!r} has an all-gather of its own (fsdp_pre_all_gather), as float8"
                    " has, which step-ahead would replace; pass ahead=False to attach"
                )


class Parameters(Mapping[str, DTensor]):
    """The parameters of groups by name, each as it is now: loading a state may replace it."""

    def __init__(self, held: Iterable[Held]) -> None:
        self._held = {one.name: one for one in held}

    def __getitem__(self, name: str) -> DTensor:
        return self._held[name].parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    """Return the group of each set of modules that FSDP was applied to, parameters sharded.

    Raises
    ------
    InputError
        When a hook cannot average their gradients over replicas.
    """
    modules: dict[int, FSDPModule] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            modules.setdefault(id(module._get_fsdp_state()), module)
    names = {id(one): model_name(name) for name, one in model.named_parameters()}
    groups: list[ParameterGroup] = []
    for one in modules.values():
        several = [ParameterGroup(one, inner, names) for inner in _inner_groups(one)]
        if len(several) > 1:
            raise InputError(
                "shard_placement_fn shards the parameters of one module over several meshes, for"
                " which FSDP has no hook; apply fully_shard to the parts of the module, each with"
                " its mesh"
            )
        groups += several
    if not any(group.held for group in groups):
        raise InputError("the model has no parameters to train that FSDP shards")
    for group in groups:
        group.check()
    if any(group._inner.gradient_divide_factor is not None for group in groups):
        warn_on_rank_0(
            "set_gradient_divide_factor(f) divides the sums over shards, and sparcel averages over"
            " the replicas; for the gradients that HSDP has, give f / replicas"
        )
    return groups


def initialize(model: Any) -> None:
    """Let FSDP do what it otherwise does in the first forward pass: it may replace shards."""
    model._get_fsdp_state()._lazy_init()


def was_interrupted(model: Any) -> bool:
    """Tell whether an exception ended the last backward pass; asked outside of a pass.

    FSDP would then not notice the end of the next one.
    """
    found: bool = model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued
    return found


def recover(model: Any) -> None:
    """Let FSDP begin its next pass as if the one that an exception has ended had never been."""
    state = model._get_fsdp_state()
    if not was_interrupted(model) and state._state_ctx.iter_forward_root is None:
        return
    if not hasattr(model, "reset_iter_state"):  # before torch 2.13
        raise InputError(
            "an exception ended the model's last pass, after which FSDP of torch"
            f" {torch.__version__} cannot go on; load a checkpoint into a new model"
        )
    model.reset_iter_state()
    for module in model.modules():
        for group in _inner_groups(module) if isinstance(module, FSDPModule) else ():
            for one in group.fsdp_params:  # which keep what was not reduced for the next pass
                one.unsharded_accumulated_grad = None
                if hasattr(one, "_unsharded_param"):
                    one._unsharded_param.grad = None


def call_after_backward(model: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Call whenever FSDP has ended a backward pass; return what undoes that.

    FSDP ends a pass in the outermost backward pass, where checkpoints run others inside of it. It
    reduces groups whose inputs need no gradient only then, and calls their hooks.
    """
    states = [one._get_fsdp_state() for one in model.modules() if isinstance(one, FSDPModule)]

    def undo() -> None:
        for state in states:
            state.__dict__.pop(_FINAL, None)

    for state in states:
        state.__dict__[_FINAL] = partial(_end_and_call, state, call)
    return undo


_FINAL = "_root_post_backward_final_callback"
"""What FSDP queues when a backward pass begins."""


def _end_and_call(state: Any, call: Callable[[], None]) -> None:
    getattr(type(state), _FINAL)(state)
    call()


def _inner_groups(module: FSDPModule) -> Iterator[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        yield from state._fsdp_param_groups
    elif state._fsdp_param_group is not None:  # before torch 2.13
        yield state._fsdp_param_group
