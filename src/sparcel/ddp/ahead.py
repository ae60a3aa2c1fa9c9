"""Step-ahead in a model's passes: a module that is called computes with moved values."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cache, partial
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from sparcel.errors import InputError
from sparcel.training import Ahead, Follower

_CALL = "_compiled_call_impl"
"""torch's attribute for the compiled call of a module, which runs instead of the module's own if it
is set. Copies and pickles of the module leave it out, and torch.compile does when it traces."""


class Slot(NamedTuple):
    """An entry of a module's table of parameters: the table, its key there, and its full name."""

    table: dict[str, Any]
    key: str
    name: str

    @property
    def value(self) -> object:
        """What stands there now; None if nothing does."""
        return self.table.get(self.key)


class Swap(NamedTuple):
    """Entries of tables, what they are inside of a call, and what they are outside."""

    tables: list[dict[str, Any]]
    keys: list[str]
    inside: list[Any]
    outside: list[Any]


class AheadCalls:
    """Lets a model compute with moved values in training, while its parameters stay as they are.

    A module that is called finds the moved values in the place of its parameters; when the call
    ends, whatever ends it, it has its parameters again. Autograd keeps what the backward pass
    needs, so nothing is swapped in a backward pass, except where a checkpoint calls a module again:
    that call gets the values of the forward pass. Optimisers are found at their first step.
    """

    def __init__(self, model: nn.Module, ahead: Ahead) -> None:
        self._model, self._ahead = weakref.ref(model), ahead
        self._values: dict[str, Tensor] = {}
        """The values in the place of parameters in the last forward pass, by name."""
        self.flag: dict[str, Any] = {"inside": False}
        """Whether a call is under way: an entry of a dict, so that it changes in the same C call as
        the parameters."""
        self._calls = list(self._calls_of(model))
        for call in self._calls:
            call.install()
        weakref.finalize(self, _remove, self._calls).atexit = False
        _keep_out_of_graphs()
        # ``Module.compile()`` may have replaced the model's call.
        self._follower = Follower(ahead, partial(_restore, self._calls))

    def _calls_of(self, model: nn.Module) -> Iterator[_Call]:
        """Yield a call for each module that holds some of the parameters, the model's first.

        Reading a parametrised weight calls its `ParametrizationList`, also outside of a pass. That
        one has no call of its own, but its entries are among the slots of the others.
        """
        names = {id(parameter): name for name, parameter in self._ahead.parameters.items()}
        own_slots = {
            id(module): [
                Slot(module._parameters, key, names[id(parameter)])
                for key, parameter in module._parameters.items()
                if id(parameter) in names
            ]
            for module in model.modules()
            if isinstance(module._parameters, dict)  # those of TorchScript cannot be swapped
        }
        for module in model.modules():
            slots = [slot for part in module.modules() for slot in own_slots.get(id(part), ())]
            if slots and not isinstance(module, ParametrizationList):
                yield _Call(self, module, slots, own_slots.get(id(module), ()))

    def follow(self, optimizer: Optimizer) -> None:
        """See `Follower.follow`."""
        self._follower.follow(optimizer)

    def end(self) -> None:
        """Let the modules compute with their parameters, from now on."""
        self._follower.end()
        _remove(self._calls)
        self._calls.clear()
        self._values.clear()

    def begin(self, slots: Sequence[Slot], own: Sequence[Slot]) -> Swap | None:
        """Return the swap of a call that begins now; None if it has nothing to swap.

        ``slots`` are those of the module that is called and of its parts, ``own`` its own.
        """
        if (
            not self._calls  # it has ended, and another one's call still leads here
            or not torch.is_grad_enabled()
            or torch.is_inference_mode_enabled()
            or torch.compiler.is_exporting()
            or torch._C._get_tracing_state()
        ):
            return None
        if self.flag["inside"]:
            # Autograd goes through what was made last first. Weights that all stood there from the
            # beginning would get their gradients at the end of the backward pass, all at once.
            return self._swap([slot for slot in own if hasattr(slot.value, "_stands_for")])
        model, parameters = self._model(), self._ahead.parameters
        if model is None or not model.training:
            return None
        trained = {slot.name: None for slot in slots if parameters[slot.name].requires_grad}
        if torch._C._current_graph_task_id() == -1:
            self._move(trained)
        # Others may stand there meanwhile, as in torch.func.functional_call, or after pruning.
        known = (slot for slot in slots if slot.name in trained and slot.name in self._values)
        swap = self._swap([slot for slot in known if slot.value is parameters[slot.name]])
        swap.tables.append(self.flag)
        swap.keys.append("inside")
        swap.inside.append(True)
        swap.outside.append(False)
        return swap

    def _move(self, names: Collection[str]) -> None:
        """Compute what these parameters are in the pass that begins now."""
        for name in names:
            self._values.pop(name, None)  # its memory may serve for the next
        for name, value in self._ahead.moved(names).items():
            self._values[name] = value.detach()

    def _swap(self, slots: Sequence[Slot]) -> Swap:
        return Swap(
            [slot.table for slot in slots],
            [slot.key for slot in slots],
            [self._stand_in(slot.name) for slot in slots],
            [slot.value for slot in slots],
        )

    def _stand_in(self, name: str) -> Tensor:
        """Return a tensor with the moved values whose gradient goes to the parameter.

        In the model's own code it passes for the parameter: it has the attributes that users gave
        that, isinstance says Parameter, and a deep copy is one of the parameter.
        """
        parameter = self._ahead.parameters[name]
        standing: Tensor = torch.ops.aten._unsafe_view(parameter, parameter.shape)
        standing.data = self._values[name]
        copied = partial(deepcopy, parameter)
        attributes = {"_is_param": True, "_stands_for": name, "__deepcopy__": copied}
        standing.__dict__.update(parameter.__dict__, **attributes)
        return standing


