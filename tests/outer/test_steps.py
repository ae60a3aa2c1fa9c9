"""Outer steps on the simulated cluster: all methods, conservation, poison, checkpoints, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import TopK
from sparcel.errors import CommunicationError, InputError, MismatchError
from sparcel.products.outer import Method, attach, diloco, muloco, sparseloco, streaming
from sparcel.products.outer.method import default
from tests.outer.islands import Model, Named, Training, descend, same, train, trainable

METHODS: dict[str, Callable[[], Method]] = {
    "default": default,
    "diloco": diloco,
    "streaming": lambda: streaming(2, 1),
    "sparseloco": sparseloco,
    "sparseloco, by senders": lambda: sparseloco(divisor="sent"),
    "muloco": muloco,
    "a scheme": lambda: Method(TopK(0.1)),
}
CONSERVING = [name for name in METHODS if name not in ("sparseloco, by senders", "streaming")]
PLAIN = diloco(lr=1.0, momentum=0.0)
each_method = pytest.mark.parametrize("name", METHODS)


@each_method
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_islands_share_the_same_bits_after_each_outer_step(name: str, world_size: int) -> None:
    def on_rank(comm: Communicator) -> list[tuple[Named, Named]]:
        island, found = Training(comm, comm.rank, METHODS[name](), every=4), []
        for _ in range(12):
            before = island.outer.steps
            island.step()
            if island.outer.steps > before:
                found.append((island.shared(), island.local()))
        return found

    first, *others = simulate(world_size, on_rank).results
    assert len(first) == (5 if name == "streaming" else 3)
    assert not same(first[0][0], first[1][0])
    for other in others:
        for (shared, local), (expected, there) in zip(other, first, strict=True):
            assert same(shared, expected)
            assert same(local, there) == (name != "streaming")


@pytest.mark.parametrize("name", CONSERVING)
@pytest.mark.parametrize("decay", [1.0, 0.75, 0.0])
def test_what_islands_move_is_shared_or_in_memory(name: str, decay: float) -> None:
    method = replace(METHODS[name](), lr=1.0, momentum=0.0, decay=decay, nesterov=False)

    def on_rank(comm: Communicator) -> list[list[Named]]:
        island, found = Training(comm, comm.rank, method), []
        for _ in range(3):
            shared, memory = island.shared(), island.memory()
            island.steps(2)
            found.append([shared, memory, island.before, island.shared(), island.memory()])
        return found

    by_island, lost = simulate(3, on_rank).results, 0.0
    for step in range(3):
        for tensor in by_island[0][step][0]:
            ins = outs = torch.zeros(())
            for island in by_island:
                shared, memory, local, after, kept = (
                    part[tensor].double() for part in island[step]
                )
                ins = ins + memory + shared - local
                outs = outs + shared - after + (kept / decay if decay else kept)
                lost += float(kept.abs().sum())
            if decay or name == "diloco":
                torch.testing.assert_close(outs, ins, rtol=0, atol=2e-5)
    assert bool(lost) == bool(decay and name != "diloco")


def test_a_coordinate_that_nobody_sends_is_kept_by_all() -> None:
    def on_rank(comm: Communicator) -> None:
        island = Training(comm, comm.rank, sparseloco(divisor="sent")).steps(2)
        start, kept = Model().state_dict(), island.memory()
        for name, shared in island.shared().items():
            silent = shared == start[name]
            moved = 0.95 * (start[name] - island.before[name]).double()
            if name != "mean":
                torch.testing.assert_close(kept[name][silent], moved[silent])
        assert (island.shared()["layers.3.weight"] == start["layers.3.weight"]).sum() > 64 * 40

    simulate(3, on_rank)


def test_diloco_is_nesterov_with_the_mean_of_what_islands_moved() -> None:
    found = simulate(3, lambda comm: train(comm, "diloco", 9, every=3)).results[0][0]
    shared = Model()
    outer = torch.optim.SGD(trainable(shared).values(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(0, 9, 3):
        islands = [copy.deepcopy(shared) for _ in range(3)]
        for number, island in enumerate(islands):
            inner = torch.optim.SGD(trainable(island).values(), lr=0.1)
            for turn in range(step, step + 3):
                descend(island, inner, number, turn)
        for name, one in trainable(shared).items():
            ends = torch.stack([trainable(island)[name].detach() for island in islands])
            one.grad = one.detach() - ends.mean(0)
        outer.step()
    for name, parameter in trainable(shared).items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["mean"], torch.full((4,), 9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_of_rate_1_after_each_inner_step_average_parameters(dtype: torch.dtype) -> None:
    def on_rank(comm: Communicator) -> None:
        island = Training(comm, comm.rank, PLAIN, every=1, model=Model(dtype))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for _ in range(3):
            start = island.shared()
            island.step()
            for name, shared in island.shared().items():
                assert shared.dtype == (torch.float32 if name == "mean" else wide)
                local = island.before[name]
                moved = local.to(shared.dtype) - start[name].to(local.dtype).to(shared.dtype)
                comm.all_reduce(moved)
                expected = start[name] + moved / comm.size
                accuracy = 1e-12 if shared.dtype == torch.float64 else 1e-5
                torch.testing.assert_close(shared, expected, rtol=accuracy, atol=accuracy)
            local = island.local()
            assert same(local, {n: one.to(local[n].dtype) for n, one in island.shared().items()})
        assert torch.equal(island.model.frozen, Model().frozen)

    simulate(3, on_rank)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_buffers_are_averaged_or_stay_local(buffers: str) -> None:
    def on_rank(comm: Communicator) -> Any:
        island = Training(comm, comm.rank, every=2, buffers=buffers).steps(2)
        assert ("mean" in island.outer.shared) == (buffers == "average")
        return island.model.mean.tolist(), int(island.model.count)

    expected = [2.0, 2.0, 2.0] if buffers == "average" else [0.0, 2.0, 4.0]
    assert simulate(3, on_rank).results == [([mean] * 4, 0) for mean in expected]


def poisoned(comm: Communicator, method: Any, values: dict[int, float], **settings: Any) -> Any:
    """Return an island that has done an outer step, and another with NaN or Inf somewhere."""
    island = Training(comm, comm.rank, method, every=1, **settings)
    island.step()
    before = island.shared(), island.memory()
    island.step(values.get(comm.rank))
    return island, *before


BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "streaming"])
@pytest.mark.parametrize("poison", ["leave out", "void"])
@given(values=st.dictionaries(st.integers(0, 2), st.sampled_from(BAD), min_size=1))
@settings(max_examples=5)
def test_an_island_with_nan_is_left_out_or_makes_the_step_void(
    name: str, poison: Any, values: dict[int, float]
) -> None:
    method = replace(METHODS[name](), lr=1.0, momentum=0.0, nesterov=False)
    void = poison == "void" or len(values) == 3

    def on_rank(comm: Communicator) -> Any:
        island, shared, memory = poisoned(comm, method, values, poison=poison)
        after, local, kept = island.shared(), island.local(), island.memory()
        moved = {tensor: shared[tensor] - one for tensor, one in island.before.items()}
        assert all(bool(one.isfinite().all()) for one in (*local.values(), *kept.values()))
        assert same(after, shared) == void
        assert island.outer.stats().void_steps == void
        assert not void or same(kept, memory)
        assert same(local, after) == (not void or comm.rank in values)
        island.step()
        assert not same(island.shared(), after)
        assert same(island.local(), island.shared())
        return shared, moved, memory, after, kept

    by_island = simulate(3, on_rank).results
    assert all(same(other[3], by_island[0][3]) for other in by_island)
    if void or name == "sparseloco, by senders":
        return
    counted = 3 - len(values)  # of the others the mean is shared or owed, and what memory held
    for tensor in by_island[0][0]:
        ins = outs = torch.zeros(())
        for rank, parts in enumerate(by_island):
            shared, moved, memory, after, kept = (part[tensor].double() for part in parts)
            ins = ins + memory + (0 if rank in values else moved * 3 / counted)
            outs = outs + kept / method.decay
        outs = outs + 3 * (shared - after)
        torch.testing.assert_close(outs, ins, rtol=0, atol=2e-5)


def test_the_average_is_over_the_islands_that_count() -> None:
    def on_rank(comm: Communicator) -> Any:
        island, shared, _ = poisoned(comm, PLAIN, {1: BAD[0], 4: BAD[1]})
        return shared, island.before, island.shared()

    by_island = simulate(5, on_rank).results
    for name, after in by_island[0][2].items():
        ends = torch.stack([by_island[rank][1][name] for rank in (0, 2, 3)])
        torch.testing.assert_close(after, ends.mean(0), rtol=1e-5, atol=1e-5)


def test_who_is_left_out_is_no_sender() -> None:
    """Three islands, one of them left out, do what the others do alone."""

    def on_rank(comm: Communicator, bad: float | None) -> Named:
        island = Training(comm, comm.rank, sparseloco(divisor="sent"), every=1, buffers="local")
        island.step(bad if comm.rank == 2 else None)
        return island.shared()

    expected = simulate(2, lambda comm: on_rank(comm, None)).results[0]
    for shared in simulate(3, lambda comm: on_rank(comm, BAD[0])).results:
        for name, one in shared.items():
            torch.testing.assert_close(one, expected[name])


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_an_island_with_nan_recovers_in_all_fragments(make: Any) -> None:
    def on_rank(comm: Communicator) -> None:
        island = Training(comm, comm.rank, streaming(3, 0), every=3, make=make)
        for step in range(12):
            island.step(BAD[0] if comm.rank == 1 and step == 1 else None)
        assert all(bool(one.isfinite().all()) for one in island.local().values())
        island.step()
        assert all(bool(one.isfinite().all()) for one in island.before.values())

    simulate(2, on_rank)


def restarted(island: Training, comm: Communicator, method: Any, every: int) -> Training:
    """Return an island that goes on from the states of another one."""
    other = Training(comm, comm.rank, method, every, model=Model(seed=1), make=torch.optim.Adam)
    other.done = island.done
    other.model.load_state_dict(copy.deepcopy(island.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(island.optimizer.state_dict()))
    other.outer.load_state_dict(island.outer.state_dict())
    return other


@pytest.mark.parametrize("name", ["default", "sparseloco", "streaming", "a scheme"])
@given(stop=st.integers(0, 11))
@settings(max_examples=4)
def test_training_resumes_bit_by_bit_at_any_inner_step(name: str, stop: int) -> None:
    def on_rank(comm: Communicator) -> None:
        through = Training(comm, comm.rank, METHODS[name](), 4, make=torch.optim.Adam).steps(stop)
        resumed = restarted(through, comm, METHODS[name](), 4)
        for _ in range(12):
            for island in (through, resumed):
                island.step()
            assert same(through.local(), resumed.local())
            assert same(through.memory(), resumed.memory())
            assert through.outer.steps == resumed.outer.steps

    simulate(3, on_rank)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 3), (3, 1), (5, 2)])
@pytest.mark.parametrize("name", ["default", "sparseloco", "streaming"])
def test_another_number_of_islands_takes_over_what_is_shared_and_owed(
    name: str, sizes: tuple[int, int]
) -> None:
    def save(comm: Communicator) -> Any:
        island = Training(comm, comm.rank, METHODS[name](), 4).steps(9)
        state, memory = island.outer.state_dict(), island.memory()
        return state, island.shared(), memory, island.model.state_dict()

    saved = simulate(sizes[0], save).results
    state = {key: one for island in saved for key, one in island[0].items()}

    def load(comm: Communicator) -> Any:
        island = Training(comm, comm.rank, METHODS[name](), 4)
        island.model.load_state_dict(saved[comm.rank % sizes[0]][3])
        island.outer.load_state_dict(state)
        found = island.shared(), island.memory(), island.outer.steps
        island.steps(5)
        return *found, island.shared()

    loaded = simulate(sizes[1], load).results
    for shared, _, steps, after in loaded:
        assert same(shared, saved[0][1])
        assert steps == int(state["steps"])
        assert same(after, loaded[0][3])
        assert not same(after, shared)
    for tensor in saved[0][2]:
        before = sum(island[2][tensor] for island in saved)
        found = sum(island[1][tensor] for island in loaded)
        torch.testing.assert_close(found, before * sizes[1] / sizes[0])


def test_islands_may_wrap_the_same_model_otherwise() -> None:
    """One compiles it, another one is for several GPUs; states name tensors alike."""

    class Compiled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model  # as torch.compile does, whose import takes seconds

    def on_rank(comm: Communicator) -> set[str]:
        model = Model()
        wraps: list[Callable[[Any], Any]] = [lambda one: one, Compiled, nn.DataParallel]
        optimizer = torch.optim.SGD(trainable(model).values(), lr=0.1)
        outer = attach(wraps[comm.rank](model), optimizer, every=2, islands=comm)
        for step in range(4):
            descend(model, optimizer, comm.rank, step)
        return {name for name in outer.state_dict() if name.startswith("shared.")}

    plain, *others = simulate(3, on_rank).results
    assert "shared.layers.0.weight" in plain
    assert all(other == plain for other in others)


def test_optimizers_count_once_and_skipped_steps_not_at_all() -> None:
    def on_rank(comm: Communicator) -> None:
        model = Model()
        first, *rest = trainable(model).values()
        pair = torch.optim.SGD(rest, lr=0.1), torch.optim.AdamW([first], lr=0.1)
        outer = attach(model, pair, every=2, islands=comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        counted = 0
        for step in range(6):
            skips = step % 3 == comm.rank
            for one in trainable(model).values():
                one.grad = torch.full_like(one, torch.inf if skips else 4.0)
            scaler.scale(torch.ones(()))
            for optimizer in pair:
                scaler.step(optimizer)
            scaler.update()
            counted += not skips
            assert outer.steps == counted // 2
        assert outer.steps == 2
        assert all(bool(one.isfinite().all()) for one in trainable(model).values())

    simulate(2, on_rank)


def errors(comm: Communicator, **settings: Any) -> str:
    """Return what error a training ends with, on this rank."""
    own = {name: one[comm.rank] for name, one in settings.items()}
    with pytest.raises(MismatchError) as caught:
        Training(comm, comm.rank, **own).steps(2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": [2, 2, 4]}, "other settings"),
        ({"method": [None, None, "muloco"]}, ""),
        ({"method": [diloco(), diloco(), diloco(0.5)]}, "other settings"),
        ({"buffers": ["average", "average", "local"]}, ""),
        ({"poison": ["leave out", "leave out", "void"]}, "other settings"),
        ({"model": [Model(), Model(), Model(seed=1)]}, "share other parameters"),
        ({"model": [Model(), Model(), Model(width=4)]}, ""),
    ],
    ids=["every", "method", "lr", "buffers", "poison", "parameters", "shapes"],
)
def test_all_islands_are_told_if_one_differs(settings: dict[str, list[Any]], words: str) -> None:
    said = simulate(3, lambda comm: errors(comm, **copy.deepcopy(settings))).results
    assert all(words in one for one in said)
    assert "[2]" in said[0]
    assert "[0, 1]" in said[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"method": "dilocoo"}, "diloco"),
        ({"method": streaming(2, 2), "every": 4}, "overlap must be less"),
        ({"model": torch.nn.Flatten()}, "no parameters to train"),
        ({"buffers": "none"}, "buffers"),
        ({"poison": "ignore"}, "poison"),
        ({"least": 0}, "least"),
        ({"patience": 0.0}, "patience"),
        ({"optimizer": []}, "optimizer"),
        ({"islands": "tcp://"}, "tcp://HOST:PORT"),
        ({"islands": "tcp://here:port"}, "tcp://HOST:PORT"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    def on_rank(comm: Communicator) -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"model": model, "optimizer": optimizer, "islands": comm} | settings
        with pytest.raises(InputError, match=words):
            attach(**given)

    simulate(1, on_rank)


def test_who_serves_no_islands_is_told_how_to() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CommunicationError, match="sparcel meet --port 9"):
        attach(model, optimizer, islands="tcp://127.0.0.1:9", patience=0.5)


@pytest.mark.parametrize("name", ["default", "diloco"])
def test_a_state_of_another_model_changes_nothing(name: str) -> None:
    def on_rank(comm: Communicator) -> None:
        state = Training(comm, comm.rank, name, model=Model(width=1)).steps(4).outer.state_dict()
        island = Training(comm, comm.rank, name).steps(2)
        before = island.shared(), island.memory()
        for wrong in (state, {key: one for key, one in state.items() if "last" not in key}, {}):
            with pytest.raises(InputError, match=r"last|'clock'"):
                island.outer.load_state_dict(wrong)
            assert same(island.shared(), before[0])
            assert same(island.memory(), before[1])
            assert island.outer.steps == 1

    simulate(2, on_rank)
