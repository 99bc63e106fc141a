"""Parameters that do not lie in a group's buffers: tensor subclasses, and shards with an all-gather extension.

An extension is two methods with which a shard says how it travels:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (tensor, inner tensors)

Before a gather, the shard (an instance of the subclass) gives the tensors to send: quantised ones, say. Afterwards it
makes the full parameter of what was gathered, each output being the ranks' tensors one after the other along dimension
0; the first time it returns the parameter and the tensors that hold its data, later it writes into the parameter it
returned (``out``). Between uses the memory of outputs and inner tensors is released by resizing their storages.

The methods may be the subclass's, or be set on a shard (`param._local_tensor`) before the first forward.

A subclass without them travels as plain data: it is sharded and copied into plain memory by its own
operators (`narrow`, `new_zeros`, `copy_`), and compute gets a plain tensor, as with torch.

Every rank must send as many bytes as every other. If a shard has fewer rows than rank 0's, tensors with one row per row
of the shard are padded here; the full parameter loses the padding again. Sizes are compared before the first gather, and a
difference is an error on all ranks.

An extension may send other tensors in backward than in forward, as many and in the shapes that it likes (`Form`): row-wise
and column-wise quantised ones, say. Each form has outputs of its own, and sizes that are compared before its first gather.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fullshard import torch_border
from fullshard.errors import ConfigurationError
from fullshard.layout.segments import contiguous_strides
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.buffers import Buffer, release_storages, take_storages
from fullshard.storage.param import (
    POST_ALL_GATHER,
    PRE_ALL_GATHER,
    FSDPParam,
    has_all_gather_extension,
)
from fullshard.transport import collectives
from fullshard.transport.tags import tag

_SIZES = tag("sizes of all-gather extensions")

Form = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""The tensors that one gather sends of a parameter: dtype and shape of each."""


Messages = tuple[list[Tensor], list[Tensor]]
"""Bytes to gather into, and those that this rank sends."""


class _Outputs:
    """Memory that one form is gathered into."""

    def __init__(self, inputs: Sequence[Tensor], world: int) -> None:
        self.buffers: list[Buffer] = []
        self.tensors: list[Tensor] = []
        self.bytes: list[Tensor] = []
        # Made under inference_mode, what is a view of them could never be trained.
        with torch.inference_mode(False):
            for tensor in inputs:
                buffer = Buffer(tensor.nbytes * world, tensor.device)
                shape = (tensor.shape[0] * world if tensor.ndim else world, *tensor.shape[1:])
                self.buffers.append(buffer)
                self.tensors.append(buffer.view(tensor.dtype, 0, shape))
                # An alias: a gather into it is no change of the output that autograd would see.
                self.bytes.append(buffer.view(torch.uint8, 0, (buffer.nbytes,)))


