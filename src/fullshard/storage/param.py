"""One parameter, sharded and unsharded.

    sharded parameter     over this rank's shard: what the user, the optimizer and state dicts see (`sharded_params`)
    unsharded parameter   over the gather buffer: what forward and backward compute with

Both are objects made once. To go from one state to the other is to put the other object on the modules that own the
parameter (`ParamSwap`). A `VersionGuard` makes sure that nothing computes with an unsharded parameter whose memory is
not there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fullshard import torch_border
from fullshard.errors import ConfigurationError
from fullshard.layout.placement import ParamPlacement, local_tensor
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.initial_values import InitialValues
from fullshard.storage.sharded_params import ParamModuleInfo, ShardedParam, mark_unsharded


class FSDPParam:
    """One parameter of a group; lives as long as the group."""

    def __init__(
        self,
        name: str,
        owners: Sequence[ParamModuleInfo],
        original: nn.Parameter,
        placement: ParamPlacement,
        shard_dim: int = 0,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name
        """Name in its group's module."""
        self._path = name
        self.owners = tuple(owners)
        self.placement = placement
        local = local_tensor(original)
        self.shape = tuple(local.shape)
        """Shape of the full local tensor, which this rank had before sharding."""
        self.strides = local.stride()
        self.shard_dim = shard_dim
        self._class = type(original)
        self._attributes = {
            name: value
            for name, value in original.__dict__.items()
            if type(local) is Tensor and name != torch_border.IN_BACKWARD_OPTIMIZERS
        }
        """Attributes that users have hung on the parameter; a tensor subclass keeps its data in there."""
        self.param_dtype = param_dtype
        """Dtype that was chosen for this parameter in the place of the policy's ``param_dtype``."""
        self.initial = InitialValues.of(local)
        """Some of its elements, until ranks have compared their initial weights; None also for a parameter without values."""
        self.original: nn.Parameter | None = original
        """The parameter as the user made it, until it is sharded."""
        self.sharded_param: ShardedParam
        """Its own, or shared with others of its group."""
        self.unsharded_param: Tensor | None = None
        self.trainable = original.requires_grad
        self.watched = False
        """Whether a hook tells when the unsharded parameter's gradient has been accumulated."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the shard; the group's policy says in which dtype it computes."""
        return (self.sharded_param.param if self.original is None else self.original).dtype

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Return the dtype of the unsharded parameter."""
        chosen = self.param_dtype or policy.param_dtype
        return chosen if chosen is not None and self.dtype.is_floating_point else self.dtype

    @property
    def the_original(self) -> nn.Parameter:
        """The parameter as the user made it; asked for before it is sharded."""
        assert self.original is not None, "a parameter is sharded once"
        return self.original

    def set_sharded_param(self, sharded_param: ShardedParam) -> None:
        """Let the modules have ``sharded_param`` while the parameter is sharded, from now on."""
        if self.initial is not None and self.original is not None:
            self.initial.note_shard(sharded_param.local)
        self.original = None
        self.sharded_param = sharded_param

    def make_unsharded_param(self, full: Tensor) -> None:
        """Make a leaf over the gathered local tensor.

        On the compute stream: autograd remembers the stream on which it first sees a leaf.
        """
        unsharded = self.sharded_param.unsharded(full, self.placement, trainable=self.trainable)
        if type(unsharded) is nn.Parameter:
            unsharded = torch_border.parameter_of_class(self._class, unsharded)
            unsharded.__dict__.update(self._attributes)
        self.unsharded_param = unsharded
        mark_unsharded(self.unsharded_param, self._path)
        self.watched = False

    def set_path(self, paths: Mapping[nn.Module, str]) -> None:
        """Let messages name it by its path in the model, whose modules have these paths."""
        self._path = self.owners[0].path_in(paths) or self._path
        if self.unsharded_param is not None:
            mark_unsharded(self.unsharded_param, self._path)

    def set_trainable(self, trainable: bool) -> None:
        """Let the unsharded parameter follow the sharded one's `requires_grad`."""
        self.trainable = trainable
        if self.unsharded_param is not None:
            self.unsharded_param.requires_grad_(trainable)


