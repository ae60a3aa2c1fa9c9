"""Step-ahead in a model's passes: a module that is called computes with moved values."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from itertools import repeat
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from sparcel.ddp.written import Guard, Place
from sparcel.errors import InputError, warn
from sparcel.training import Ahead, Follower

_CALL = "_compiled_call_impl"
"""torch's attribute for the compiled call of a module, which runs instead of the module's own if it
is set. Copies and pickles of the module leave it out, and torch.compile does when it traces."""
_INSIDE = "inside"
_REDUCE = "__reduce_ex__"
"""What copies and pickles of an object are made of."""
_AT_ONCE = 2**64 - 1
"""The sequence number of the nodes by which autograd accumulates gradients."""


class Slot(NamedTuple):
    """A parameter's place: a module and its attributes, the key there, and the full name."""

    module: weakref.ref[nn.Module]
    attributes: dict[str, Any]
    key: str
    name: str
    parameter: Tensor

    @property
    def table(self) -> dict[str, Any]:
        """The module's table of parameters."""
        found: dict[str, Any] = self.attributes["_parameters"]
        return found

    @property
    def may_move(self) -> bool:
        """Whether the parameter is trained now, and nothing else stands in its place."""
        return self.parameter.requires_grad and self.table.get(self.key) is self.parameter


class Swap(NamedTuple):
    """Attributes that modules have inside of a call alone: their dicts, keys there, and values.

    If it ``hides``, modules lack them inside of a call alone.
    """

    attributes: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]
    hides: bool = False

    def put(self) -> Iterator[Any]:
        """Return an iterator that gives the modules these attributes, in C code alone."""
        return map(setitem, self.attributes, self.keys, self.values)

    def take(self) -> Iterator[Any]:
        """Return an iterator that takes them away, in C code alone."""
        return map(dict.pop, self.attributes, self.keys, repeat(None))


