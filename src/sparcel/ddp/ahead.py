"""Step-ahead in a model's passes: its modules compute with moved values, and never keep them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparcel.errors import InputError
from sparcel.training.ahead import Ahead

_CALL = "_compiled_call_impl"
"""Where torch keeps what runs when a module is called, if it is not the module's own method. Copies
and pickles of the module leave this out, and so does torch.compile where it traces the module."""


class Slot(NamedTuple):
    """An entry of a module's table of parameters: the table, its key there, and its full name."""

    table: dict[str, Any]
    key: str
    name: str


class Swap(NamedTuple):
    """Entries of tables, what they are inside of a call, and what they are outside."""

    tables: list[dict[str, Any]]
    keys: list[str]
    inside: list[Any]
    outside: list[Any]


class AheadCalls:
    """Lets a model compute with moved values in training, while its parameters stay as they are.

    A module that is called finds the moved values in the place of its parameters, and its
    parameters are back as soon as the call ends, whatever ends it. Autograd keeps what the backward
    pass needs, so nothing is swapped in a backward pass, except where a checkpoint calls a module
    again: that call gets the values of the forward pass. Optimisers are found at their first step,
    before which there is no memory.
    """

    def __init__(self, model: nn.Module, ahead: Ahead) -> None:
        self._model, self._ahead = weakref.ref(model), ahead
        self._groups: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many groups the optimisers have that are followed."""
        self._values: dict[str, Tensor] = {}
        """What the parameters were in the last forward pass, by name."""
        self.state: dict[str, Any] = {"inside": False}
        """Whether a call is under way. This is an entry of a table, like those of modules, because
        all of them change together."""
        self._calls = list(self._made(model))
        for call in self._calls:
            call.install()
        weakref.finalize(self, _remove, self._calls).atexit = False
        _keep_out_of_graphs()
        _watch_optimizers()
        _ATTACHED.add(self)

    def _made(self, model: nn.Module) -> Iterator[_Call]:
        """Yield a call for each module that holds some of the parameters, the model's first."""
        names = {id(parameter): name for name, parameter in self._ahead.parameters.items()}
        own = {
            id(module): [
                Slot(module._parameters, key, names[id(parameter)])
                for key, parameter in module._parameters.items()
                if id(parameter) in names
            ]
            for module in model.modules()
            if isinstance(module._parameters, dict)  # those of TorchScript cannot be swapped
        }
        for module in model.modules():
            slots = [slot for part in module.modules() for slot in own.get(id(part), ())]
            if slots:
                yield _Call(self, module, slots)

    def follow(self, optimizer: Optimizer) -> None:
        """Move the parameters of this optimiser by its rule, as those that have done a step."""
        self._groups[optimizer] = len(optimizer.param_groups)
        self._ahead.follow(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Follow an optimiser that is new or has new groups."""
        if self._groups.get(optimizer) != len(optimizer.param_groups):
            self.follow(optimizer)

    def end(self) -> None:
        """Let the modules compute with their parameters, from now on."""
        _remove(self._calls)
        self._values.clear()

    def begin(self, slots: Sequence[Slot]) -> Swap | None:
        """Return the swap of a call that begins now; None if it computes with the parameters."""
        if not torch.is_grad_enabled() or torch._C._get_tracing_state():
            return None
        if torch._C._current_graph_task_id() == -1:
            self._move({slot.name for slot in slots})
        parameters = self._ahead.parameters
        taken = [
            slot
            for slot in slots
            # Others may stand there meanwhile, as in torch.func.functional_call, or after pruning.
            if slot.name in self._values and slot.table.get(slot.key) is parameters[slot.name]
        ]
        return Swap(
            [*(slot.table for slot in taken), self.state],
            [*(slot.key for slot in taken), "inside"],
            [*(self._values[slot.name] for slot in taken), True],
            [*(parameters[slot.name] for slot in taken), False],
        )

    def check(self) -> None:
        """Raise `InputError` if a call changed a moved value in place, because that is lost."""
        for name, value in self._values.items():
            if value._version:
                raise InputError(
                    f"the model's forward pass changes the parameter {name!r} in place, which"
                    " step-ahead would lose; pass ahead=False to attach, or change it after the"
                    " pass"
                )

    def _move(self, names: Collection[str]) -> None:
        """Compute what these parameters are in the pass that begins now."""
        for name in names:
            self._values.pop(name, None)  # its memory may serve for the next
        model, parameters = self._model(), self._ahead.parameters
        if model is None or not model.training:
            return
        for name, value in self._ahead.moved(
            [name for name in names if parameters[name].requires_grad]
        ).items():
            value._is_param = True  # a Parameter, for isinstance
            self._values[name] = value


class _Call:
    """What runs when a module is called: its own call, between a swap and its undoing.

    Each of the two is one call of C code, in which Python handles no signal. The second is the
    first thing that happens after the module's own call, so no exception can come between. A copy
    of this, or what is left of its pickle, is None.
    """

    def __init__(self, calls: AheadCalls, module: nn.Module, slots: Sequence[Slot]) -> None:
        self._calls, self._module = weakref.ref(calls), weakref.ref(module)
        self._slots = slots
        self._own: Callable[..., Any] | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def install(self) -> None:
        """Run from now on when the module is called."""
        module = self._module()
        if module is not None:
            self._own = module.__dict__.get(_CALL)
            module.__dict__[_CALL] = self

    def remove(self) -> None:
        """Let the module's own call run again."""
        module = self._module()
        if module is not None and module.__dict__.get(_CALL) is self:
            module.__dict__[_CALL] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls, module = self._calls(), self._module()
        assert module is not None, "it is being called"
        own = self._own or module._call_impl
        nested = calls is None or calls.state["inside"]
        swap = None if nested else _untraced(AheadCalls.begin)(calls, self._slots)
        if calls is None or swap is None:
            return own(*args, **kwargs)
        tables, keys, inside, outside = swap
        there, back = map(setitem, tables, keys, inside), map(setitem, tables, keys, outside)
        try:
            deque(there, maxlen=0)
            result = own(*args, **kwargs)
        finally:
            deque(back, maxlen=0)
        _untraced(AheadCalls.check)(calls)
        return result


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


_ATTACHED: weakref.WeakSet[AheadCalls] = weakref.WeakSet()
"""All that may want to know of an optimiser's step."""


@cache
def _watch_optimizers() -> None:
    """Tell all `AheadCalls` of the steps of all optimisers, by one hook that stays."""

    def before_any_step(optimizer: Optimizer, *_: object) -> None:
        for calls in tuple(_ATTACHED):
            calls.before_step(optimizer)

    register_optimizer_step_pre_hook(before_any_step)


def as_in_buckets(memory: Tensor, parameter: Tensor) -> Tensor:
    """Arrange memory that lies as DDP lays gradients: in the parameter's own order of memory."""
    if _is_dense(parameter):
        return memory.as_strided(parameter.shape, parameter.stride())
    return memory.view(parameter.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements fill a range of memory, in whatever order."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    expected = 1
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride != expected:
            return False
        expected *= size
    return True
