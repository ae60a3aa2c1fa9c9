"""Step-ahead in a model's passes: a module that is called computes with moved values."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from sparcel.core.ddp.swap import Slot, Swap, hidden, stand_in, swap_of
from sparcel.core.device import read
from sparcel.core.training import Ahead, Follower
from sparcel.errors import InputError, warn_on_rank_0

_CALL = "_compiled_call_impl"
"""torch's attribute for the compiled call of a module, which runs instead of the module's own if it
is set. Copies and pickles of the module leave it out, and torch.compile does when it traces."""

_SAME_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of so many bytes."""

_Place = tuple[dict[str, Any], str, str]
"""Where a module has a tensor: a dict, the key there, and the parameter's name."""


class AheadCalls(Follower):
    """Lets a model compute with moved values in training, while its parameters stay as they are.

    A module that is called finds the moved values as attributes of its parts, where Python looks
    before torch looks into the table of parameters; when the call ends, whatever ends it, they are
    gone. The tables stay as they are, so ``parameters()``, ``state_dict()`` and ``zero_grad()``
    mean the parameters in a call, too. Autograd keeps what the backward pass needs, so nothing is
    moved there, except where a checkpoint calls a module again: that call gets the values of the
    forward pass.
    """

    def __init__(self, model: nn.Module, ahead: Ahead) -> None:
        self._model = weakref.ref(model)
        self._values: dict[str, Tensor] = {}
        """The values in the place of parameters in the last forward pass, by name."""
        self._flag: dict[str, Any] = {}
        """Has an entry while a call is under way. Being one of a dict, it comes and goes in the
        same C call as the moved values."""
        self._swap: Swap | None = None
        """That of the call under way, or of the last one."""
        self._guard = _Guard(ahead)
        self._calls: list[_ModuleCall] = []
        super().__init__(ahead, self._before_step)
        self._calls += self._calls_of(model)
        for call in self._calls:
            call.install()
        weakref.finalize(self, _remove, self._calls).atexit = False
        _keep_out_of_graphs()

    def _calls_of(self, model: nn.Module) -> Iterator[_ModuleCall]:
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
                yield _ModuleCall(self, module, slots)

    def end(self) -> None:
        """Let the modules compute with their parameters, from now on."""
        super().end()
        _remove(self._calls)
        self._calls.clear()
        self._values.clear()
        self._guard.end()
        self._swap = None

    def _before_step(self, optimizer: Optimizer) -> None:
        """End if parameters are about to change in a call, the rest of which would not see that.

        Between calls, take the model's call again if ``Module.compile()`` has replaced it.
        """
        for call in self._calls[:1]:
            call.restore()
        swap = self._swap if self._flag else None
        if swap is None or swap.is_empty or not self._ahead.moves_by(optimizer):
            return
        deque(swap.take(), maxlen=0)
        self.end()
        warn_on_rank_0(
            f"{type(optimizer).__name__} does a step while the model is called, as manual"
            " optimisation does in Lightning; training goes on without step-ahead, which costs"
            " accuracy at low densities; ahead=False does without it from the start"
        )

    @property
    def has_ended(self) -> bool:
        """Whether the modules compute with their parameters, from now on."""
        return not self._calls

    def begin(self, slots: Sequence[Slot]) -> Swap | None:
        """Return the swap of a call that begins now; None if it has nothing to swap.

        ``slots`` are those of the module that is called and of its parts.
        """
        if self._flag:
            return hidden(slots)
        model = self._model()
        if (
            self.has_ended  # and another one's call still leads here
            or model is None
            or not model.training
            or not torch.is_grad_enabled()
            or torch.is_inference_mode_enabled()
            or torch.compiler.is_exporting()
            or torch._C._get_tracing_state()
        ):
            return None
        self._swap = None  # its memory may serve for the next
        if torch._C._current_graph_task_id() == -1:
            self._move({slot.name: None for slot in slots if slot.parameter.requires_grad})
        # Others may stand there meanwhile, as in torch.func.functional_call, or after pruning.
        slots = [
            slot
            for slot in slots
            if slot.name in self._values and slot.may_move and slot.key not in slot.attributes
        ]
        parameters = {slot.name: slot.parameter for slot in slots}  # one may be in several places
        standing = {name: stand_in(one, self._values[name]) for name, one in parameters.items()}
        self._swap = swap_of(slots, standing, self._flag)
        self._guard.begin(model, slots, standing)
        return self._swap

    def check(self, swap: Swap) -> None:
        """Raise `InputError` if the call that ends has written what it may not."""
        if self._swap is swap:  # else it was a call inside of that one, or step-ahead has ended
            self._guard.check()

    def _move(self, names: Collection[str]) -> None:
        """Compute what these parameters are in the pass that begins now."""
        for name in names:
            self._values.pop(name, None)
        self._values.update(self._ahead.values(names))