class OutsideParam(ABC):
    """One parameter of a group that is gathered outside of its buffers, in the same call."""

    def __init__(self, param: FSDPParam, policy: MixedPrecisionPolicy) -> None:
        self.param = param
        self._dtype = param.param_dtype or policy.param_dtype or param.dtype
        self.inputs: list[Tensor] = []
        """Tensors that this rank sends; empty between gathers."""
        self._outputs_of: dict[Form, _Outputs] = {}
        self._outputs: Sequence[Tensor] = ()
        """Outputs of the gather in flight, or of the last one."""
        self._inner: Sequence[Tensor] = ()
        self.full: Tensor | None = None
        """The full local tensor, made by the first gather; its memory comes and goes."""

    @abstractmethod
    def prepare(self, device: torch.device) -> None:
        """Put the tensors that this rank sends into `inputs`; on the all-gather stream."""

    @abstractmethod
    def finish(self) -> None:
        """Make the full parameter of the gathered outputs; on the all-gather stream."""

    @property
    def form_in_common(self) -> Form:
        """The form of `inputs`, but for numbers of rows that are the shard's, and so may differ between ranks."""
        return tuple(
            (
                tensor.dtype,
                tuple(
                    -1 if not dim and n == self._rows else n for dim, n in enumerate(tensor.shape)
                ),
            )
            for tensor in self.inputs
        )

    @property
    def _rows(self) -> int:
        shard = self.param.sharded_param.local
        return shard.shape[0] if shard.ndim else 0

    def pad(self, sizes: Sequence[int]) -> bool:
        """Bring inputs to ``sizes`` bytes by rows of zeros; False if that does not make them so."""
        if len(sizes) != len(self.inputs):
            return False
        for index, (tensor, size) in enumerate(zip(self.inputs, sizes, strict=True)):
            missing = size - tensor.nbytes
            if missing == 0:
                continue
            if tensor.ndim == 0 or tensor.shape[0] != self._rows:
                return False
            row = (1, *tensor.shape[1:])
            row_bytes = tensor.new_empty(row).nbytes
            if missing < 0 or not row_bytes or missing % row_bytes:
                return False
            zeros = tensor.new_zeros((missing // row_bytes, *tensor.shape[1:]))
            self.inputs[index] = torch.cat([tensor, zeros])
        return True

    def messages(self, world: int) -> Messages:
        """Take memory for the outputs; return them and the inputs that are gathered into them, as bytes."""
        form = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in self.inputs)
        outputs = self._outputs_of.get(form)
        if outputs is None:
            outputs = self._outputs_of[form] = _Outputs(self.inputs, world)
        for buffer in outputs.buffers:
            buffer.allocate()
        self._outputs = outputs.tensors
        inputs = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in self.inputs]
        used = [index for index, tensor in enumerate(inputs) if tensor.numel()]
        return [outputs.bytes[i] for i in used], [inputs[i] for i in used]

    @property
    def _buffers(self) -> Iterator[Buffer]:
        for outputs in self._outputs_of.values():
            yield from outputs.buffers

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that outputs and full parameter have now."""
        held = sum(buffer.held_bytes for buffer in self._buffers)
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in self._inner}
        return held + sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    def release(self) -> None:
        """Give the memory back, to the stream that took it."""
        for buffer in self._buffers:
            buffer.release()
        release_storages(self._inner)


class WithExtension(OutsideParam):
    """A parameter whose shard has an all-gather extension."""

    def __init__(self, param: FSDPParam, policy: MixedPrecisionPolicy, mesh: DeviceMesh) -> None:
        super().__init__(param, policy)
        self._told: tuple[Any, ...] = (mesh,)
        """Arguments of the shard's `fsdp_pre_all_gather`."""
        if (
            len(inspect.signature(getattr(param.sharded_param.local, PRE_ALL_GATHER)).parameters)
            != 1
        ):
            # 1: as early versions of the extension had it
            shape = torch.Size(param.shape)
            module, own_policy = param.owners[0].module, policy.of_param(param.param_dtype)
            self._told += (shape, contiguous_strides(shape), module, own_policy)
        self._metadata: Any = None

    def prepare(self, device: torch.device) -> None:
        """See `OutsideParam`."""
        shard = self.param.sharded_param.local
        if shard.device != device:
            moved = shard.to(device, non_blocking=True)
            if not has_all_gather_extension(moved):  # the methods were set on the shard itself
                for name in (PRE_ALL_GATHER, POST_ALL_GATHER):
                    method = getattr(shard, name)
                    setattr(moved, name, MethodType(getattr(method, "__func__", method), moved))
            shard = moved
        before: Any = getattr(shard, PRE_ALL_GATHER)
        inputs, self._metadata = before(*self._told)
        self.inputs = list(inputs)

    def finish(self) -> None:
        """See `OutsideParam`."""
        after: Any = getattr(self.param.sharded_param.local, POST_ALL_GATHER)
        outputs = tuple(self._outputs)
        if self.full is None:
            tensor, inner = after(outputs, self._metadata, self._dtype)
            buffers = {buffer.data_ptr for buffer in self._buffers}
            # Tensors that lie in outputs have their memory.
            self._inner = [
                each for each in inner if each.untyped_storage().data_ptr() not in buffers
            ]
            if tuple(tensor.shape) != self.param.shape:
                tensor = tensor.narrow(0, 0, self.param.shape[0])
            self.full = tensor
        else:
            take_storages(self._inner)
            unsharded = self.param.unsharded_param
            out = self.full if unsharded is None else unsharded
            # Tensors that autograd saved of it for backward are to see the same values again.
            with torch_border.versions_kept((out, self.full, *self._inner)):
                after(outputs, self._metadata, self._dtype, out=out)
        self._metadata = None
        self.inputs = []


