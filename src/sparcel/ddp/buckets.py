"""How DDP lays the gradients of parameters into its buckets."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sparcel.training.ahead import Arrange


def as_in_buckets(parameters: Iterable[Tensor]) -> Arrange:
    """Return how memory lies: as DDP lays gradients, in the order of memory of the parameters."""
    strides = {id(one): one.stride() for one in parameters if _is_dense(one)}

    def arrange(memory: Tensor, parameter: Tensor) -> Tensor:
        if id(parameter) in strides:
            return memory.as_strided(parameter.shape, strides[id(parameter)])
        return memory.view(parameter.shape)

    return arrange


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements fill a range of memory, in whatever order."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    expected = 1
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride != expected:
            return False
        expected *= size
    return True
