"""Parameters never move: whatever comes in a pass or ends it, a module holds its own weights."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from tests.ddp.ahead import (
    LINEAR,
    OPTIMIZERS,
    Checkpointed,
    Named,
    are,
    attached,
    convolution,
    data_of,
    looked_into,
    loss_of,
    now,
    pass_by,
)
from tests.ddp.models import MANY_BUCKETS
from tests.evenly import attach_evenly
from tests.strategies import same_bits

pytestmark = pytest.mark.processes


def at_home(module: nn.Module, home: Named) -> bool:
    """Tell whether a module holds its own parameters, with these values."""
    parts = [one for part in module.modules() for one in part._parameters.values()]
    return all(type(one) is nn.Parameter and one.is_leaf for one in parts) and are(module, home)


def copies_of(module: nn.Module) -> Iterator[nn.Module]:
    yield copy.deepcopy(module)
    yield AveragedModel(module).module
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    yield torch.load(saved, weights_only=False)


def fail(*_: object) -> None:
    raise LookupError


def fails_forward(ddp: DistributedDataParallel, data: Tensor) -> None:
    hook = ddp.module[-1].register_forward_pre_hook(fail)
    with suppress(LookupError):
        ddp(data)
    hook.remove()


def fails_backward(ddp: DistributedDataParallel, data: Tensor) -> None:
    output = ddp(data)
    output.register_hook(fail)
    with suppress(LookupError):
        output.sum().backward()


def fails_in_a_checkpoint(ddp: DistributedDataParallel, data: Tensor) -> None:
    output = ddp(data)
    hook = ddp.module[0].register_forward_hook(fail)
    with suppress(LookupError):
        output.sum().backward()
    hook.remove()


def freezes_in_between(ddp: DistributedDataParallel, data: Tensor) -> None:
    output = ddp(data)
    ddp.requires_grad_(False)
    ddp(data)
    ddp.requires_grad_(True)
    output.sum().backward()


def without_synchronising(ddp: DistributedDataParallel, data: Tensor) -> None:
    with ddp.no_sync():
        ddp(data).sum().backward()


ENDS: dict[str, Callable[[DistributedDataParallel, Tensor], Any]] = {
    "a forward pass alone": lambda ddp, data: ddp(data),
    "a whole pass": lambda ddp, data: ddp(data).sum().backward(),
    "a pass that is not synchronised": without_synchronising,
    "a pass of a frozen model": freezes_in_between,
    "an exception in the forward pass": fails_forward,
    "an exception in the backward pass": fails_backward,
    "an exception in a checkpoint": fails_in_a_checkpoint,
}


def ended(comm: Communicator, how: str) -> None:
    ddp, handle, _ = attached(comm, OPTIMIZERS["SGD"], model=lambda: Checkpointed(False), steps=2)
    module, home = ddp.module, now(ddp.module)
    ENDS[how](ddp, data_of(comm.rank, 7, module))
    assert at_home(module, home)
    for one in copies_of(module):
        assert at_home(one, home)
        output, found = looked_into(one, data_of(comm.rank, 8, module))  # lives on its own
        output.sum().backward()
        assert are(one, found)
    assert all(at_home(one.module, home) for one in copies_of(ddp))
    states = copy.deepcopy({"": module.state_dict(), "0.": module[0].state_dict()})
    assert all(same_bits(one, home[at + name]) for at in states for name, one in states[at].items())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.01, 0.01)
    assert at_home(module, {name: one.clamp(-0.01, 0.01) for name, one in home.items()})
    module[0].load_state_dict(states["0."])
    assert same_bits(module[0].weight, home["0.weight"])
    handle.close()
    assert same_bits(module[0].weight, home["0.weight"])


def each_end(comm: Communicator) -> None:
    for how in ENDS:
        ended(comm, how)


def test_a_module_holds_its_own_weights_however_a_call_ends(run_on: Any) -> None:
    run_on(2, each_end)


def dropped(comm: Communicator) -> tuple[bool, bool, bool]:
    """Return whether a forward pass alone leaves anything once DDP and its handle are gone."""
    ddp, handle, optimizer = attached(comm, OPTIMIZERS["SGD"], steps=2)
    module, home, watched = ddp.module, now(ddp.module), weakref.ref(handle)
    data = data_of(comm.rank, 7, module)
    output = ddp(data)
    del ddp, handle
    gc.collect()
    left = [part for part in module.modules() if part.__dict__.get("_compiled_call_impl")]
    optimizer.zero_grad()
    optimizer.step()  # without gradients it changes nothing
    ahead = not are(module, looked_into(module, data)[1])
    return watched() is None and output is not None, at_home(module, home), bool(left) or ahead


def test_a_module_that_outlives_its_training_has_nothing_of_it(run_on: Any) -> None:
    assert run_on(2, dropped) == [(True, True, False)] * 2


def attached_twice(comm: Communicator) -> list[bool]:
    """Return whether a model is ahead by the second of two handles, and by none after both."""
    first, old, old_optimizer = attached(comm, OPTIMIZERS["SGD"], steps=2)
    module, data = first.module, data_of(comm.rank, 7, first.module)
    second, new, optimizer = attached(comm, OPTIMIZERS["SGD"], model=lambda: module, steps=2)
    old_optimizer.step()
    seen = [not are(module, looked_into(second, data)[1])]
    for handle in (old, new):
        handle.close()
    optimizer.step()
    seen.append(not are(module, looked_into(second, data)[1]))
    return seen


def test_a_module_may_be_attached_anew_before_the_old_handle_is_closed(run_on: Any) -> None:
    assert run_on(2, attached_twice) == [[True, False]] * 2


def same_gradients(comm: Communicator, what: str) -> None:
    """Check that gradients are those of the forward pass, whatever comes before they are computed.

    Those of a convolution are computed from the weights that it finds then.
    """
    ddp, handle, optimizer = attached(comm, OPTIMIZERS["SGD"], model=convolution, steps=2)
    data, gradients = data_of(comm.rank, 7, ddp.module), []
    optimizer.zero_grad()
    for between in (False, True):
        with ddp.no_sync():
            output = ddp(data)
            if what == "state_dict" and between:
                ddp.state_dict()
            if what == "evaluation" and between:
                with torch.no_grad():
                    ddp.eval()(data)
                ddp.train()
            loss_of(output, data).backward(retain_graph=True)
            if what == "second backward" and between:
                optimizer.zero_grad()
                loss_of(output, data).backward()
        gradients.append({name: one.grad.clone() for name, one in ddp.module.named_parameters()})
        optimizer.zero_grad()
    handle.close()
    assert all(same_bits(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("what", ["state_dict", "evaluation", "second backward"])
def test_gradients_of_a_convolution_do_not_depend_on(run_on: Any, what: str) -> None:
    run_on(1, same_gradients, what)


class Interruption(BaseException):
    """What the handler of a signal raises, as Python's own raises KeyboardInterrupt."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise in this thread, wherever it is by then."""

    def interrupt(*_: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt_passes(comm: Communicator) -> int:
    """Interrupt forward passes at many moments, and return how many ended early."""
    ddp, handle, _ = attached(comm, OPTIMIZERS["SGD"], steps=2)
    module, home, ended = ddp.module, now(ddp.module), 0
    data = data_of(comm.rank, 7, module)
    for moment in range(400):
        try:
            with interrupted_after(1e-6 * (1 + moment)):
                module(data)
        except Interruption:
            ended += 1
        assert at_home(module, home)
    assert not are(module, looked_into(module, data)[1])  # as before
    handle.close()
    return ended


def test_a_signal_at_any_moment_leaves_the_weights(run_on: Any) -> None:
    assert all(ended > 20 for ended in run_on(2, interrupt_passes))


def replaced(comm: Communicator) -> None:
    ddp, handle, _ = attached(comm, OPTIMIZERS["SGD"], steps=2)
    module, data = ddp.module, data_of(comm.rank, 7, ddp.module)
    ddp(data)
    best = {name: 2 * one for name, one in now(module).items()}
    module.load_state_dict(best)
    assert are(module, best)
    # Whoever puts other tensors in the place of parameters gets what these give.
    zeros = {name: torch.zeros_like(one) for name, one in best.items()}
    assert not torch.func.functional_call(module, zeros, (data,)).any()
    assert {name for name, one in looked_into(module, data)[1].items() if name in LINEAR} == LINEAR
    prune.l1_unstructured(module[0], "weight", 0.5)
    module(data)
    assert sorted(module[0]._parameters) == ["bias", "weight_orig"]
    assert module[0].weight_orig is dict(module.named_parameters())["0.weight_orig"]
    handle.close()


def test_weights_that_are_replaced_stay(run_on: Any) -> None:
    run_on(2, replaced)


class Changing(nn.Sequential):
    """A model that writes weights when it is called, and has a momentum encoder."""

    def __init__(self, write: Callable[[Changing], object]) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(30, 60), nn.Flatten(), nn.Linear(240, 10))
        self.slow = nn.Linear(30, 60).requires_grad_(False)
        self.kept, self.write = [self[0].weight], write

    def forward(self, data: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self)
        return self[2](self[1](self[0](data)))