class _ModuleCall:
    """What runs when a module is called: its own call, between a swap and its undoing.

    Each of the two is one call of C code that allocates nothing, in which Python handles no signal.
    The second is the first thing that happens after the module's own call, so that nothing can
    come between. Copying or pickling a `_ModuleCall` gives None.
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
        while isinstance(own, _ModuleCall) and own._attached() is None:
            own = own._own  # of a handle that is gone
        self._own = own
        module.__dict__[_CALL] = self

    def restore(self) -> None:
        """Run again if something else than a `_ModuleCall` has taken the place."""
        module = self._module()
        if module is not None and not isinstance(module.__dict__.get(_CALL), _ModuleCall):
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
            if swap.hides and calls is not None and calls.has_ended:
                sink.extend(swap.take())  # an optimiser's step in this call took all others
        return result


def _remove(calls: Iterable[_ModuleCall]) -> None:
    for call in calls:
        call.remove()


@cache
def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile leaves alone, with all that it calls."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


@cache
def _keep_out_of_graphs() -> None:
    """Let torch.compile skip the frame of a `_ModuleCall`, and not what the frame calls.

    This imports the compiler, which DDP has imported already.
    """
    from torch._dynamo.decorators import skip

    skip(_ModuleCall.__call__)


class _Guard:
    """Looks at parameters before and after a call: at those that move, and frozen ones like them.

    Writes by ``.data`` show in the values alone, which are looked at in passes 1, 2, 4, 8 and so
    on: whoever does so mostly does in every pass.
    """

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._frozen: list[_Place] = []
        self._watched: list[tuple[_Place, Tensor, tuple[int, ...]]] = []
        """Places, each with its tensor and the state of that before the call."""
        self._passes = 0

    @property
    def _thoroughly(self) -> bool:
        return self._passes.bit_count() == 1

    def begin(self, model: nn.Module, slots: Iterable[Slot], standing: dict[str, Tensor]) -> None:
        """Remember what the call that begins must not write: also what stands in for parameters."""
        self._passes += 1
        if self._thoroughly:  # some models make their momentum encoder in the first pass
            self._frozen = list(_frozen(model, self._ahead))
        places = [
            *((slot.table, slot.key, slot.name) for slot in slots),
            *((standing, name, name) for name in standing),
            *self._frozen,
        ]
        here = ((place, place[0].get(place[1])) for place in places)
        self._watched = [
            (place, tensor, _state(tensor, self._thoroughly))
            for place, tensor in here
            if tensor is not None
        ]

    def check(self) -> None:
        """Raise `InputError` if the call has written them, or put others in their places."""
        for (table, key, name), tensor, before in self._watched:
            if table.get(key) is not tensor or _state(tensor, self._thoroughly) != before:
                raise InputError(
                    f"{name!r} is written while the model is called, and step-ahead gives the"
                    " model other values than its parameters there; pass ahead=False to attach, or"
                    " write the parameter after the call"
                )
        self._watched.clear()

    def end(self) -> None:
        """Let go of all."""
        self._watched.clear()
        self._frozen.clear()


def _frozen(model: nn.Module, ahead: Ahead) -> Iterator[_Place]:
    """Yield parameters that may be averages of those that move, as a momentum encoder has them."""
    shapes = {parameter.shape for parameter in ahead.parameters.values()}
    own = {id(parameter) for parameter in ahead.parameters.values()}
    for path, module in model.named_modules():
        table = module._parameters
        for key, parameter in table.items() if isinstance(table, dict) else ():
            if parameter is None or parameter.requires_grad or id(parameter) in own:
                continue
            if parameter.shape in shapes and _is_plain(parameter):
                yield table, key, f"{path}.{key}" if path else key


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor has memory of its own that can be looked at, and counts writes."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.itemsize in _SAME_BITS
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_inference())
    )


def _state(tensor: Tensor, thoroughly: bool) -> tuple[int, ...]:
    """Return what tells whether a tensor was written; ``thoroughly``, also by ``.data``."""
    state = tensor.data_ptr(), tensor._version
    if not thoroughly or not tensor.numel():
        return state
    bits = tensor.detach().view(_SAME_BITS[tensor.itemsize])
    return *state, int(read(bits.sum(dtype=torch.int64)))
