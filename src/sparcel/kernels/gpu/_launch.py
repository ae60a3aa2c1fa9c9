"""How the kernels are started."""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run so many programs of a kernel on the device of its first argument, a tensor.

    Its work is queued on the device's current stream. No programs are no work.
    """
    if programs == 0:
        return
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*args, **constants)
    else:
        kernel[(programs,)](*args, **constants)