def with_data_replaced(model: Changing) -> None:
    model.slow.weight.data = model.slow.weight.data * 0.9 + model[0].weight.data * 0.1


WRITES: dict[str, Callable[[Changing], object]] = {
    "in place": lambda model: model[0].weight.clamp_(-0.1, 0.1),
    "by data": lambda model: model[0].weight.data.clamp_(-0.1, 0.1),
    "as another parameter": lambda model: setattr(
        model[0], "weight", nn.Parameter(model[0].weight.clamp(-0.1, 0.1))
    ),
    "the parameter itself": lambda model: model.kept[0].mul_(0.9),
    "the parameter itself, by data": lambda model: model.kept[0].data.mul_(0.9),
    "an average": lambda model: model.slow.weight.lerp_(model[0].weight, 0.1),
    "an average, by data": lambda model: model.slow.weight.data.lerp_(model[0].weight.data, 0.1),
    "an average, as new data": with_data_replaced,
    "an average, as another parameter": lambda model: setattr(
        model.slow, "weight", nn.Parameter(model[0].weight * 0.1, requires_grad=False)
    ),
}


def changes(comm: Communicator, write: str) -> None:
    ddp, handle, _ = attached(comm, OPTIMIZERS["SGD"], model=lambda: Changing(WRITES[write]))
    name = "slow" if "average" in write else "0"
    said = rf"^'{name}\.weight' is written while the model is called.*ahead=False"
    with pytest.raises(InputError, match=said):
        ddp(data_of(comm.rank, 7, ddp.module))
    assert at_home(ddp.module, now(ddp.module))
    handle.close()


