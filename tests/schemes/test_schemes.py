"""Particular properties of each scheme: the coordinates that it selects, sends and keeps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import simulate
from sparcel.core.formats.message import HEADER_BYTES
from sparcel.core.schemes import SCHEMES as TABLE
from sparcel.core.schemes import Costs, Request
from sparcel.errors import InputError, MismatchError
from tests.collectives.test_others import largest, tree
from tests.schemes.steps import copy_of, integers, normal, run, total

# Not auto, which is dense for such small vectors; test_auto.py tests its memory.
REMEMBERING = [name for name in TABLE if name != "auto" and sparcel.scheme(name).remembers]

densities = st.floats(0.001, 0.999)


def step_once(make, world, gradients):
    """Do one step; return the update, and the memories and meters by rank."""

    def on_rank(comm):
        scheme, costs = make(), Costs()
        update = scheme.step(gradients[comm.rank].clone(), comm, request=Request(costs=costs))
        return update, scheme.memory, costs

    results = simulate(world, on_rank).results
    return results[0][0], [memory for _, memory, _ in results], [costs for _, _, costs in results]


@given(densities, st.integers(0, 300), st.sampled_from(["topk", "gtopk"]))
def test_topk_and_gtopk_select_the_ceiling_of_density_times_size(density, size, name):
    gradient = integers(0, 0, size)
    k = max(1, math.ceil(density * size))
    update, (memory,), (costs,) = step_once(
        lambda: sparcel.scheme(name, density=density), 1, [gradient]
    )
    kept, rest = largest(gradient, k)
    assert costs.selected == min(k, int(gradient.count_nonzero()))
    assert torch.equal(update, kept)
    assert torch.equal(memory, rest)


@given(densities, st.integers(0, 2000))
def test_papers_sparcml_selects_a_fixed_number_of_every_512(density, size):
    gradient = integers(0, 0, size)
    share = max(1, math.ceil(density * size)) / max(1, size)
    k = max(1, round(min(512, size) * share))
    update, (memory,), _ = step_once(
        lambda: sparcel.scheme("sparcml", density=density, selector="bucketed"), 1, [gradient]
    )
    buckets = [largest(bucket, k) for bucket in gradient.split(512)] if size else []
    assert torch.equal(update, torch.cat([torch.empty(0), *(kept for kept, _ in buckets)]))
    assert torch.equal(memory, torch.cat([torch.empty(0), *(rest for _, rest in buckets)]))


def test_sparcml_without_bits_is_topk():
    gradients = [normal(rank, 0, 5000) for rank in range(4)]
    schemes = [lambda name=name: sparcel.scheme(name, density=0.05) for name in ("sparcml", "topk")]
    (one, *_), (other, *_) = (step_once(make, 4, gradients) for make in schemes)
    assert torch.equal(one, other)


def test_papers_sparcml_rounds_its_count_and_sends_at_least_one():
    for density, count in ((0.0001, 1), (0.01, 5), (0.0078125, 4), (0.9995, 512)):
        gradient = 1 + torch.arange(51200.0)
        scheme = sparcel.scheme("sparcml", density=density, selector="bucketed")
        meters = step_once(lambda: scheme.fresh(), 1, [gradient])[2]  # noqa: B023
        assert meters[0].selected == 100 * count


@given(st.integers(1, 17), st.integers(1, 300), densities, st.sampled_from(["topk", "sparcml"]))
def test_update_is_the_mean_of_the_ranks_selections(world, size, density, name):
    gradients = [integers(rank, 0, size) for rank in range(world)]
    update, memories, _ = step_once(lambda: sparcel.scheme(name, density=density), world, gradients)
    sent = total(gradients) - total(memories)
    assert torch.equal(update, (sent / world).float())


@given(st.integers(1, 17), st.integers(1, 60), st.floats(0.02, 0.4), st.integers(0, 30))
def test_gtopk_update_equals_the_tree_of_the_gathered_selections(world, size, density, seed):
    """An oracle computes the tree in dense vectors; each rank's memory holds what it dropped."""
    gradients = [integers(rank + seed, seed, size) for rank in range(world)]
    k = max(1, math.ceil(density * size))
    chosen = [largest(gradient, k) for gradient in gradients]
    expected, dropped = tree([kept for kept, _ in chosen], k)
    update, memories, _ = step_once(
        lambda: sparcel.scheme("gtopk", density=density), world, gradients
    )
    assert torch.equal(update, (expected / world).float())
    for memory, (_, rest), drop in zip(memories, chosen, dropped, strict=True):
        assert torch.equal(memory.double(), rest + drop)