class _Call:
    """What runs when a module is called: its own call, between a swap and its undoing.

    Each of the two is one call of C code that allocates nothing, in which Python handles no signal.
    The second is the first thing that happens after the module's own call, so that nothing can
    come between. Copying or pickling a `_Call` gives None.
    """

    def __init__(
        self, calls: AheadCalls, module: nn.Module, slots: Sequence[Slot], own: Sequence[Slot]
    ) -> None:
        self._attached, self._module = weakref.ref(calls), weakref.ref(module)
        self._slots, self._own_slots = slots, own
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
        if calls is None or (calls.flag["inside"] and not self._own_slots):
            return own(*args, **kwargs)
        swap = _untraced(AheadCalls.begin)(calls, self._slots, self._own_slots)
        if swap is None:
            return own(*args, **kwargs)
        tables, keys, inside, outside = swap
        there, back = map(setitem, tables, keys, inside), map(setitem, tables, keys, outside)
        sink: deque[None] = deque(maxlen=0)
        try:
            sink.extend(there)
            result = own(*args, **kwargs)
            _untraced(_check_unchanged)(swap)
        finally:
            sink.extend(back)
        return result


def _check_unchanged(swap: Swap) -> None:
    """Raise `InputError` if a call changed a moved value, or put another one into its place."""
    for table, key, value in zip(swap.tables, swap.keys, swap.inside, strict=True):
        if isinstance(value, Tensor) and (value._version or table.get(key) is not value):
            name = value.__dict__["_stands_for"]
            raise InputError(
                f"the model's forward pass changes the parameter {name!r}, which"
                " step-ahead would lose; pass ahead=False to attach, or change it after the pass"
            )


def _remove(calls: Iterable[_Call]) -> None:
    for call in calls:
        call.remove()


def _restore(calls: Sequence[_Call]) -> None:
    """Take the model's own call again."""
    for call in calls[:1]:
        call.restore()


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