def each_write(comm: Communicator) -> None:
    for write in WRITES:
        changes(comm, write)


def test_a_forward_pass_that_writes_weights_is_refused(run_on: Any) -> None:
    run_on(2, each_write)


class Stated(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


class Looking(nn.Sequential):
    """A model whose code looks at its own weights as at parameters."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(30, 60), nn.Flatten(), Stated(240, 10))
        self[0].weight.width = 60

    def forward(self, data: Tensor) -> Tensor:
        assert isinstance(self[0].weight, nn.Parameter)
        assert self[0].weight.width == 60
        self.copied = [copy.deepcopy(self[0]), copy.copy(self[0])]
        self.copied += [pickle.loads(pickle.dumps(self[0])), copy.deepcopy(self)[0]]
        self.stated = [copy.deepcopy(self[-1])]
        self.seen = [*self.parameters()], copy.deepcopy(self.state_dict())
        self.zero_grad()
        zeros = {name: torch.zeros_like(one) for name, one in self[0].named_parameters()}
        for layer in self[0], *self.copied:
            assert not torch.func.functional_call(layer, zeros, (data,)).any()
        output = super().forward(data)
        if not torch.is_inference(output):
            both = self[-1].weight, [*self.parameters()][-2]
            square = output.square().sum()
            self.gradients = [torch.autograd.grad(square, w, retain_graph=True)[0] for w in both]
        return output


def looks(comm: Communicator) -> None:
    ddp, handle, optimizer = attached(comm, OPTIMIZERS["SGD"], model=Looking, steps=2)
    module, data = ddp.module, data_of(comm.rank, 7, ddp.module)
    assert module[0].weight.grad is not None
    ddp(data)
    assert module[0].weight.grad is None
    for copied in module.copied:
        assert same_bits(copied.weight, module[0].weight)
        assert vars(copied).keys() == vars(nn.Linear(1, 1)).keys()
    assert "weight" not in vars(module.stated[0])
    parameters, state = module.seen
    assert all(mine is own for mine, own in zip(parameters, module.parameters(), strict=True))
    assert are(module, state)
    assert same_bits(*module.gradients)
    assert module.gradients[0].any()
    with torch.inference_mode(), torch.enable_grad():
        module(data)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    optimizer.param_groups.pop(0)  # what updates a weight no more does not move it
    assert are(module, looked_into(ddp, data)[1])
    handle.close()


def test_the_models_own_code_finds_parameters(run_on: Any) -> None:
    run_on(2, looks)


class Adversarial(nn.Module):
    """A generator, and a discriminator that is frozen for a part of the call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.generator, self.discriminator = nn.Linear(30, 40), nn.Linear(40, 30)

    def forward(self, data: Tensor) -> Tensor:
        fake = self.generator(data)
        for one in self.discriminator.weight, self.discriminator.bias:
            one.requires_grad_(False)
        loss = self.discriminator(fake).square().sum()
        self.discriminator.requires_grad_(True)
        return loss - self.discriminator(fake.detach()).sum()


class Hooked(nn.Linear):
    """A layer that hooks into its weight's gradient when it is first called."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(30, 40)
        self.hook: Any = None

    def forward(self, data: Tensor) -> Tensor:
        if self.hook is None:
            self.hook = self.weight.register_hook(lambda gradient: 3 * gradient)
        return super().forward(data).sum()


class Tied(nn.Sequential):
    """Two layers with one weight, whose gradient the model looks at."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(40, 40), nn.Linear(40, 40))
        self[1].weight = self[0].weight

    def forward(self, data: Tensor) -> Tensor:
        output = super().forward(data[..., :10].repeat(1, 1, 4)).square().sum()
        (gradient,) = torch.autograd.grad(output, self[0].weight, create_graph=True)
        return output + gradient.square().sum()


def gradients_of_passes(comm: Communicator, make: type[nn.Module], ahead: bool) -> list[Tensor]:
    """Return what two passes bring. No optimiser is known, so nothing is ahead."""
    ddp = DistributedDataParallel(make())
    handle = attach_evenly(ddp, "topk", density=0.1, ahead=ahead)
    for step in range(2):
        ddp(torch.full((2, 3, 30), 1.0 + comm.rank + step)).backward()
    handle.close()
    return [parameter.grad for parameter in ddp.parameters()]


@pytest.mark.parametrize("make", [Adversarial, Hooked, Tied])
def test_what_the_models_code_does_to_a_weight_reaches_the_parameter(
    run_on: Any, make: type[nn.Module]
) -> None:
    with_it, without = (run_on(2, gradients_of_passes, make, ahead) for ahead in (True, False))
    for mine, right in zip(with_it, without, strict=True):
        assert all(map(same_bits, mine, right))


def reads_parametrised(comm: Communicator) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        layers = [nn.Linear(30, 60), nn.Flatten(), nn.Linear(240, 10)]
        return nn.Sequential(weight_norm(layers[0]), *layers[1:])

    ddp, handle, _ = attached(comm, OPTIMIZERS["SGD"], model=make, steps=2)
    read = ddp.module[0].weight.detach().clone()
    assert not are(ddp.module, looked_into(ddp, data_of(comm.rank, 7, ddp.module))[1])
    handle.close()
    assert same_bits(ddp.module[0].weight.detach(), read)


def test_a_parametrised_weight_can_be_read_at_any_moment(run_on: Any) -> None:
    run_on(2, reads_parametrised)


def overlapped(comm: Communicator) -> list[str]:
    """Return what comes first: the last layer's exchange, or the first layer's backward pass."""
    ddp, handle, _ = attached(comm, OPTIMIZERS["SGD"], wrap=MANY_BUCKETS, steps=3)
    inner, submit, events = handle._session.ranks.comm, handle._session.ranks.comm.submit, []
    inner.submit = lambda job: (events.append("exchange"), submit(job))[1]
    ddp.module[1].register_full_backward_pre_hook(lambda *_: events.append("backward"))
    pass_by(ddp, comm.rank, 7)
    handle.close()
    return events[:2]


def test_gradients_are_exchanged_while_others_are_computed(run_on: Any) -> None:
    assert run_on(2, overlapped) == [["exchange", "backward"]] * 2