def test_gtopk_of_two_ranks_is_the_topk_of_the_gathered_sum():
    gradients = [integers(rank, 3, 100) for rank in range(2)]
    oracle, _ = largest(sum(largest(gradient, 10)[0] for gradient in gradients), 10)
    update, _, _ = step_once(lambda: sparcel.scheme("gtopk", density=0.1), 2, gradients)
    assert torch.equal(update, oracle / 2)


# Four ranks, k = 1. Rank 0 meets rank 1's 4 at coordinate 1 and drops it for its own 5; on the
# other branch 3 and 4 add up to 7 there, which wins. By the paper's rule rank 1 takes nothing back,
# because its coordinate won, and its 4 is lost.
BRANCHES = [[5.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 3.0, 0.0], [0.0, 4.0, 0.0]]


def gtopk_on_branches(put_back):
    make = lambda: sparcel.scheme("gtopk", density=0.3, put_back=put_back)  # noqa: E731
    update, memories, _ = step_once(make, 4, [torch.tensor(row) for row in BRANCHES])
    assert update.tolist() == [0, 7 / 4, 0]  # the right pair's 7 beats the left pair's 5
    return total(memories), 4 * update.double() + total(memories)


def test_papers_rule_loses_a_sum_dropped_on_one_branch_that_wins_on_another():
    memories, together = gtopk_on_branches("own")
    assert memories.tolist() == [5, 0, 0]
    assert together.tolist() == [5, 7, 0]


def test_conserving_rule_keeps_a_sum_dropped_on_one_branch():
    memories, together = gtopk_on_branches("dropped")
    assert memories.tolist() == [5, 4, 0]
    assert together.tolist() == torch.tensor(BRANCHES).sum(dim=0).tolist() == [5, 11, 0]


@pytest.mark.parametrize("format", ["raw", "packed:8"])
@pytest.mark.parametrize("density", [0.1, 0.9])
@pytest.mark.parametrize("name", ["gtopk", "oktopk"])
def test_papers_rule_takes_back_values_that_did_not_win(name, density, format):
    """Unrounded, also where a format rounded them before they lost."""
    make = lambda: sparcel.scheme(name, density=density, put_back="own", format=format)  # noqa: E731
    gradients = [integers(rank, 0, 50) for rank in range(2)]
    update, memories, _ = step_once(make, 2, gradients)
    for gradient, memory in zip(gradients, memories, strict=True):
        lost = update == 0
        assert torch.equal(memory[lost], gradient[lost])


@pytest.mark.parametrize("density", [0.02, 0.5])
def test_rounding_errors_stay_with_the_rank_that_rounded(density):
    """A rank keeps those of the values that it sent, and an owner those of its region's sum."""
    world, size = 4, 512 * 4
    gradients = [normal(rank, 0, size) for rank in range(world)]
    make = lambda bits: lambda: sparcel.scheme("sparcml", density=density, bits=bits)  # noqa: E731
    plain, kept, _ = step_once(make(None), world, gradients)
    rounded, memories, _ = step_once(make(2), world, gradients)
    assert not torch.equal(plain, rounded)
    errors = torch.stack([memories[rank] - kept[rank] for rank in range(world)])
    torch.testing.assert_close(errors.sum(0), world * (plain - rounded), atol=1e-5, rtol=0)
    for rank, error in enumerate(errors):
        sent, mine = kept[rank] == 0, torch.arange(size) // 512 == rank
        assert not bool(error[~(sent | mine)].any())
        for region in range(world):  # one that no rank but its owner rounds would leave some at 0
            assert bool(error[region * 512 : region * 512 + 512].any())
        assert bool(error[mine & ~sent].any())


@pytest.mark.parametrize("density", [16 / 512, 0.25])
def test_fed_back_rounding_errors_do_not_grow(density):
    """With 2 bits they would."""

    def norm(bits):
        make = lambda: sparcel.scheme("sparcml", density=density, bits=bits)  # noqa: E731
        memories = run(make, 4, 40, 512 * 4, normal)[1]
        return sum(float(memory[-1].norm()) for memory in memories)

    exact = norm(None)
    assert norm(8) < 1.02 * exact
    assert norm(4) < 1.2 * exact


