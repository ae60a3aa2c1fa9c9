"""The stand-in for a GPU counts what a GPU would have been given to do."""

import threading

import pytest
import torch

from sparcel.core import device
from tests.card import launches, moved, on_card

pytest.importorskip("triton")

from sparcel.core.kernels import gpu


def test_kernels_and_copies_are_counted_and_views_are_not() -> None:
    with on_card() as card:
        x = moved(torch.arange(6.0))
        with launches() as counted:
            x.view(2, 3)[1:].t().detach().reshape(-1)[None].to(x.dtype).contiguous()
            x.new_empty(3), torch.empty(3, device=card), torch.empty_like(x), x.split(2)
            x[:0].clone(), x.numel()
            assert counted.kernels() == len(counted.copies) == 0
            x.add_(1), x.double(), torch.zeros(3, device=card), torch.arange(3, device=card)
            x.view(2, 3).t().reshape(-1), x.to(torch.float32, copy=True)
            assert counted.torch == ["add_", "_to_copy", "zero_", "arange", "clone", "_to_copy"]
            assert counted.copies == []
            device.read(device.put([1.0], card, torch.float32))
            assert counted.copies == ["copy_", "read"]
            gpu.scatter(x, device.put([2], card, torch.int32), x[:1])
            assert counted.triton == ["_scatter"]
            assert counted.kernels() == 7


def test_the_work_of_other_threads_counts_where_asked() -> None:
    with on_card():
        x = moved(torch.ones(1))
        with launches() as own, launches(everywhere=True) as all_threads:
            other = threading.Thread(target=lambda: x.add(1))
            other.start()
            other.join()
            x.mul(2)
        x.div(2)
    assert (own.torch, all_threads.torch) == (["mul"], ["add", "mul"])
