"""AdamW with its state in 8 bits, in blocks of the whole parameters.

    optimizer = AdamW8bit(model.parameters(), lr=3e-4)

The state is in one of two forms, for each parameter:

    codes       8 bits and a scale for each block (`block_codes`): what a step leaves behind
    fp32        what users, state dicts and checkpoints see: the state of `torch.optim.AdamW`

Asking for `state` turns codes into fp32. The next step takes fp32 as it is, and leaves codes again. So a state that was
saved and loaded is computed with as if it had never left, bit by bit, on any number of ranks; and AdamW's own state is loaded
without being rounded first.

A step:

    1. fragments    averages of the parts of blocks at the edges of shards; the largest magnitude of each
    2. exchange     one all-reduce (maximum) of those of blocks that several ranks share; none if no block is shared
    3. fragments    update and codes, with the scales that were found; averages are computed again, rather than kept
    4. rows         whole blocks: averages, scale, update and codes, in one pass
    5. gather       with ``shard_over_replicas``: the parts that other replicas have updated (`eight_bit.replicas`)

An all-reduce of two numbers for each shared block is what a common scale costs. Blocks that end where shards do would need none,
but then the number of ranks would change the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.errors import ConfigurationError, UnsupportedError, UsageError, fault_paragraphs
from fullshard.optim.eight_bit.replicas import ReplicaBucket
from fullshard.optim.eight_bit.step import BlockStep, chunks_of_fragments, chunks_of_rows
from fullshard.optim.eight_bit.strips import BlockState, Strip, in_order_of
from fullshard.optim.eight_bit.update import stored_values
from fullshard.optim.fused_shards import like_param, local_of
from fullshard.optim.param_cuts import cuts_of_members, refuse_sparse_gradients
from fullshard.optim.replica_messages import STATES, check_bucket, raise_differences
from fullshard.transport import collectives
from fullshard.transport.streams import is_capturing

__all__ = ["AdamW8bit"]

_AVERAGES = ("exp_avg", "exp_avg_sq")


class AdamW8bit(torch.optim.AdamW):
    """`torch.optim.AdamW` whose state takes about 2 bytes for each element, rather than 8.

    It is used as AdamW is, on parameters of `fully_shard`, of the wrapper, and on others. `state` and state dicts are
    AdamW's, in fp32, and each loads the other's. All ranks must have the same parameters in the same order, also those of
    which a rank holds nothing, and call `step` alike.
    """

    takes_pieces = True
    COUNTS_ON_HOST = True
    """A step has other numbers each time, so `fullshard.graphed` does not capture it."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        block_size: int = 256,
        compile: bool | None = None,
        shard_over_replicas: bool = False,
        bucket_numel: int = 1 << 24,
    ) -> None:
        """Optimize parameters.

        Args:
            params: Parameters, named parameters or groups of them, as for AdamW.
            lr: Learning rate, also as a tensor.
            betas: As AdamW's.
            eps: As AdamW's.
            weight_decay: As AdamW's.
            maximize: As AdamW's.
            foreach: Has no effect. Parameters are updated in ranges of memory, whatever it is.
            block_size: Elements that have a scale in common, a power of 2 from 16 to 65536. Use the same on all ranks.
            compile: Whether to compile the update with `torch.compile`; by default on CUDA devices, where Triton is
                installed. Results differ in the last bits from those that are not compiled.
            shard_over_replicas: Whether replicas (of HSDP, or `replicate`) divide the state among them, as with
                `ShardedOptimizer`. Reading `state` and `state_dict` are collective then.
            bucket_numel: With ``shard_over_replicas``, how many elements of a shard are gathered in one message.
        """
        if type(block_size) is not int or block_size not in (1 << power for power in range(4, 17)):
            raise ConfigurationError(
                f"block_size must be a power of 2 from 16 to 65536, got {block_size!r}."
            )
        check_bucket(bucket_numel)
        self.block_size = block_size
        self._compile = compile
        self._bucket_numel = bucket_numel if shard_over_replicas else None
        self._begin()
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, foreach=foreach)

    def _begin(self) -> None:
        """Begin without state."""
        self._blocks: BlockState | None = None
        self._known_ids: list[list[int]] = []
        self._per_param: defaultdict[Any, Any] = defaultdict(dict)
        self._is_split = False
        """Whether `_per_param` has the state, as users see it."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1)
        except (ConfigurationError, UnsupportedError):
            self.param_groups.pop()
            raise

    def _check_options(self, number: int) -> None:
        group = self.param_groups[number]
        refused = [
            option for option in ("amsgrad", "capturable", "differentiable") if group[option]
        ]
        if refused:
            raise ConfigurationError(
                f"AdamW8bit has no {' and no '.join(refused)}, which group {number} asks for. Use torch.optim.AdamW."
            )

    def _check_group(self, number: int) -> None:
        self._check_options(number)
        group = self.param_groups[number]
        cuts = cuts_of_members(group["params"])
        strange = [
            f"{cuts[index][0].name or f'group {number}, parameter {index}'}: {param.dtype}"
            for index, param in enumerate(group["params"])
            if not param.is_floating_point()
        ]
        for paragraph in fault_paragraphs(
            strange,
            "AdamW8bit takes parameters of real floating-point numbers; these are others:",
            "Use torch.optim.AdamW for them.",
        ):
            raise UnsupportedError(paragraph)

    @property
    def state_bytes(self) -> int:
        """Memory of the state on this rank, in the form that it has now."""
        found = 0 if self._blocks is None else self._blocks.state_bytes
        if self._is_split:
            found += sum(
                local_of(value).nbytes
                for state in self._per_param.values()
                for value in state.values()
                if isinstance(value, Tensor)
            )
        return found

    # --- state as others see it -----------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The state of each parameter in fp32, sharded as the parameter is. The next step takes over what was changed."""
        if not self._is_split:
            self._split()
        return self._per_param

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._per_param = defaultdict(dict, state)
        self._is_split = True
        if self._blocks is not None:
            self._blocks.release()

    @property
    def shards_over_replicas(self) -> bool:
        """Whether replicas divide the state among them, where there are any."""
        return self._bucket_numel is not None

    def _split(self) -> None:
        """Turn codes into fp32."""
        self.state = self._whole_states(on_host=False)

    def states_to_save(self) -> Mapping[Any, Any]:
        """Return the content of `state`. With ``shard_over_replicas`` it is gathered into host memory. Collective then."""
        if self._is_split or not self.shards_over_replicas:
            return self.state
        return self._whole_states(on_host=True)

    def replace_states(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Let parameters have these states, and no others. Elements may be in host memory."""
        self.state = states
        self._current_blocks()
        self._join()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, which is AdamW's. With ``shard_over_replicas`` collective."""
        found = super().state_dict()
        if self.shards_over_replicas and self._blocks is not None:
            self._join()  # keeps this replica's part of what was gathered
        return found

    @torch.no_grad()
    def _whole_states(self, *, on_host: bool) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the state of each parameter, bucket by bucket. Collective, if replicas divide it."""
        if self._blocks is None:
            return {}
        self._check_replicas(self._blocks)
        found = {}
        for bucket, strips in self._blocks.turns:
            averages = {
                param: self._own_averages(strip, number)
                for strip in strips
                for number, param in enumerate(strip.params)
                if strip.has_state(number)
            }
            if bucket is not None:
                _gather(bucket, strips, averages)
            for param, values in averages.items():
                found[param] = {
                    "step": torch.tensor(float(self._blocks.steps_of(param))),
                    **{
                        key: like_param(param, value.cpu() if on_host else value)
                        for key, value in zip(_AVERAGES, values, strict=True)
                    },
                }
        params = (param for group in self.param_groups for param in group["params"])
        return {param: found[param] for param in params if param in found}

    def _own_averages(self, strip: Strip, number: int) -> list[Tensor]:
        """Return the averages of a parameter, like the parameter. Those of other replicas are zero."""
        param = strip.params[number]
        local = local_of(param).detach()
        averages = [torch.zeros_like(local, dtype=torch.float32) for _ in _AVERAGES]
        flat = [in_order_of(average, local) for average in averages]
        if number in strip.old:
            part = strip.own_part(number)
            torch._foreach_copy_([each[part] for each in flat], list(strip.old[number]))
        else:
            self._decode(strip, number, flat)
        return averages

    def _check_replicas(self, blocks: BlockState) -> None:
        """Raise an error unless replicas have counted the same steps of each parameter."""
        by_group: dict[ProcessGroup, list[nn.Parameter]] = {}
        for bucket, _ in blocks.turns:
            if bucket is not None:
                by_group.setdefault(bucket.group, []).extend(bucket.params)
        number_of = {
            param: f"group {number}, parameter {index} of shape {tuple(param.shape)}"
            for number, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
        }
        for process_group, params in by_group.items():
            counts = [blocks.steps_of(param) for param in params]
            by_replica = collectives.values_of_all_ranks(counts, process_group, STATES)
            raise_differences(
                f"{number_of[param]}: steps by replica {list(steps)}"
                for param, *steps in zip(params, *by_replica, strict=True)
                if len(set(steps)) > 1
            )

    def _decode(self, strip: Strip, number: int, into: Sequence[Tensor]) -> None:
        """Write the averages of a parameter, from their codes."""
        assert self._blocks is not None, "there are codes"
        start, size = strip.starts[number], strip.size
        every_row, fragments = strip.parts([number])
        for rows in chunks_of_rows(every_row, strip):
            span = slice(rows.start, rows.start + rows.count * size)
            scales = strip.scales[:, rows.slot : rows.slot + rows.count]
            values = stored_values(*strip.codes[:, span].view(2, -1, size), *scales)
            for out, value in zip(into, values, strict=True):
                out[span.start - start : span.stop - start] = value.flatten()
        table, width = self._blocks.tables[strip.memory.device], self._blocks.width
        for part in chunks_of_fragments(fragments, width):
            places, _ = part.elements(width)
            values = stored_values(*strip.codes[:, places], *table[:, part.slots])
            for out, value in zip(into, values, strict=True):
                out[places - start] = value

    @torch.no_grad()
    def _join(self) -> None:
        """Take over what users have left in `state`."""
        blocks = self._blocks
        assert blocks is not None, "it was made for these parameters"
        faults = []
        for number, group in enumerate(self.param_groups):
            self._check_options(number)  # loading has replaced them
            for index, param in enumerate(group["params"]):
                state = self._per_param.get(param)
                if not state:
                    continue
                text = f"group {number}, parameter {index} of shape {tuple(param.shape)}"
                missing = [key for key in ("step", *_AVERAGES) if key not in state]
                if missing:
                    faults.append(f"{text}: without {', '.join(missing)}")
                    continue
                locals_ = [_local_part(param, state[key]) for key in _AVERAGES]
                faults += [
                    f"{text}: {key} has shape {tuple(state[key].shape)}, or is on another mesh"
                    for key, local in zip(_AVERAGES, locals_, strict=True)
                    if local is None
                ]
                means, squares = locals_
                if means is not None and squares is not None:
                    strip, place = blocks.places[param]
                    strip.counts[place] = int(state["step"])
                    strip.old[place] = strip.own_averages(place, means, squares)
        for paragraph in fault_paragraphs(
            faults,
            "The state of a parameter must be that of AdamW, sharded as the parameter is; these are not:",
            "Load full tensors, and tensors on other meshes, with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict.",
        ):
            blocks.release()
            raise ConfigurationError(paragraph)
        self._per_param = defaultdict(dict)
        self._is_split = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` of this class or of AdamW has returned."""
        super().load_state_dict(state_dict)
        # torch has cast averages to the dtype of their parameter: take those in fp32 again.
        params = [param for group in self.param_groups for param in group["params"]]
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for param, key in zip(params, saved, strict=True):
            for name in _AVERAGES if param.dtype != torch.float32 else ():
                value = state_dict["state"].get(key, {}).get(name)
                if isinstance(value, Tensor):
                    moved = value.to(local_of(param).device)
                    self.state[param][name] = moved.clone() if moved is value else moved

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `load_state_dict`, or a copy, brings."""
        if "_blocks" not in self.__dict__:
            self._begin()
        others = {key: value for key, value in state.items() if key != "state"}
        self.__dict__.update(others)
        self.state = state["state"]
        super().__setstate__({})  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "block_size": self.block_size,
            "_compile": self._compile,
            "_bucket_numel": self._bucket_numel,
        }

    # --- steps ------------------------------------------------------------------------------------

    @torch_border.opaque_to_compiler
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; call ``closure`` first, if given, to compute them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_capturing():
            raise UsageError(
                "A step of AdamW8bit counts on the host, so it cannot be captured in a CUDA graph. Call it outside."
            )
        blocks = self._current_blocks()
        if self._is_split:
            self._join()
        gradients = [strip.shard.gradients() for strip in blocks.strips]
        if not all(map(_all_dense, gradients)):
            refuse_sparse_gradients(self)
        step = BlockStep(blocks, self._compile)
        for strip, of_strip in zip(blocks.strips, gradients, strict=True):
            self._add_strip(step, strip, of_strip)
        step.run()
        torch.autograd.graph.increment_version(step.written)
        return loss

    def _current_blocks(self) -> BlockState:
        """Return the blocks of the parameters as they are now."""
        ids = [list(map(id, group["params"])) for group in self.param_groups]
        if self._blocks is None or ids != self._known_ids or not self._blocks.fits:
            for number in range(len(self.param_groups)):
                self._check_group(number)  # users, and load_state_dict, may have changed it
            if not self._is_split:
                self._split()
            self._blocks = BlockState(
                [group["params"] for group in self.param_groups],
                self.block_size,
                self._bucket_numel,
            )
            self._known_ids = ids
        return self._blocks

    def _add_strip(self, step: BlockStep, strip: Strip, gradients: Sequence[Tensor | None]) -> None:
        """Add the work of a step in a strip: for parameters in codes and with the same number of steps together."""
        present = [number for number, each in enumerate(gradients) if each is not None]
        if not present:
            return
        group, counts = self.param_groups[strip.group], strip.counts
        gradient = strip.gradient(gradients)
        if group["maximize"]:
            gradient = gradient.neg()
        if not strip.old and counts.count(counts[0]) == len(counts) == len(present):
            count = counts[0] + 1
            strip.counts = [count] * len(counts)
            step.add(strip, present, gradient, group, count, None)
            return
        together: dict[tuple[int, int | None], list[int]] = {}
        for number in present:
            counts[number] += 1
            alone = number if number in strip.old else None
            together.setdefault((counts[number], alone), []).append(number)
        for (count, alone), numbers in together.items():
            old = None if alone is None else strip.old[alone]
            step.add(strip, numbers, gradient, group, count, old)


def _all_dense(gradients: Sequence[Tensor | None]) -> bool:
    strided = torch.strided
    # Of every parameter in every step, so in a list: a generator would be resumed for each.
    return all([each is None or each.layout is strided for each in gradients])  # noqa: C419


def _gather(
    bucket: ReplicaBucket,
    strips: Sequence[Strip],
    averages: Mapping[nn.Parameter, Sequence[Tensor]],
) -> None:
    """Write the parts of averages that other replicas have."""
    for kind in range(len(_AVERAGES)):
        segments = [
            [
                (start, in_order_of(averages[param][kind], local_of(param)))
                for param, start in zip(strip.params, strip.shard.starts, strict=True)
                if param in averages
            ]
            for strip in strips
        ]
        for message in bucket.messages(segments):
            message.start(STATES)
            message.land()


def _local_part(param: nn.Parameter, value: Any) -> Tensor | None:
    """Return this rank's part of an average in fp32, in the order of memory; None if it is not sharded as the parameter is."""
    local = local_of(param).detach()
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return None
    if isinstance(param, DTensor):
        if not isinstance(value, DTensor) or value.device_mesh != param.device_mesh:
            return None
        value = torch_border.redistributed_local(value, param.placements)
    elif isinstance(value, DTensor):
        return None
    return in_order_of(value.detach().to(local.device, torch.float32), local)