@pytest.mark.parametrize("bits", [None, 2, 4, 8])
def test_a_sum_that_stays_sparse_takes_the_bytes_of_few_bits(bits):
    """SparCML's section 8.3: 16 of every 512 coordinates, the same ones on 8 ranks."""
    world, size = 8, 512 * 64
    exact = "topk", {"algorithm": "split_allgather"}
    name, settings = exact if bits is None else ("sparcml", {"bits": bits})

    def on_rank(comm):
        scheme = sparcel.scheme(name, density=16 / 512, **settings)
        update = scheme.step(normal(0, comm.rank, size) * (torch.arange(size) % 32 == 5), comm)
        assert 0 < update.count_nonzero() <= 16 * 64
        return comm.traffic.volume

    def padded(nbytes):
        return -(-nbytes // 8) * 8

    values = 4 * 128 if bits is None else padded(4) + padded(128 * bits // 8)
    expected = 2 * (world - 1) * (40 + 4 * 128 + values)
    assert simulate(world, on_rank).results == [expected] * world


def test_quantised_updates_are_unbiased():
    """The mean over seeds comes within five standard errors of the exact update."""
    gradients = [normal(rank, 0, 64) for rank in range(4)]
    exact, _, _ = step_once(lambda: sparcel.scheme("sparcml", density=1), 4, gradients)
    make = lambda seed: lambda: sparcel.scheme("sparcml", density=1, bits=2, seed=seed)  # noqa: E731
    rounds = torch.stack([step_once(make(seed), 4, gradients)[0] for seed in range(100)])
    bound = 5 * rounds.std(dim=0) / 100**0.5 + 1e-6
    assert bool(((rounds.mean(dim=0) - exact).abs() <= bound).all())


@pytest.mark.parametrize("density", [0.05, 0.99])
def test_every_step_uses_new_random_rounding(density):
    """The first step of an equal memory, and of another number of steps, rounds otherwise."""

    def on_rank(comm):
        updates = []
        for done in (0, 0, 1):
            scheme = sparcel.scheme("sparcml", density=density, bits=2)
            scheme.steps = done
            updates.append(scheme.step(normal(comm.rank, 0, 512), comm))
        return updates

    for one, again, other in simulate(4, on_rank).results:
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", REMEMBERING)
def test_memory_is_float32_or_wider(name, dtype):
    """Values too small for a half-precision memory still accumulate."""

    def on_rank(comm):
        scheme = sparcel.scheme(name, density=0.001, **({"momentum": 0} if name == "dgc" else {}))
        gradient = torch.full((600,), 100, dtype=dtype)
        gradient[-1] = 2.0**-12
        for _ in range(8):
            scheme.step(gradient.clone(), comm)
        return copy_of(scheme.memory)

    for memory in simulate(2, on_rank).results:
        assert memory.dtype == torch.float32
        assert memory[-1] == 8 * 2.0**-12


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_half_precision_wire_halves_the_bytes_and_rounds_values(wire):
    def on_rank(comm):
        scheme = sparcel.scheme("dense", wire=wire)
        scheme.step(integers(comm.rank, 0, 400), comm)
        before = comm.traffic.bytes_sent
        update = scheme.step(integers(comm.rank, 1, 400), comm)
        return update, comm.traffic.bytes_sent - before

    exact = total(integers(rank, 1, 400) for rank in range(4)) / 4
    for update, sent in simulate(4, on_rank).results:
        assert torch.equal(update.double(), exact)  # quarters of small integers fit
        assert update.dtype == torch.float32
        assert sent == 3 * HEADER_BYTES + 2 * 3 * 100 * 2


def test_dense_averages_before_it_sums():
    """The average 100 · 60000 / 100 fits float16; the sum does not."""
    updates, _ = run(
        lambda: sparcel.scheme("dense", wire="float16"), 4, 1, 8, lambda *_: torch.full((8,), 6e4)
    )
    assert updates[0][0].tolist() == [60000] * 8


BAD = [
    ("topk", {"density": 0}, r"density must lie in \(0, 1\], got 0$"),
    ("topk", {"density": -0.5}, r"density must lie in \(0, 1\], got -0.5$"),
    ("gtopk", {"density": 3}, r"got 3; for a percentage pass density=0.03"),
    ("sparcml", {"density": 1.5}, r"got 1.5; for a percentage pass density=0.015"),
    ("topk", {"density": 1000}, r"got 1000$"),
    ("topk", {"density": float("nan")}, r"got nan"),
    (
        "topkk",
        {},
        r"scheme cannot be 'topkk'; did you mean 'topk' or .*\? It must be one of bidirectional,",
    ),
    ("sparkml", {}, r"did you mean 'sparcml'\?"),
    (
        "powersgd",
        {},
        r"scheme cannot be 'powersgd'; it must be one of bidirectional, dense, topk, .*, dgc$",
    ),
    ("topk", {"densty": 0.1}, r"a setting of scheme 'topk' .*did you mean 'density'\?"),
    (
        "dense",
        {"density": 0.1},
        r"a setting of scheme 'dense' cannot be 'density'; it must be one of wire$",
    ),
    ("dense", {"wire": "bfloat"}, r"wire cannot be 'bfloat'; did you mean 'bfloat16' or"),
    ("topk", {"algorithm": "rign"}, r"algorithm cannot be 'rign'; did you mean 'ring'\?"),
    ("topk", {"algorithm": "gtopk"}, r"not an all_reduce.*train with the scheme 'gtopk'"),
    ("gtopk", {"put_back": "drop"}, r"put_back cannot be 'drop'; did you mean 'dropped'\?"),
    ("oktopk", {"put_back": "owner"}, r"put_back cannot be 'owner'; did you mean 'own'\?"),
    ("bidirectional", {"answer": "auto"}, r"answer .*'auto'"),
    ("sparcml", {"bits": 9}, r"bits must lie in \[2, 8\], got 9"),
]


@pytest.mark.parametrize(("name", "settings", "message"), BAD, ids=[str(bad[:2]) for bad in BAD])
def test_errors_name_bad_settings_and_the_fix(name, settings, message):
    with pytest.raises(InputError, match=message):
        sparcel.scheme(name, **settings)


@pytest.mark.parametrize(
    ("gradient", "out", "message"),
    [
        (
            torch.ones(2, 3),
            None,
            r"one-dimensional float tensor, got torch.float32 of shape \(2, 3\)",
        ),
        (torch.ones(6, dtype=torch.int32), None, r"got torch.int32"),
        (torch.ones(12)[::2], None, r"contiguous .* strides \(2,\)"),
        (torch.ones(6), torch.ones(7), r"out must be torch.float32 of shape \(6,\).*got .*\(7,\)"),
        (torch.ones(6), torch.ones(6).double(), r"out must be torch.float32 .*got torch.float64"),
    ],
    ids=["rows", "integers", "strided", "out of another size", "out of another dtype"],
)
@pytest.mark.parametrize("name", TABLE)
def test_bad_gradients_are_refused(name, gradient, out, message):
    with pytest.raises(InputError, match=message):
        simulate(2, lambda comm: sparcel.scheme(name).step(gradient, comm, out))


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_scheme_serves_one_vector(name):
    def on_rank(comm):
        scheme = sparcel.scheme(name)
        scheme.step(torch.ones(20), comm)
        scheme.step(torch.ones(21), comm)

    with pytest.raises(InputError, match=r"remembers a vector of 20 coordinates.* gradient of 21"):
        simulate(2, on_rank)


def test_a_dropped_sum_that_overflows_stays_finite_in_memory():
    """Rank 0 owes 3e38, and drops a partial sum of 3.2e38 of the same coordinate on top of it."""
    gradients = [torch.tensor([3.3e38, 3e38]), torch.tensor([0.0, 3.2e38])]

    def on_rank(comm):
        scheme = sparcel.scheme("gtopk", density=0.5)
        scheme.step(gradients[comm.rank], comm)
        return scheme.memory

    memories = simulate(2, on_rank).results
    assert all(torch.isfinite(memory).all() for memory in memories)
    assert memories[0][1] == torch.finfo(torch.float32).max


@pytest.mark.parametrize("name", REMEMBERING)
def test_state_does_not_change_while_training_continues(name):
    def on_rank(comm):
        scheme = sparcel.scheme(name, density=0.1)
        scheme.step(integers(comm.rank, 0, 600), comm)
        state = scheme.state_dict()
        kept = state["memory"].clone()
        for step in (1, 2, 3):
            scheme.step(integers(comm.rank, step, 600), comm)
        return torch.equal(state["memory"], kept)

    assert simulate(2, on_rank).results == [True, True]


BAD_CALLS = {
    "another size": lambda scheme, comm: scheme.step(torch.ones(7), comm),
    "strided out": lambda scheme, comm: scheme.step(torch.ones(8), comm, out=torch.ones(16)[::2]),
    "out beside in_place": lambda scheme, comm: scheme.step(
        torch.ones(8), comm, out=torch.ones(8), in_place=True
    ),
    "integers": lambda scheme, comm: scheme.step(torch.ones(8, dtype=torch.int32), comm),
    "an operation that the engine lacks": lambda scheme, comm: sparcel.all_reduce(
        sparcel.SparseStream.from_dense(torch.ones(8)),
        sparcel.Op(torch.hypot, 0),
        algorithm="dense",
        group=comm,
    ),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input_of_all_ranks_leaves_the_communicator_alive(call):
    def on_rank(comm):
        scheme = sparcel.scheme("topk", density=0.5)
        scheme.step(torch.ones(8), comm)
        with pytest.raises(InputError):
            call(scheme, comm)
        return scheme.step(torch.ones(8, requires_grad=True), comm)

    assert simulate(2, on_rank).results[0].isfinite().all()


def test_dense_refuses_another_size_in_a_later_step():
    def on_rank(comm):
        scheme = sparcel.scheme("dense")
        scheme.step(torch.ones(8), comm)
        scheme.step(torch.ones(8 + comm.rank), comm)

    with pytest.raises(MismatchError, match="size=9"):
        simulate(2, on_rank)
