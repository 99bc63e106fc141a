"""Tensors in host memory beside a virtual device: with offload, shards, gradients and optimizer state are there.

They are real tensors of the CPU, so that the engine and optimizers decide as they would in a run. But no operation writes to
them, and memory that was never written takes none. So nothing is computed: an operation runs on the meta device, for the
sizes of its results.

    no kernel               views and empty tensors: run as they are
    host and device         a transfer on the current stream. The host waits for it, unless it was told not to and the memory
                            is pinned
    host alone              the host computes

Small tensors that are made from nothing are left alone and have values: optimizers count their steps in them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

from fullshard import torch_border
from fullshard.virtual.observer import Call, Transfer
from fullshard.virtual.operations import FILLS, starts_work

META = torch.device("meta")
LEAST_BYTES = 1024
"""Tensors of the CPU that are made from nothing and are smaller have values."""
_COPY = torch.ops.aten.copy_.default
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}


class Noting(Protocol):
    """Receiver of reports about host memory: the device."""

    is_building: bool

    def note_transfer(self, transfer: Transfer) -> None:
        """Note a copy on the current stream."""

    def note_host_operation(self, call: Call, meta: Call) -> None:
        """Note that the host computes; ``meta`` is the same call on the meta device."""

    def see(self, storage: UntypedStorage) -> None:
        """Note memory that is new."""


class _Storage(NamedTuple):
    reference: weakref.ref[UntypedStorage]
    is_pinned: bool


class HostMemory:
    """The storages of host memory that have no values, and what is done with them."""

    def __init__(self, noting: Noting) -> None:
        self._noting = noting
        self._storages: dict[int, _Storage] = {}

    def has(self, storage: UntypedStorage) -> bool:
        """Whether the storage is in host memory, and has no values."""
        return torch_border.id_of_storage(storage) in self._storages

    def nbytes(self, storage: UntypedStorage) -> int:
        """Return the bytes that a storage takes. torch rounds pinned memory up to a power of two."""
        nbytes = storage.nbytes()
        found = self._storages.get(torch_border.id_of_storage(storage))
        is_rounded = nbytes and found is not None and found.is_pinned
        return 1 << (nbytes - 1).bit_length() if is_rounded else nbytes

    def pin(self, memory: Tensor) -> None:
        """Note that memory is page-locked from now on."""
        self._add(memory)
        key = torch_border.storage_id(memory)
        self._storages[key] = self._storages[key]._replace(is_pinned=True)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that has to do with host memory, and note it; NotImplemented if it has not."""
        tensors = [
            each for each in torch_border.leaves_in((args, kwargs)) if isinstance(each, Tensor)
        ]
        ours = [each for each in tensors if self._is_ours(each)]
        if func is _COPY and args[0].is_cpu and args[1].is_meta and not ours:
            ours = [self._add(args[0])]  # what it had is lost
        device = kwargs.get("device")
        is_made_here = device is not None and device.type == "cpu"
        if not ours and not is_made_here:
            return NotImplemented
        name = torch_border.signature_of(func).name
        if func is torch_border.VALUE_OF:
            return 1.0 if args[0].is_floating_point() else 1
        if not starts_work(func):
            return self._without_kernel(name, func, args, kwargs)
        goes_to_device = device is not None and device.type == "meta"
        if name in COPIES and (goes_to_device or any(each.is_meta for each in tensors)):
            return self._transfer(name, func, args, kwargs)
        if any(each.is_meta for each in tensors) and name not in FILLS:
            return NotImplemented  # a number of the host goes along with the launch
        if not ours:
            if self._noting.is_building or name not in FILLS:
                return NotImplemented
            if func(*args, **kwargs | {"device": META}).nbytes < LEAST_BYTES:
                return NotImplemented
        return self._compute(func, args, kwargs)

    def _is_ours(self, tensor: Tensor) -> bool:
        return tensor.is_cpu and torch_border.storage_id(tensor) in self._storages

    def _add(self, tensor: Tensor, *, is_pinned: bool = False) -> Tensor:
        """Take a new tensor of the CPU as one without values."""
        storage = tensor.untyped_storage()
        key = torch_border.id_of_storage(storage)
        if key not in self._storages:
            reference = weakref.ref(storage, lambda _: self._storages.pop(key))
            self._storages[key] = _Storage(reference, is_pinned)
            self._noting.see(storage)
        return tensor

    def _without_kernel(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "is_pinned":
            return self._storages[torch_border.storage_id(args[0])].is_pinned
        if name == "_pin_memory":
            return self._add(torch.empty_like(args[0]), is_pinned=True)
        is_pinned = bool(kwargs.get("pin_memory"))
        result = func(*args, **{**kwargs, "pin_memory": False} if is_pinned else kwargs)
        if isinstance(result, Tensor) and result.is_cpu and name.startswith(("empty", "new_empty")):
            if is_pinned or result.nbytes >= LEAST_BYTES or self._any_ours(args):
                self._add(result, is_pinned=is_pinned)
        return result

    def _any_ours(self, args: Sequence[Any]) -> bool:
        return any(isinstance(each, Tensor) and self._is_ours(each) for each in args)

    def _transfer(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a copy from or to the device, and return what it returns."""
        if name == "_to_copy":
            source = args[0]
            target = func(source.to(META) if source.is_cpu else source, **kwargs | {"device": META})
            if source.is_cpu:
                self._noting.see(target.untyped_storage())
            else:
                target = self._add(torch.empty_like(target, device="cpu"))
            sources, targets = [source], [target]
            is_told_to_go_on = bool(kwargs.get("non_blocking"))
        else:
            target = args[0]
            targets, sources = (
                list(each) if isinstance(each, list | tuple) else [each] for each in args[:2]
            )
            is_told_to_go_on = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        on_host = sources[0] if sources[0].is_cpu else targets[0]
        known = self._storages.get(torch_border.storage_id(on_host))
        is_pinned = known is not None and known.is_pinned
        waits = not (is_pinned and is_told_to_go_on)
        self._noting.note_transfer(Transfer(sources, targets, is_pinned=is_pinned, waits=waits))
        return target

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note that the host computes, and return tensors like those that it would compute."""
        stand_ins = _StandIns()
        meta_args = torch_border.with_tensors(stand_ins.of, args)
        meta_kwargs = torch_border.with_tensors(stand_ins.of, kwargs)
        if "device" in meta_kwargs:
            meta_kwargs["device"] = META
        result = func(*meta_args, **meta_kwargs)

        def made(meta: Tensor) -> Tensor:
            original = stand_ins.original(meta)
            if original is not None:
                return original
            return self._add(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype))

        results = torch_border.with_tensors(made, result)
        self._noting.note_host_operation(
            Call(func, args, kwargs, results), Call(func, meta_args, meta_kwargs, result)
        )
        return results


class _StandIns:
    """Tensors on the meta device in the place of those in host memory, with the same memory in common."""

    def __init__(self) -> None:
        self._storages: dict[int, UntypedStorage] = {}
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}
        """Each stand-in and its original, by the identity of the stand-in."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a tensor."""
        key = torch_border.storage_id(tensor)
        if key not in self._storages:
            self._storages[key] = UntypedStorage(tensor.untyped_storage().nbytes(), device=META)
        stand_in = torch.empty(0, dtype=tensor.dtype, device=META).set_(
            self._storages[key], tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        self._originals[id(stand_in)] = stand_in, tensor
        return stand_in

    def original(self, stand_in: Tensor) -> Tensor | None:
        """Return the tensor that a result is; None if the result is new."""
        found: tuple[Tensor, Tensor] | None = self._originals.get(id(stand_in))
        return None if found is None else found[1]
