"""Trainers and servers that wrap a model otherwise: names fit, or it is told that they do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from sparcel.errors import InputError, VersionError
from sparcel.products.delta import Change, Publisher, Subscriber, apply_, assign_, encode
from tests.delta.pairs import copied, same, wholes

Named = dict[str, Tensor]


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


class Compiled(nn.Module):
    """A module whose names are those of `torch.compile`, which takes seconds to import."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


def checkpointed(model: nn.Sequential) -> nn.Sequential:
    model[0] = checkpoint_wrapper(model[0])
    return model


def with_a_compiled_block(model: nn.Sequential) -> nn.Module:
    model[0] = Compiled(model[0])
    return DataParallel(model)


def named(module: nn.Module) -> Named:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


WRAPPED: dict[str, Callable[[nn.Sequential], nn.Module | Named]] = {
    "plain": lambda model: model,
    "state dict": lambda model: model.state_dict(),
    "compiled": Compiled,
    "compiled and parallel": lambda model: DataParallel(Compiled(model)),
    "a block compiled, and parallel": with_a_compiled_block,
    "checkpoints": checkpointed,
    "named, with checkpoints": lambda model: named(checkpointed(model)),
    "named, parallel": lambda model: named(DataParallel(model)),
}
WAYS = st.sampled_from(list(WRAPPED))


@given(trainer=WAYS, server=WAYS, follower=WAYS)
def test_whatever_is_wrapped_in_what(
    tmp_path_factory: pytest.TempPathFactory, trainer: str, server: str, follower: str
) -> None:
    """Weights arrive in place, by any way, and a subscriber's own have the model's names."""
    store = tmp_path_factory.mktemp("store")
    models = [net(seed) for seed in range(3)]
    here, there, far = models
    told = dict(here.state_dict())
    published, served, mirror = (
        WRAPPED[how](model) for how, model in zip((trainer, server, follower), models, strict=True)
    )
    publisher, own = Publisher(store), Subscriber(store)
    subscriber = Subscriber(store, served)  # type: ignore[arg-type]
    for step in range(2):
        with torch.no_grad():
            here[0 if trainer == "plain" else 2].weight[step] += 1
        publisher.publish(published)
        subscriber.update()
        subscriber.verify()
        update = own.update()
        assert update is not None
        assign_(mirror, update.changes())
    assert own.tensors.keys() == told.keys()
    expected = list(dict(here.state_dict()).values())
    for model in (there, far):
        assert all(map(torch.equal, model.state_dict().values(), expected))
    if not isinstance(served, nn.Module):
        assert list(subscriber.tensors.values()) and len(served) == len(told)


@given(trainer=WAYS, server=WAYS)
def test_chunks_fit_whatever_is_wrapped_in_what(trainer: str, server: str) -> None:
    """Without a store, as `broadcast` carries them; what is written can be undone."""
    here, there = net(0), net(0)
    base = copied(here.state_dict())
    with torch.no_grad():
        here[2].weight[1] += 1
    chunks = list(encode(WRAPPED[trainer](here), base))
    inverse = apply_(WRAPPED[server](there), chunks)  # type: ignore[arg-type]
    assert torch.equal(there[2].weight, here[2].weight)
    inverse.undo()
    assert torch.equal(there[2].weight, base["2.weight"])


@pytest.mark.slow
def test_what_torch_compiles_has_these_names() -> None:
    model = net(0)
    names = [list(wrap(model).state_dict()) for wrap in (torch.compile, Compiled)]  # type: ignore
    assert names[0] == names[1]


