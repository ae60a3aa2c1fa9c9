"""NeMo-RL: vLLM's workers get the tensors of the policy that have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparcel.core.comm import Communicator
from tests.integrations.stand_ins import nemo_rl as stand_ins
from tests.integrations.stand_ins.installing import assert_alike, fresh, install

pytestmark = pytest.mark.processes

BASE = "nemo_rl.utils.checkpoint_engines.base"
SENDING = "nemo_rl.models.policy.workers.checkpoint_engine"
RECEIVING = "nemo_rl.models.generation.vllm.checkpoint_engine"
PLUG = "sparcel.integrations.nemo_rl:Engine"
BUCKET = 3000

Batches = list[list[tuple[str, Tensor]]]


@pytest.fixture(params=["stand-in", "real"])
def kind(request: pytest.FixtureRequest) -> Any:
    if request.param == "real":
        pytest.importorskip(BASE, reason="without NeMo-RL")
    return request.param


@contextmanager
def engines(kind: str, folder: str, **settings: Any) -> Iterator[Any]:
    """Yield what makes an engine as NeMo-RL does."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "stand-in":
            install(patch, "nemo_rl", stand_ins.MODULES)
        ours = fresh(patch, "sparcel.integrations.nemo_rl")
        patch.setattr("sparcel.integrations._deltas._SECONDS", 1e-3)
        told = {"store": f"{folder}/store", "release_after_refit": False, **settings}
        if kind == "stand-in":
            yield lambda: ours.Engine(bucket_size=BUCKET, **told)
        else:
            create = import_module(BASE).create_checkpoint_engine
            yield lambda: create(PLUG, bucket_size_bytes=BUCKET, engine_kwargs=told)


def meet(comm: Communicator, policy: Any, workers: list[Any]) -> None:
    """Do what NeMo-RL's synchronizer does first: all metadata go to all, the policy's first."""
    numbers = comm.gather_numbers(policy.prepare()["version"])
    sizes = {"train_world_size": comm.size, "rollout_world_size": comm.size * len(workers)}
    told = [{"version": number, "rank": rank} for rank, number in enumerate(numbers)]
    metadata = [*told, *[worker.prepare() for _ in range(comm.size) for worker in workers]]
    policy.init_policy_process_group(worker_rank=comm.rank, metadata=metadata, **sizes)
    for number, worker in enumerate(workers):
        rank = comm.rank * len(workers) + number
        worker.init_rollout_process_group(rollout_rank=rank, metadata=metadata, **sizes)


def refitted(policy: Any, workers: list[Any], weights: dict[str, Tensor]) -> list[Batches]:
    """Let the policy send, and return the batches that each worker gets."""

    async def received(worker: Any) -> Batches:
        return [
            [(name, tensor.clone()) for name, tensor in batch]
            async for batch in worker.receive_weight_batches()
        ]

    async def run() -> list[Any]:
        got = [received(worker) for worker in workers]  # they look before there is a version
        return await asyncio.gather(*got, policy.send_weights(iter(weights.items())))

    return asyncio.run(run())[: len(workers)]


def made() -> dict[str, Tensor]:
    """Weights that are alike on all ranks, one of which does not fit in a batch."""
    torch.manual_seed(3)
    weights = {f"w{i}": torch.randn(20, 20).bfloat16() for i in range(6)}
    return {**weights, "large": torch.randn(60, 60).bfloat16(), "scale": torch.ones(1)}


def joined(batches: Batches) -> dict[str, Tensor]:
    """Check that batches are as large as they may be, and return what they hold."""
    sizes = [sum(tensor.nbytes for _, tensor in batch) for batch in batches]
    for number, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        assert size <= BUCKET or len(batch) == 1
        if number:
            assert sizes[number - 1] + batch[0][1].nbytes > BUCKET
    names = [name for batch in batches for name, _ in batch]
    assert len(set(names)) == len(names)
    return {name: tensor for batch in batches for name, tensor in batch}


def following(comm: Communicator, kind: str, folder: str, mirror: str | None) -> None:
    weights = made()
    models: list[dict[str, Tensor]] = [{}, {}]
    with engines(kind, folder, mirror=mirror) as new:
        policy, workers = new(), [new() for _ in models]
        meet(comm, policy, workers)
        changes: list[set[str]] = [set(weights), {"w1", "large"}, set(), {"w5"}, {"w2"}]
        for step, changed in enumerate(changes):
            expected = [changed] * 2
            if step == 4:  # all meet again, with a worker that was started again
                workers[1], expected[1] = new(), set(weights)
                meet(comm, policy, workers)
            for name in changed if step else ():
                weights[name].view(-1)[step] += 1
            for number, batches in enumerate(refitted(policy, workers, weights)):
                got = joined(batches)
                assert set(got) == expected[number]
                models[number].update(got)
                assert all(torch.equal(models[number][name], weights[name]) for name in weights)
            comm.gather_numbers(0)