class AheadCalls:
    """Lets a model compute with moved values in training, while its parameters stay as they are.

    A module that is called finds the moved values as attributes of its parts, where Python looks
    before torch looks into the table of parameters; when the call ends, whatever ends it, they are
    gone. The tables stay as they are, so ``parameters()``, ``state_dict()`` and ``zero_grad()``
    mean the parameters in a call, too. Autograd keeps what the backward pass needs, so nothing is
    moved there, except where a checkpoint calls a module again: that call gets the values of the
    forward pass. Optimisers are found at their first step.
    """

    def __init__(self, model: nn.Module, ahead: Ahead) -> None:
        self._model, self._ahead = weakref.ref(model), ahead
        self._values: dict[str, Tensor] = {}
        """The values in the place of parameters in the last forward pass, by name."""
        self._flag: dict[str, Any] = {}
        """Has an entry while a call is under way. Being one of a dict, it comes and goes in the
        same C call as the moved values."""
        self._swap: Swap | None = None
        """That of the call under way, or of the last one."""
        self._guard = Guard(ahead)
        self._calls = list(self._calls_of(model))
        for call in self._calls:
            call.install()
        weakref.finalize(self, _remove, self._calls).atexit = False
        _keep_out_of_graphs()
        self._follower = Follower(ahead, self._before_step)

    def _calls_of(self, model: nn.Module) -> Iterator[_Call]:
        """Yield a call for each module that holds some of the parameters, the model's first.

        Reading a parametrised weight calls its `ParametrizationList`, also outside of a pass. That
        one has no call of its own, but its entries are among the slots of the others.
        """
        names = {id(parameter): name for name, parameter in self._ahead.parameters.items()}
        own_slots = {
            id(module): [
                Slot(weakref.ref(module), module.__dict__, key, names[id(parameter)], parameter)
                for key, parameter in module._parameters.items()
                if parameter is not None and id(parameter) in names
            ]
            for module in model.modules()
            if isinstance(module._parameters, dict)  # those of TorchScript cannot be swapped
        }
        for module in model.modules():
            slots = [slot for part in module.modules() for slot in own_slots.get(id(part), ())]
            if slots and not isinstance(module, ParametrizationList):
                yield _Call(self, module, slots)

    def follow(self, optimizer: Optimizer) -> None:
        """See `Follower.follow`."""
        self._follower.follow(optimizer)

    def end(self) -> None:
        """Let the modules compute with their parameters, from now on."""
        self._follower.end()
        _remove(self._calls)
        self._calls.clear()
        self._values.clear()
        self._guard.end()
        self._swap = None

    def _before_step(self, optimizer: Optimizer) -> None:
        """End if parameters are about to change in a call, the rest of which would not see that."""
        for call in self._calls[:1]:
            call.restore()  # ``Module.compile()`` may have replaced the model's call
        swap = self._swap if self._flag else None
        if swap is None or len(swap.keys) == 1 or not self._ahead.moves_by(optimizer):
            return
        deque(swap.take(), maxlen=0)
        self.end()
        warn(
            f"{type(optimizer).__name__} does a step while the model is called, as manual"
            " optimisation does in Lightning; training goes on without step-ahead, which costs"
            " accuracy at low densities; ahead=False does without it from the start"
        )

    def begin(self, slots: Sequence[Slot]) -> Swap | None:
        """Return the swap of a call that begins now; None if it has nothing to swap.

        ``slots`` are those of the module that is called and of its parts.
        """
        if self._flag:
            return _hidden(slots)
        model = self._model()
        if (
            not self._calls  # it has ended, and another one's call still leads here
            or model is None
            or not model.training
            or not torch.is_grad_enabled()
            or torch.is_inference_mode_enabled()
            or torch.compiler.is_exporting()
            or torch._C._get_tracing_state()
        ):
            return None
        self._swap = None  # its memory may serve for the next
        self._guard.forget()
        if torch._C._current_graph_task_id() == -1:
            self._move({slot.name: None for slot in slots if slot.parameter.requires_grad})
        # Others may stand there meanwhile, as in torch.func.functional_call, or after pruning.
        slots = [
            slot
            for slot in slots
            if slot.name in self._values and slot.may_move and slot.key not in slot.attributes
        ]
        parameters = {slot.name: slot.parameter for slot in slots}  # one may be in several places
        standing = {name: _stand_in(one, self._values[name]) for name, one in parameters.items()}
        self._swap = _swap_of(slots, standing, self._flag)
        self._guard.begin(model, _in_place(slots, standing))
        return self._swap

    def check(self, swap: Swap) -> None:
        """Raise `InputError` if the call that ends has written what it may not."""
        if self._swap is swap:  # else it was a call inside of that one, or step-ahead has ended
            self._guard.check()

    def _move(self, names: Collection[str]) -> None:
        """Compute what these parameters are in the pass that begins now."""
        for name in names:
            self._values.pop(name, None)
        for name, value in self._ahead.moved(names).items():
            self._values[name] = value.detach()


class _Call:
    """What runs when a module is called: its own call, between a swap and its undoing.

    Each of the two is one call of C code that allocates nothing, in which Python handles no signal.
    The second is the first thing that happens after the module's own call, so that nothing can
    come between. Copying or pickling a `_Call` gives None.
    """

    def __init__(self, calls: AheadCalls, module: nn.Module, slots: Sequence[Slot]) -> None:
        self._attached, self._module = weakref.ref(calls), weakref.ref(module)
        self._slots = slots
        self._own: Callable[..., Any] | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def install(self) -> None:
        """Run from now on when the module is called."""
        module = self._module()
        if module is None:
            return
        own = module.__dict__.get(_CALL)
        while isinstance(own, _Call) and own._attached() is None:
            own = own._own  # of a handle that is gone
        self._own = own
        module.__dict__[_CALL] = self

    def restore(self) -> None:
        """Run again if something else than a `_Call` has taken the place."""
        module = self._module()
        if module is not None and not isinstance(module.__dict__.get(_CALL), _Call):
            self.install()

    def remove(self) -> None:
        """Let the module's own call run again."""
        module = self._module()
        if module is not None and module.__dict__.get(_CALL) is self:
            module.__dict__[_CALL] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls, module = self._attached(), self._module()
        if module is None:
            raise InputError(
                "this module has the attributes of another one, which was attached and is gone;"
                " close() the handle before a module takes over another one's __dict__"
            )
        own = self._own or module._call_impl
        swap = None if calls is None else _untraced(AheadCalls.begin)(calls, self._slots)
        if swap is None:
            return own(*args, **kwargs)
        there, back = (swap.take(), swap.put()) if swap.hides else (swap.put(), swap.take())
        sink: deque[None] = deque(maxlen=0)
        try:
            sink.extend(there)
            result = own(*args, **kwargs)
            _untraced(AheadCalls.check)(calls, swap)
        finally:
            sink.extend(back)
        return result