@pytest.mark.parametrize("ours", ["a", "abc", "abd", "", "x"])
def test_names_that_one_side_lacks_are_refused_unless_they_may(tmp_path: Path, ours: str) -> None:
    """A version of a, b and c; nothing is written, and with partial the mapping is the version."""
    version = {name: torch.ones(3) for name in "abc"}
    publisher = Publisher(tmp_path)
    publisher.publish(version)
    given = {name: torch.zeros(3) for name in ours}
    held, subscriber = dict(given), Subscriber(tmp_path, given)
    if ours in ("abc", ""):
        subscriber.update()
        subscriber.verify()
        assert same(given, version)
        publisher.publish({"a": torch.ones(3)})
        if ours:
            with pytest.raises(
                VersionError, match="the weights have 'b' and 1 more that the version lacks; begin"
            ):
                subscriber.update()
            assert same(given, version)
        return
    extra, lacking = set(ours) - set("abc"), sorted(set("abc") - set(ours))
    told = [f"have '{name}' that the version lacks" for name in extra]
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    told += [f"lack '{name}'{more}" for name in lacking[:1]]
    version = {name: tensor + 1 for name, tensor in version.items()}
    publisher.publish(version)
    expected = re.escape(f"the weights {', and '.join(told)}; begin") + ".*partial=True"
    with pytest.raises(VersionError, match=f"version 0 .*, on the way to version 1 .*{expected}"):
        subscriber.update()
    with pytest.raises(InputError, match="update first"):
        subscriber.verify()
    assert not any(tensor.any() for tensor in held.values())
    subscriber = Subscriber(tmp_path, given, partial=True)
    subscriber.update()
    subscriber.verify()
    assert same(given, version)
    assert all(given[name] is held[name] for name in held.keys() & version.keys())


@pytest.mark.parametrize("trained", [{"module.w", "head.w"}, {"module.w", "module.b"}])
def test_names_that_a_version_has_stay_as_they_are(tmp_path: Path, trained: set[str]) -> None:
    """Those of whoever follows a part whose names all begin with what wrappers put there, too."""
    version = {name: torch.ones(2) for name in trained}
    publisher, own = Publisher(tmp_path), Subscriber(tmp_path)
    publisher.publish(version)
    ours, mirror = ({"module.w": torch.zeros(2)} for _ in range(2))
    held = ours["module.w"]
    subscriber = Subscriber(tmp_path, ours, partial=True)
    for _ in range(2):
        subscriber.update()
        subscriber.verify()
        update = own.update()
        assert update is not None
        assign_(mirror, update.changes(), partial=True)
        assert ours["module.w"] is held
        assert torch.equal(held, version["module.w"])
        assert same(mirror, {"module.w": held})
        version["module.w"][1] += 1
        publisher.publish(version)
    subscriber.reload()
    assert torch.equal(held, version["module.w"])


def test_a_name_that_may_be_either_is_refused() -> None:
    (one,) = wholes(w=torch.ones(2))
    changes = [one, replace(one, name="module.w")]
    with pytest.raises(InputError, match=r"'w' and 'module.w' both change"):
        assign_({"module.w": torch.zeros(2)}, changes, partial=True)


def test_an_averaged_model_is_the_model(tmp_path: Path) -> None:
    """What the average counts is no tensor of the model, on either side."""
    trainer, server = AveragedModel(net(0)), AveragedModel(net(1))
    Publisher(tmp_path).publish(trainer)
    own = Subscriber(tmp_path)
    for subscriber in (own, Subscriber(tmp_path, server), Subscriber(tmp_path, net(2))):
        subscriber.update()
        subscriber.verify()
    assert own.tensors.keys() == net(0).state_dict().keys()
    assert same(dict(server.module.state_dict()), dict(trainer.module.state_dict()))


def test_parametrisations_are_told_plainly(tmp_path: Path) -> None:
    trainer, server = net(0), net(1)
    weight_norm(trainer[0])
    Publisher(tmp_path).publish(trainer)
    for weights in (server, server.state_dict()):
        with pytest.raises(VersionError, match=r"a parametrisation in the version computes"):
            Subscriber(tmp_path, weights).update()


def test_a_module_has_all_tensors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="to use partial or only, pass them by name"):
        Subscriber(tmp_path, net(0), partial=True)


def test_changes_of_what_is_not_there_are_refused() -> None:
    weights = {"a": torch.zeros(2)}
    (other,), gone = wholes(b=torch.ones(2)), Change.gone("a", torch.float32, (2,))
    with pytest.raises(InputError, match=r"\['b'\] change and are not in the weights"):
        assign_(weights, [other])
    with pytest.raises(InputError, match=r"\['a'\] are gone and still in the weights"):
        assign_(weights, [gone])
    assign_(weights, [other, gone], partial=True)
    assign_(weights, [gone, *wholes(a=torch.ones(2))])
    assert same(weights, {"a": torch.ones(2)})