class ParamSwap:
    """Puts all sharded or all unsharded parameters of a group on their modules; made anew when one of them is.

    Twice per step for every parameter, so it writes where `nn.Module` keeps them, except on modules
    that do more on assignment.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._tables = []
        self._assigned = []
        self._memory = []
        for param in params:
            unsharded = param.unsharded_param
            assert unsharded is not None, "a swap is between two parameters"
            if type(unsharded.data) is Tensor:  # a subclass may exchange what it holds
                memory = torch_border.storage_id(unsharded)
                self._memory.append((param.name, unsharded, memory))
            for owner in param.owners:
                sharded = param.sharded_param.value_on(owner)
                if owner.plain:
                    table = torch_border.table_for(owner.module, sharded)
                    self._tables.append((table, owner.name, sharded, unsharded))
                else:
                    self._assigned.append((owner, sharded, unsharded))

    def replaced(self) -> list[str]:
        """Return names of unsharded parameters that are not on their modules any more, or not over the gathered memory."""
        found = [
            name for table, name, _, unsharded in self._tables if table.get(name) is not unsharded
        ]
        found += [
            owner.name
            for owner, _, unsharded in self._assigned
            if getattr(owner.module, owner.name, None) is not unsharded
        ]
        return found + [
            f"{name}.data"
            for name, unsharded, memory in self._memory
            if torch_border.storage_id(unsharded) != memory
        ]

    def to_sharded(self, writes: UnshardedWrites | None = None) -> bool:
        """Put the sharded parameters on the modules; but do nothing, and return False, if there are ``writes`` to be kept."""
        if writes is not None and writes.seen():
            return False
        for table, name, sharded, _ in self._tables:
            table[name] = sharded
        for owner, sharded, _ in self._assigned:
            owner.install(sharded)
        return True

    def to_unsharded(self) -> None:
        """Put the unsharded parameters on the modules."""
        for table, name, _, unsharded in self._tables:
            table[name] = unsharded
        for owner, _, unsharded in self._assigned:
            owner.install(unsharded)


_ABSENT_VERSIONS = itertools.count(1_000_000_000)


class VersionGuard:
    """Makes autograd raise an error when it needs unsharded parameters whose memory is not there.

    Otherwise it would read freed memory, which ends the process, or memory that a gather is still filling, which is
    silently wrong. Autograd compares the version of every tensor it saved; so while the memory is absent, parameters
    have another one. Setting it is one call for all of a group.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        """Guard the unsharded parameters, whose memory is there now."""
        self.absent_version = next(_ABSENT_VERSIONS)
        """The version of such a parameter in autograd's error."""
        self._tensors = tensors = tuple(
            p.unsharded_param for p in params if p.unsharded_param is not None
        )
        absent = (self.absent_version,) * len(tensors)
        # Called for every gather and release, so these are calls without a Python frame.
        self.memory_is_there: Callable[[], None]
        """Call to let work that is issued to the compute stream from now on use the parameters."""
        self.take_versions()
        self.memory_is_absent: Callable[[], None] = functools.partial(
            torch_border.set_versions, tensors, absent
        )
        """Call to let nothing use the parameters from now on."""

    def take_versions(self) -> None:
        """Let the versions that the parameters have now be those with which their memory is there."""
        present = torch_border.versions_of(self._tensors)
        self.memory_is_there = functools.partial(torch_border.set_versions, self._tensors, present)


_address_of = Tensor.data_ptr


