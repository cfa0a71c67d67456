"""Host tensors -> a device, without waiting for what the device is still doing."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` in the order of its work; an ordinary copy would first wait until the GPU is idle."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