@pytest.mark.parametrize("mirror", [None, "mirror"])
def test_workers_get_what_has_changed(
    run_on: Any, kind: str, tmp_path: Path, mirror: str | None
) -> None:
    place = mirror and f"{tmp_path}/{mirror}"
    run_on(2, following, kind, str(tmp_path), place)
    assert len(list(tmp_path.rglob("model.safetensors"))) == bool(mirror)


def interrupted(comm: Communicator, folder: str, mirror: str | None) -> None:
    """After an error of vLLM, or of another host, a worker gets all weights."""
    weights = made()
    with engines("stand-in", folder, mirror=mirror) as new:
        policy, workers = new(), [new()]
        meet(comm, policy, workers)
        refitted(policy, workers, weights)
        comm.gather_numbers(0)
        weights["w0"] += 1

        async def fails() -> None:
            await policy.send_weights(iter(weights.items()))
            batches = workers[0].receive_weight_batches()
            await anext(batches)
            await batches.aclose()

        asyncio.run(fails())
        comm.gather_numbers(0)
        meet(comm, policy, workers)
        weights["w1"] += 1
        (batches,) = refitted(policy, workers, weights)
        got = joined(batches)
        assert set(got) == set(weights)
        assert all(torch.equal(got[name], weights[name]) for name in weights)
        comm.gather_numbers(0)


@pytest.mark.parametrize("mirror", [None, "mirror"])
def test_after_an_error_workers_get_all(run_on: Any, tmp_path: Path, mirror: str | None) -> None:
    run_on(2, interrupted, str(tmp_path), mirror and f"{tmp_path}/{mirror}")


def narrowed(comm: Communicator, folder: str) -> None:
    weights = made()
    with engines("stand-in", folder, dtype="bfloat16") as new:
        policy, workers = new(), [new()]
        meet(comm, policy, workers)
        (batches,) = refitted(policy, workers, {name: one.float() for name, one in weights.items()})
    got = joined(batches)
    assert all(torch.equal(got[name], one.bfloat16()) for name, one in weights.items())


def test_weights_may_be_narrowed(run_on: Any, tmp_path: Path) -> None:
    run_on(2, narrowed, str(tmp_path))


def driven(comm: Communicator, folder: str) -> None:
    """Let the methods of NeMo-RL's own workers call the engines, as its synchronizer does."""
    sending, receiving = import_module(SENDING), import_module(RECEIVING)
    weights, got = made(), dict[str, Tensor]()

    class Policy(sending.PolicyCheckpointEngineMixin):  # type: ignore[misc]
        rank = comm.rank

        def _checkpoint_engine_weight_iterator(self, kv_scales: Any = None) -> Any:
            return iter(weights.items())

    class Worker(receiving.VllmCheckpointEngineMixin):  # type: ignore[misc]
        def _load_weights(self, batch: list[tuple[str, Tensor]]) -> None:
            got.update({name: tensor.clone() for name, tensor in batch})

        def _maybe_process_fp8_kv_cache(self) -> None:
            pass

    def ask(method: str, **told: Any) -> Any:
        return asyncio.run(policy.checkpoint_engine_rpc(method, told))

    policy, worker = Policy(), Worker()
    told = {"store": f"{folder}/store", "release_after_refit": False}
    ask("init_checkpoint_engine", backend=PLUG, bucket_size_bytes=BUCKET, engine_kwargs=told)
    worker.init_checkpoint_engine(PLUG, BUCKET, told)
    metadata = [ask("prepare_checkpoint_engine")] * 2 + [worker.prepare_checkpoint_engine()] * 2
    sizes = {"train_world_size": 2, "rollout_world_size": 2, "metadata": metadata}
    ask("init_checkpoint_engine_process_group", **sizes)
    worker.init_checkpoint_engine_process_group(0, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(synchronize=int))
        for step in range(3):
            weights["w2"] += 1
            ask("send_weights_via_checkpoint_engine")
            assert asyncio.run(worker._update_weights_from_checkpoint_engine_async())
            assert set(got) == ({"w2"} if step else set(weights))
            assert all(torch.equal(got[name], weights[name]) for name in got)
            got.clear()
            comm.gather_numbers(0)
    ask("finalize_checkpoint_engine")
    worker.finalize_checkpoint_engine()


def test_the_workers_of_nemo_rl_drive_it(run_on: Any, tmp_path: Path) -> None:
    for module in (SENDING, RECEIVING):
        pytest.importorskip(module, reason="without NeMo-RL", exc_type=ImportError)
    run_on(2, driven, str(tmp_path))


def test_the_stand_in_is_like_nemo_rl() -> None:
    real = pytest.importorskip(BASE, reason="without NeMo-RL")
    assert_alike(stand_ins.CheckpointEngine, real.CheckpointEngine)