class UnshardedWrites:
    """Notices the user's writes to unsharded parameters, so that they are not lost with the memory.

    Torch counts writes, but for those through ``param.data``. Data that were assigned to it are found by their address.
    """

    def __init__(self, params: Sequence[FSDPParam], fulls: Sequence[Tensor]) -> None:
        """Watch the parameters, which are over the data of ``fulls`` now."""
        self._params, self._fulls = params, fulls
        unsharded = [p.unsharded_param for p in params if p.unsharded_param is not None]
        # An operator on a DTensor counts there, one on its local tensor here. Nothing can be assigned to its data.
        self._counted = [
            [each, torch_border.local_of(each)] if isinstance(each, DTensor) else [each]
            for each in unsharded
        ]
        self._all_counted = list(itertools.chain.from_iterable(self._counted))
        self._places = [
            place
            for place, each in enumerate(self._counted)
            if len(each) == 1 and fulls[place].numel()  # an empty one has no address
        ]
        self._assignable = [unsharded[place] for place in self._places]
        self._first = next((each for each in fulls if each.numel()), None)
        self._offsets = self._offsets_of(fulls[place] for place in self._places)
        """Expected offsets of `_assignable` from `_first`: their memory is one piece, and moves as one."""
        self._forget()

    def _forget(self) -> None:
        """Take the parameters as they are now for unwritten."""
        self._versions = [*map(torch_border.sum_of_versions, self._counted)]
        self._sum = sum(self._versions)

    def seen(self) -> bool:
        """Return whether anything was written. Asked twice in every step, so no loop in Python."""
        if sum(map(torch_border.version_of, self._all_counted)) != self._sum:
            return True
        return self._offsets_of(self._assignable) != self._offsets

    def _offsets_of(self, tensors: Iterable[Tensor]) -> list[int]:
        base = 0 if self._first is None else self._first.data_ptr()
        return [*map(base.__rsub__, map(_address_of, tensors))]

    def take(self) -> dict[int, Tensor]:
        """Return the full data that were written, by their places, and take them for unwritten from now on.

        What was assigned is copied to where the data were, and the parameters are there again.

        Raises:
            ConfigurationError: data of another shape or on another device were assigned.
        """
        changed = {place for place in self._places if self._is_elsewhere(place)}
        for place in sorted(changed):
            self._put_back(place)
        for place, before in enumerate(self._versions):
            if torch_border.sum_of_versions(self._counted[place]) != before:
                changed.add(place)
        self._forget()
        return {place: self._fulls[place] for place in sorted(changed)}

    def _is_elsewhere(self, place: int) -> bool:
        return self._counted[place][0].data_ptr() != self._fulls[place].data_ptr()

    def _put_back(self, place: int) -> None:
        tensor, full = self._counted[place][0], self._fulls[place]
        assigned, tensor.data = tensor.data, full
        if assigned.shape != full.shape or assigned.device != full.device:
            raise ConfigurationError(
                "Data that are assigned to a gathered parameter must be like those it had; "
                f"{self._params[place].name}, of shape {tuple(full.shape)} on {full.device}, was assigned data of shape "
                f"{tuple(assigned.shape)} on {assigned.device}."
            )
        with torch_border.versions_kept((full,)):
            full.copy_(assigned)


PRE_ALL_GATHER, POST_ALL_GATHER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
"""Methods of an all-gather extension: see `engine.extension_codec`."""


def has_all_gather_extension(local: Tensor) -> bool:
    """Return whether a tensor has an all-gather extension."""
    return hasattr(local, PRE_ALL_GATHER) and hasattr(local, POST_ALL_GATHER)


def fits_in_buffers(local: Tensor) -> bool:
    """Return whether a parameter's local tensor is plain data, which a group's buffers can hold."""
    return type(local) is Tensor and not has_all_gather_extension(local)


def check_can_be_sharded(name: str, param: nn.Parameter) -> str | None:
    """Return why a parameter cannot be sharded, or None if it can."""
    local = local_tensor(param)
    if hasattr(local, PRE_ALL_GATHER) != hasattr(local, POST_ALL_GATHER):
        return (
            f"{name}: is a {type(local).__name__}, which has only one of fsdp_pre_all_gather and "
            "fsdp_post_all_gather"
        )
    if param.requires_grad and not (param.is_floating_point() or param.is_complex()):
        return f"{name}: is trainable but of dtype {param.dtype}"
    if param.layout is not torch.strided:
        return f"{name}: has layout {param.layout}"
    return None


def normalized_shard_dim(name: str, param: nn.Parameter, placement: object) -> int:
    """Return the dimension a `shard_placement_fn` asks for, checked and made non-negative."""
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ConfigurationError(
            "shard_placement_fn must return None, Shard(dim) or ShardPlacementResult(Shard(dim), mesh_info), "
            f"of fullshard.mesh, got {placement!r} for {name}."
        )
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(param.ndim, 1):
        raise ConfigurationError(
            f"shard_placement_fn returned {placement!r} for {name} of shape {tuple(param.shape)}: "
            f"it has {param.ndim} dimensions."
        )
    return dim