class WithoutExtension(OutsideParam):
    """A parameter of a subclass without an extension: it travels as plain data."""

    def __init__(self, param: FSDPParam, policy: MixedPrecisionPolicy, world: int) -> None:
        super().__init__(param, policy)
        if not param.dtype.is_floating_point:
            self._dtype = param.dtype
        self._dim = param.shard_dim
        shape = param.shape or (1,)
        self._full_rows = shape[self._dim]
        """Rows of the full parameter, along the sharded dimension, which is sent as the first."""
        self._row_shape = (*shape[: self._dim], *shape[self._dim + 1 :])
        self._most_rows = -(-self._full_rows // world)
        """Rows of the largest shard; others are padded, because all ranks must send the same number of bytes."""

    def prepare(self, device: torch.device) -> None:
        """See `OutsideParam`."""
        shard = self.param.sharded_param.local
        sent = torch.zeros((self._most_rows, *self._row_shape), dtype=self._dtype, device=device)
        rows = shard.shape[self._dim] if shard.ndim else 1
        target = sent.narrow(0, 0, rows).movedim(0, self._dim)
        (target if shard.ndim else target[0]).copy_(shard)
        self.inputs = [sent]

    def finish(self) -> None:
        """See `OutsideParam`."""
        if self.full is None:
            with torch.inference_mode(False):
                rows = self._outputs[0].narrow(0, 0, self._full_rows)
                full = rows.movedim(0, self._dim)
                self.full = full if self.param.shape else full[0]
        self.inputs = []


class Extension:
    """The codec of all parameters of one group that lie in no buffer: its messages travel in the call of the buffer's."""

    def __init__(
        self,
        members: Sequence[WithExtension | WithoutExtension],
        process_group: ProcessGroup | None,
        world: int,
        device: torch.device,
    ) -> None:
        """Gather over ``process_group``, which is None if there is no other rank, to ``device``."""
        self.members = tuple(members)
        self._group, self._world, self._device = process_group, world, device
        self._sizes_of: dict[object, list[list[int]]] = {}
        """Bytes of each parameter's inputs, by their form: agreed on before its first gather."""
        self._sizes: list[list[int]] = []
        """Sizes of the last gather."""

    def encode(self) -> Messages:
        """Return the messages to gather beside the buffer, on the current (all-gather) stream.

        Collective the first time, and when a parameter is sent in a new form.
        """
        outputs, inputs = list[Tensor](), list[Tensor]()
        for member in self.members:
            member.prepare(self._device)
        if self._group is not None:
            form = tuple(member.form_in_common for member in self.members)
            sizes = self._sizes_of.get(form)
            if sizes is None:
                sizes = self._sizes_of[form] = agree_on_sizes(self.members, self._group)
            self._sizes = sizes
        for index, member in enumerate(self.members):
            if self._group is not None:
                member.pad(self._sizes[index])
            into, sent = member.messages(self._world)
            outputs += into
            inputs += sent
        return outputs, inputs

    def decode(self) -> None:
        """Make the full parameters of the gathered outputs; on the all-gather stream."""
        for member in self.members:
            member.finish()

    def release(self) -> None:
        """Give the memory back, to the stream that took it."""
        for member in self.members:
            member.release()

    def abandon(self) -> None:
        """Give the memory back after a failure, in the place of `decode`."""
        for member in self.members:
            member.inputs = []
        self.release()

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that they have now."""
        return sum(member.held_bytes for member in self.members)

    @property
    def received_bytes(self) -> int:
        """Bytes of one gather that come from other ranks; 0 until sizes have been agreed on."""
        return sum(map(sum, self._sizes)) * (self._world - 1)


def agree_on_sizes(members: Sequence[OutsideParam], group: ProcessGroup) -> list[list[int]]:
    """Return the bytes that every rank sends, per parameter and input: those of rank 0, whose shards are largest.

    Collective, once per group and form.

    Raises:
        ConfigurationError: some rank's inputs can not be padded to that size; on all ranks.
    """
    mine: list[list[int]] = [[tensor.nbytes for tensor in member.inputs] for member in members]
    everybody = collectives.values_of_all_ranks(mine, group, _SIZES)
    sizes = everybody[0]
    fits = [member.pad(wanted) for member, wanted in zip(members, sizes, strict=True)]
    verdicts = collectives.values_of_all_ranks(fits, group, _SIZES)
    faults = [
        f"{member.param.name}: ranks would send {[ranks[index] for ranks in everybody]} bytes"
        for index, member in enumerate(members)
        if not all(verdict[index] for verdict in verdicts)
    ]
    if faults:
        raise ConfigurationError(
            f"{PRE_ALL_GATHER} must return tensors of the same size on every rank, or with one row for each row of "
            "the shard, which are then padded:\n  "
            + "\n  ".join(faults)
            + "\nPad them to the size of the largest shard."
        )
    return sizes
