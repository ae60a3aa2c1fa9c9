"""torchft: its DiLoCo exchanges by a scheme, and memories take effect when its Manager commits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparcel
from sparcel.errors import InputError, SparcelError
from tests.integrations.stand_ins import torchft as stand_ins
from tests.integrations.stand_ins.installing import assert_alike, fresh, install, parameters

SIZE = 600
SUM = dist.ReduceOp.SUM
TIMEOUT = timedelta(seconds=20)
TOPK = sparcel.scheme("topk", density=0.05)


@dataclass
class Manager:
    """What a Manager of torchft tells a group."""

    step: int = 0
    participants: int = 0
    participates: bool = True
    votes: bool = True
    errors: list[Exception] = field(default_factory=list)

    def current_step(self) -> int:
        return self.step

    def num_participants(self) -> int:
        return self.participants

    def is_participating(self) -> bool:
        return self.participates

    def report_error(self, error: Exception) -> None:
        self.errors.append(error)

    def should_commit(self) -> bool:
        commits = self.votes and not self.errors
        self.step += commits
        self.errors.clear()
        return commits


class Replica:
    """A group and its Manager; `average` does what Manager and DiLoCo do in an outer step."""

    def __init__(self, group: Any, fragments: int = 1) -> None:
        self.group, self.manager = group, Manager()
        group.follow(self.manager, fragments)
        self.told: list[Exception] = []

    def average(self, tensors: Sequence[Tensor]) -> bool:
        manager, works = self.manager, []
        try:
            for tensor in tensors:
                tensor.mul_(manager.participates)
                works.append(self.group.allreduce([tensor], SUM))
            for work in works:
                work.wait()
                work.get_future().wait()
        except SparcelError as error:
            manager.report_error(error)
        self.told = list(manager.errors)
        for tensor in tensors:
            tensor /= manager.participants
        return manager.should_commit()

    @property
    def memory(self) -> Tensor:
        """All that the replica remembers, end to end."""
        parts = self.group.state_dict()
        return torch.cat([parts[key] for key in sorted(parts)]) if parts else torch.zeros(1)


class Cluster:
    """Replicas, each on a thread."""

    def __init__(self, make: Callable[..., Any], threads: ThreadPoolExecutor) -> None:
        self.make, self.threads = make, threads
        self.replicas: list[Replica] = []
        self._stores, self._numbers = dist.HashStore(), count()

    def join(
        self,
        number: int,
        scheme: sparcel.schemes.Scheme = TOPK,
        fragments: int = 1,
        **settings: Any,
    ) -> None:
        """Add new replicas, which know the step of those that are there, and connect all."""
        for _ in range(number):
            group = self.make(scheme, TIMEOUT, **settings)
            self.replicas.append(Replica(group, fragments))
        self.connect()

    def connect(self) -> None:
        """Do what the replicas do when there is a new quorum."""
        store = dist.PrefixStore(f"{next(self._numbers)}", self._stores)
        size = len(self.replicas)

        def configure(rank: int, replica: Replica) -> None:
            replica.manager.participants = size
            replica.manager.step = self.replicas[0].manager.step
            replica.group._pg = replica.group._create_pg(store, rank, size)

        self._all(configure, range(size), self.replicas)

    def average(self, tensors: Sequence[Sequence[Tensor]]) -> list[bool]:
        """Do an outer step with each replica's tensors; return whether each has committed."""
        return self._all(Replica.average, self.replicas, tensors)

    def memories(self) -> list[Tensor]:
        return [replica.memory for replica in self.replicas]

    def _all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return list(self.threads.map(function, *arguments))


