"""MSTopK on a GPU takes what the definition takes, where the mean is exact."""

import pytest
import torch

from sparcel.kernels.definitions import mstopk as reference
from tests.strategies import same_bits

pytest.importorskip("triton")
from sparcel.kernels.gpu.mstopk import mstopk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("k", "samplings"), [(1, 30), (50, 4), (4000, 1), (4000, 30), (9000, 4)])
def test_mstopk_is_the_definition(k: int, samplings: int, dtype: torch.dtype) -> None:
    # Multiples of 1/4 up to 16: the mean is exact.
    generator = torch.Generator().manual_seed(k)
    x = (torch.randint(-64, 65, (8200,), generator=generator) / 4).to(dtype)
    asked = []

    def place(count: int) -> int:
        asked.append(count)
        return count // 3

    found = mstopk(x.to(DEVICE), k, samplings, place)
    expected = reference.mstopk(x, k, samplings, place)
    assert asked[0] == asked[1]
    assert all(same_bits(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_zeros_are_never_selected() -> None:
    for length in (0, 10):
        indices, values = mstopk(torch.zeros(length, device=DEVICE), 3, 5, lambda _: 0)
        assert indices.numel() == values.numel() == 0
