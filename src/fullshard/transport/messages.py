"""Python values as tensors of bytes, which collectives carry.

Torch's own collectives of objects do the same by way of numpy, which this library does without.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor


def message_of(value: object, device: torch.device) -> Tensor:
    """Return the bytes of a picklable value, on a device."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def length_of(message: Tensor) -> Tensor:
    """Return the length of a message, as a tensor that is sent before it."""
    return torch.tensor([len(message)], device=message.device)


def value_in(message: Tensor) -> Any:
    """Return the value in a message, which another rank of this program has sent."""
    memory = bytearray(len(message))
    torch.frombuffer(memory, dtype=torch.uint8).copy_(message)
    return pickle.loads(memory)