@pytest.fixture(params=["stand-in", "real"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    if request.param == "real":
        pytest.importorskip("torchft", reason="without torchft")
    else:
        install(monkeypatch, "torchft", stand_ins.MODULES)
    ours = fresh(monkeypatch, "sparcel.integrations.torchft")
    with ThreadPoolExecutor(8) as threads:
        cluster = Cluster(ours.SparseProcessGroup, threads)
        yield cluster
        for replica in cluster.replicas:
            if replica.group._comm is not None:
                threads.submit(replica.group._comm.close)


def gradients(replicas: int, step: int, sizes: Sequence[int] = (SIZE,)) -> list[list[Tensor]]:
    """Return small integers for each replica, so that sums are exact."""
    generator = torch.Generator().manual_seed(step)
    return [
        [torch.randint(-99, 100, (size,), generator=generator).float() for size in sizes]
        for _ in range(replicas)
    ]


def copies(given: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in given]


@pytest.mark.parametrize("scheme", ["topk", "bidirectional"])
def test_nothing_is_lost_and_all_get_the_same(cluster: Cluster, scheme: str) -> None:
    cluster.join(4, sparcel.scheme(scheme, density=0.05))
    for step in range(3):
        given = gradients(4, step, (SIZE, 40))
        before, got = sum(cluster.memories()), copies(given)
        assert cluster.average(got) == [True] * 4
        for place in range(2):
            assert all(torch.equal(tensors[place], got[0][place]) for tensors in got)
        sums = torch.cat([4 * part for part in got[0]])
        assert 0 < sums.count_nonzero() < SIZE
        after = sum(cluster.memories())
        assert torch.equal(after + sums, before + sum(torch.cat(parts) for parts in given))


def test_a_step_that_the_manager_refuses_leaves_memory_as_it_was(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.average(gradients(2, 0))
    before, first, again = cluster.memories(), gradients(2, 1), gradients(2, 1)
    cluster.replicas[1].manager.votes = False
    assert cluster.average(first) == [True, False]
    assert not torch.equal(cluster.memories()[0], before[0])
    assert torch.equal(cluster.memories()[1], before[1])
    cluster.replicas[0].manager.votes = False
    before = cluster.memories()
    cluster.connect()
    assert cluster.average(first) == [False, False]
    assert all(map(torch.equal, cluster.memories(), before))
    for replica in cluster.replicas:
        replica.manager.votes = True
    assert cluster.average(again) == [True, True]


@pytest.mark.parametrize(
    "scheme",
    [
        sparcel.scheme("topk", density=0.05, warmup=(0.3,), warmup_steps=1),
        sparcel.scheme("oktopk", density=0.05, threshold="reuse"),
    ],
    ids=["topk", "oktopk"],
)
def test_replicas_keep_their_memories_when_others_come_and_go(
    cluster: Cluster, scheme: sparcel.schemes.Scheme
) -> None:
    cluster.join(3, scheme)
    cluster.average(gradients(3, 0))
    before = cluster.memories()[:2]
    cluster.replicas.pop()
    cluster.connect()
    assert all(map(torch.equal, cluster.memories(), before))
    for step, replicas in ((1, 2), (2, 3)):
        if replicas > len(cluster.replicas):
            cluster.join(1, scheme)
            assert not cluster.replicas[2].memory.any()
        given = gradients(replicas, step)
        owed, got = sum(cluster.memories()), copies(given)
        assert cluster.average(got) == [True] * replicas
        assert all(torch.equal(tensors[0], got[0][0]) for tensors in got)
        assert 0 < got[0][0].count_nonzero() < 0.2 * SIZE, "the warm-up is over"
        kept = sum(cluster.memories()) + replicas * got[0][0]
        torch.testing.assert_close(kept, owed + sum(parts[0] for parts in given))


def test_a_replica_that_takes_no_part_keeps_its_memory(cluster: Cluster) -> None:
    cluster.join(3, decay=0.5)
    cluster.average(gradients(3, 0))
    for replica in cluster.replicas:
        replica.manager.participants = 2
    spare = cluster.replicas[2]
    spare.manager.participates, before = False, spare.memory
    given = gradients(3, 1)
    owed, got = sum(cluster.memories()[:2]), copies(given)
    assert cluster.average(got) == [True] * 3
    assert torch.equal(spare.memory, before)
    sums = 2 * got[2][0]
    kept = owed + given[0][0] + given[1][0] - sums
    assert sums.any()
    assert torch.equal(2 * sum(cluster.memories()[:2]), kept)


def test_fragments_have_their_own_memories(cluster: Cluster) -> None:
    cluster.join(2, fragments=2)
    memories = []
    for step in range(3):
        cluster.average(gradients(2, step))
        memories.append(cluster.replicas[0].group.state_dict())
    assert [sorted(one) for one in memories] == [
        ["0.0.memory"],
        *[["0.0.memory", "1.0.memory"]] * 2,
    ]
    assert torch.equal(memories[1]["0.0.memory"], memories[0]["0.0.memory"])
    assert torch.equal(memories[2]["1.0.memory"], memories[1]["1.0.memory"])


def test_fragments_that_were_not_told_are_named(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.average(gradients(2, 0, (SIZE,)))
    assert cluster.average(gradients(2, 1, (40,))) == [False, False]
    (error,) = cluster.replicas[0].told
    assert isinstance(error, InputError)
    assert str(error) == (
        "tensor 0 of the step has 40 elements and had 600 before; give follow(manager,"
        " fragments=...) the number of DiLoCo's model_fragments"
    )


def test_poison_makes_the_step_void_for_all(cluster: Cluster) -> None:
    cluster.join(3)
    cluster.average(gradients(3, 0, (SIZE, SIZE)))
    before, got = cluster.memories(), gradients(3, 1, (SIZE, SIZE))
    got[1][0][7] = torch.nan
    assert cluster.average(got) == [False] * 3
    assert all("NaN or Inf" in str(replica.told[0]) for replica in cluster.replicas)
    assert all(map(torch.equal, cluster.memories(), before))
    cluster.connect()
    assert cluster.average(gradients(3, 2, (SIZE, SIZE))) == [True] * 3


def test_a_replica_that_leaves_amid_a_step_costs_the_step(cluster: Cluster) -> None:
    cluster.join(3)
    cluster.average(gradients(3, 0))
    before, left = cluster.memories()[:2], cluster.replicas[2]
    closing = cluster.threads.submit(left.group._comm.close)
    assert cluster._all(Replica.average, cluster.replicas[:2], gradients(2, 1)) == [False, False]
    closing.result()
    assert all(map(torch.equal, cluster.memories(), before))
    cluster.replicas.pop()
    cluster.connect()
    assert cluster.average(gradients(2, 1)) == [True, True]


def test_all_else_goes_over_gloo(cluster: Cluster) -> None:
    cluster.join(2)
    whole = [[torch.arange(SIZE)] for _ in range(2)]
    groups = [replica.group for replica in cluster.replicas]

    def reduce(group: Any, tensors: list[Tensor], op: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce(tensors, options).wait()

    cluster._all(reduce, groups, whole, [SUM] * 2)
    assert torch.equal(whole[1][0], 2 * torch.arange(SIZE))
    largest = gradients(2, 0)
    expected = torch.maximum(largest[0][0], largest[1][0])
    cluster._all(reduce, groups, largest, [dist.ReduceOp.MAX] * 2)
    assert torch.equal(largest[0][0], expected)
    cluster.replicas.pop()
    cluster.connect()
    (alone,), got = gradients(1, 0), gradients(1, 0)
    assert cluster.average(got) == [True]
    assert torch.equal(got[0][0], alone[0])
    assert not cluster.replicas[0].memory.any()


def test_tensors_of_any_layout(cluster: Cluster) -> None:
    cluster.join(2)
    flat, last = gradients(2, 0), [part[0].view(3, 10, 4, 5) for part in gradients(2, 0)]
    cluster.average(flat)
    memory = cluster.memories()
    cluster.replicas.clear()
    cluster.join(2)
    got = [[part.to(memory_format=torch.channels_last)] for part in last]
    assert not got[0][0].is_contiguous()
    cluster.average(got)
    assert torch.equal(got[0][0].reshape(-1), flat[0][0])
    assert all(map(torch.equal, cluster.memories(), memory))


def test_memories_are_saved_and_loaded(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.average(gradients(2, 0))
    saved = [replica.group.state_dict() for replica in cluster.replicas]
    through = gradients(2, 1)
    cluster.average(through)
    cluster.replicas.clear()
    cluster.join(2)
    for replica, state in zip(cluster.replicas, saved, strict=True):
        replica.group.load_state_dict(state)
        replica.manager.step = 1
    resumed = gradients(2, 1)
    cluster.average(resumed)
    assert torch.equal(resumed[0][0], through[0][0])


def test_what_is_wrong_is_told(cluster: Cluster) -> None:
    with pytest.raises(InputError, match="scheme must be a Scheme"):
        cluster.make("topk")
    with pytest.raises(InputError, match="decay"):
        cluster.make(sparcel.scheme("topk"), decay=1.5)
    cluster.join(2)
    cluster.replicas[0].group._manager = None
    with pytest.raises(InputError, match="follows no Manager"):
        cluster.replicas[0].group.allreduce([torch.ones(3)], SUM)


def test_the_stand_in_is_like_torchft() -> None:
    real = pytest.importorskip("torchft.process_group", reason="without torchft").ProcessGroupGloo
    assert_alike(stand_ins.ProcessGroupGloo, real)
    hook = stand_ins.ProcessGroupGloo._create_pg
    assert parameters(hook) == parameters(real._create_pg)


@pytest.mark.slow
def test_replicas_of_diloco_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    torchft = pytest.importorskip("torchft", reason="without torchft")
    from torchft._torchft import LighthouseServer
    from torchft.local_sgd import DiLoCo

    ours = fresh(monkeypatch, "sparcel.integrations.torchft")
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=2,
        join_timeout_ms=20_000,  # whoever has made a Manager is waited for
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1000,
    )
    first_ones, after_others = threading.Barrier(3), threading.Event()
    joined = threading.Event()

    def train(number: int, steps: int, waits: bool = False) -> tuple[list[Tensor], int]:
        """Train up to an outer step, as one replica, and return the parameters."""
        if waits:
            after_others.wait()
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        group = ours.SparseProcessGroup(sparcel.scheme("topk", density=0.1), TIMEOUT)
        manager = torchft.Manager(
            pg=group,
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=2,
            use_async_quorum=False,
            timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=lighthouse.address(),
            replica_id=f"replica_{number}",
        )
        group.follow(manager)
        joined.set() if waits else first_ones.wait()
        generator = torch.Generator().manual_seed(number)
        with DiLoCo(manager, [model], inner, outer, sync_every=2):
            while manager.current_step() < steps:
                inner.zero_grad()
                model(torch.randn(8, 20, generator=generator)).square().mean().backward()
                inner.step()
                if manager.current_step() == 3:
                    after_others.set()
                if manager.current_step() == 5:
                    joined.wait()
        manager.shutdown(wait=False)
        assert group.state_dict()
        return [p.detach() for p in model.parameters()], group._comm.size

    with ThreadPoolExecutor(4) as threads:
        leaving = threads.submit(train, 2, 3)
        staying = [threads.submit(train, number, 10) for number in range(2)]
        joining = threads.submit(train, 3, 10, True)
        try:
            for future in [leaving, *staying]:
                future.result(timeout=120)
        finally:
            after_others.set()
            joined.set()
        ends = [future.result(timeout=120) for future in [*staying, joining]]
    lighthouse.shutdown()
    assert [size for _, size in ends] == [3] * 3
    for parameters_there, _ in ends:
        assert all(map(torch.equal, parameters_there, ends[0][0]))