def _swap_of(slots: Sequence[Slot], standing: Mapping[str, Tensor], flag: dict[str, Any]) -> Swap:
    """Return what puts tensors into slots, by name, and marks that a call is under way."""
    modules = {id(slot.attributes): slot for slot in slots}.values()
    return Swap(
        [*(slot.attributes for slot in (*slots, *modules)), flag],
        [*(slot.key for slot in slots), *repeat(_REDUCE, len(modules)), _INSIDE],
        [
            *(standing[slot.name] for slot in slots),
            *(partial(_reduce, slot.module) for slot in modules),
            True,
        ],
    )


def _in_place(slots: Iterable[Slot], standing: dict[str, Tensor]) -> Iterator[tuple[Place, Tensor]]:
    """Yield all that a call is to leave: the parameters, and what stands in for them."""
    for slot in slots:
        yield Place(slot.table, slot.key, slot.name), slot.parameter
    for name, tensor in standing.items():
        yield Place(standing, name, name), tensor


def _stand_in(parameter: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with these values whose gradient goes to the parameter.

    In the model's own code it passes for the parameter: it has the attributes that users gave that,
    isinstance says Parameter, a deep copy is one of the parameter, which hooks and freezing reach.
    """
    standing: Any = torch.ops.aten._unsafe_view(parameter, parameter.shape)
    # Autograd goes through what was made last first. These were made before all of the pass,
    # and DDP is to get each gradient when it is complete.
    standing.grad_fn._set_sequence_nr(_AT_ONCE)
    standing.data = values
    standing.__dict__.update(
        parameter.__dict__,
        _is_param=True,
        __deepcopy__=partial(deepcopy, parameter),
        register_hook=parameter.register_hook,
        requires_grad_=parameter.requires_grad_,
    )
    found: Tensor = standing
    return found


def _reduce(module: weakref.ref[nn.Module], protocol: int) -> Any:
    """Return what a copy or a pickle of a module is made of: of what it has outside of a call."""
    found = module()
    assert found is not None
    inside = {
        key: found.__dict__.pop(key)
        for key in (*found._parameters, _REDUCE)
        if key in found.__dict__
    }
    try:
        return found.__reduce_ex__(protocol)
    finally:
        found.__dict__.update(inside)


def _hidden(slots: Iterable[Slot]) -> Swap | None:
    """Return what hides moved values where the call that is under way put something else.

    So it may have frozen a parameter: the gradient of a GAN's generator is not to reach the
    discriminator.
    """
    found = [slot for slot in slots if slot.key in slot.attributes and not slot.may_move]
    if not found:
        return None
    return Swap(
        [slot.attributes for slot in found],
        [slot.key for slot in found],
        [slot.attributes[slot.key] for slot in found],
        hides=True,
    )


def _remove(calls: Iterable[_Call]) -> None:
    for call in calls:
        call.remove()


@cache
def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile leaves alone, with all that it calls."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


@cache
def _keep_out_of_graphs() -> None:
    """Let torch.compile skip the frame of a `_Call`, and not what the frame calls.

    This imports the compiler, which DDP has imported already.
    """
    from torch._dynamo.decorators import skip

    skip(_Call.__call__)
