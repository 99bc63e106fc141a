"""Muon on sharded parameters: each matrix is orthogonalised once, by its owner.

    optimizer = Muon(model, lr=2e-2)

A step, for the matrices of one process group:

    1. momentum                 elementwise, on shards
    2. gather                   all-to-all: pieces go to the owners           bucket k + 1 is on its way
    3. Newton-Schulz            at the owners, batched by shape               while bucket k is computed
    4. scatter                  all-to-all: pieces of updates come back
    5. weight decay and update  elementwise, on shards

AdamW updates what is not a hidden matrix. The state of each parameter is sharded as the parameter is, so checkpoints treat
it as Adam's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from fullshard import torch_border
from fullshard.errors import ConfigurationError, UnsupportedError, UsageError, fault_paragraphs
from fullshard.mesh.axes import global_rank
from fullshard.optim.fused_shards import like_param, local_of
from fullshard.optim.matrices.newton_schulz import COEFFICIENTS, orthogonalize
from fullshard.optim.matrices.owners import Bucket, CutParam, Matrix, plan_buckets
from fullshard.optim.param_cuts import (
    ParamCut,
    check_backend,
    listed,
    param_cuts,
    refuse_sparse_gradients,
)
from fullshard.transport import collectives
from fullshard.transport.streams import is_capturing
from fullshard.transport.tags import Tag, tag

__all__ = ["Muon", "hidden_matrices"]

Scale = Literal["match_rms_adamw", "original"]

_STATE = {True: "momentum_buffer", False: "exp_avg"}
"""A state that a parameter has, by its group's ``use_muon``."""

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for the hidden matrices of a model; AdamW for everything else.

    Given a model, it chooses by this rule: parameters with two dimensions, and with three (stacks of matrices, as of
    experts), are hidden matrices. These are not: parameters of embeddings and of convolutions, and the weight of a Linear
    with as many outputs as an embedding has rows (the output layer).

    Given parameters or groups of them, a group's ``use_muon`` decides for all of it (the default is True). That is also
    the way to choose otherwise:

        Muon([{"params": matrices}, {"params": others, "use_muon": False, "lr": 3e-4}])

    Shards may be those of `fully_shard`, with replicas and tensor parallelism, and of the wrapper with
    ``use_orig_params=True``. All ranks call `step` alike. A matrix whose gradient has NaN becomes NaN, on all ranks.
    """

    takes_pieces = True

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Scale | None = "match_rms_adamw",
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        capturable: bool = False,
        dtype: torch.dtype | None = None,
        bucket_numel: int = 1 << 25,
    ) -> None:
        """Optimize sharded parameters. Collective, if replicas or tensor parallelism need a process group of all ranks.

        Args:
            params: A model, or parameters, or groups of them.
            lr: Learning rate of both optimizers. With ``match_rms_adamw``, AdamW's rates fit Muon, too.
            weight_decay: Decoupled, for both optimizers.
            momentum: Weight of the old value in the moving average of gradients.
            nesterov: Whether the gradient is mixed with the average once more.
            ns_coefficients: Coefficients of the polynomial of Newton-Schulz.
            eps: Least norm that a matrix is divided by.
            ns_steps: Number of times that the polynomial is applied.
            adjust_lr_fn: ``match_rms_adamw`` multiplies updates by ``0.2 * sqrt(max(rows, columns))``, ``original`` by
                ``sqrt(max(1, rows / columns))``; None is the original one, as in torch.
            betas: AdamW's.
            adamw_eps: AdamW's.
            capturable: Whether steps can be captured in CUDA graphs. AdamW counts its steps on the device then.
            dtype: Dtype in which matrices are exchanged and multiplied; by default bf16 on accelerators, fp32 on the CPU.
            bucket_numel: Most elements that an owner has in a bucket, unless one matrix has more.
        """
        self._bucket_numel, self._dtype = bucket_numel, dtype
        self._orthogonalizers: dict[tuple[int, ...], _Orthogonalizer] = {}
        self._is_built = False
        groups = _chosen_groups(params) if isinstance(params, nn.Module) else params
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": tuple(betas),
            "adamw_eps": adamw_eps,
            "capturable": capturable,
            "use_muon": True,
        }
        _check_options({**defaults, "bucket_numel": bucket_numel})
        super().__init__(groups, defaults)
        self._check_params()
        self._is_built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options."""
        super().add_param_group(param_group)
        if self._is_built:  # the constructor checks all groups together
            try:
                self._check_params()
            except (ConfigurationError, UnsupportedError):
                self.param_groups.pop()
                raise

    def _check_params(self) -> None:
        complex_: list[str] = []
        shapeless: list[str] = []
        for number, group in enumerate(self.param_groups):
            _check_options(group)
            cuts = param_cuts(group["params"])
            for index, cut in enumerate(cuts):
                name = cut.name or f"group {number}, parameter {index}"
                text = f"{name}: shape {tuple(cut.shape)}"
                if cut.param.is_complex():
                    complex_.append(text)
                elif group["use_muon"] and len(cut.shape) not in (2, 3):
                    shapeless.append(text)
                elif group["use_muon"] and cut.group is not None:
                    device = local_of(cut.param).device
                    check_backend(cut.group, device, "Muon sends shards to the owners of matrices")
        paragraphs = [
            *fault_paragraphs(
                complex_, "Muon takes real parameters; these are complex:", "Use AdamW for them."
            ),
            *fault_paragraphs(
                shapeless,
                "Muon orthogonalises matrices (2 dimensions) and stacks of them (3); these parameters are neither:",
                'Put them into a group with "use_muon": False, or pass the model, and Muon chooses.',
            ),
        ]
        if paragraphs:
            raise UnsupportedError("\n".join(paragraphs))

    @torch_border.opaque_to_compiler
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; call ``closure`` first, if given, to compute them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Before the first exchange, and before anything is updated.
        if is_capturing():
            self._check_capture()
        refuse_sparse_gradients(self)
        self._check_states()
        for group in self.param_groups:
            if group["use_muon"]:
                self._orthogonalizer_of(group["params"])
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["use_muon"]:
                self._orthogonal_step(group, params)
            else:
                self._adamw_step(group, params)
            torch.autograd.graph.increment_version(params)
        return loss

    def _check_states(self) -> None:
        """Refuse states of another optimizer, and those from before `use_muon` was changed."""
        others = [
            f"group {number}, parameter {index} of shape {tuple(param.shape)}: {', '.join(map(str, state))}"
            for number, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
            if (state := self.state.get(param)) and _STATE[bool(group["use_muon"])] not in state
        ]
        for paragraph in fault_paragraphs(
            others,
            "Muon keeps a momentum_buffer of each hidden matrix, and AdamW's state of all other parameters; these have a state of "
            "another kind:",
            "Load a state of Muon with the same groups, or let them begin anew: optimizer.state.pop(parameter).",
        ):
            raise ConfigurationError(paragraph)

    def _check_capture(self) -> None:
        """Refuse to capture a step that would not be the same when it is replayed."""
        if not all(group["capturable"] for group in self.param_groups):
            raise UsageError(
                "A step of Muon counts on the host, so it cannot be captured in a CUDA graph. Make the optimizer with capturable=True."
            )
        is_new = any(
            param.grad is not None and not self.state.get(param)
            for group in self.param_groups
            for param in group["params"]
        )
        if is_new or not all(
            tuple(map(id, group["params"])) in self._orthogonalizers
            for group in self.param_groups
            if group["use_muon"]
        ):
            raise UsageError(
                "The first step of Muon cannot be captured in a CUDA graph: every replay would begin with new averages. Run a "
                "step without capture before."
            )

    # --- AdamW ------------------------------------------------------------------------------------

    def _adamw_step(self, group: Mapping[str, Any], params: Sequence[nn.Parameter]) -> None:
        is_tensor = isinstance(group["lr"], Tensor)
        for param in params:
            state = self.state[param]
            device = local_of(param).device if group["capturable"] else torch.device("cpu")
            if not state:
                state["step"] = torch.zeros((), device=device)
                state["exp_avg"] = _zeros_like(param)
                state["exp_avg_sq"] = _zeros_like(param)
            elif state["step"].device != device:  # another optimizer has counted it
                state["step"] = state["step"].to(device)
        held = [param for param in params if local_of(param).numel()]
        states = [self.state[param] for param in held]
        for param in params:  # states are the same on all ranks, also on those that hold nothing
            if not local_of(param).numel():
                self.state[param]["step"] += 1
        if not held:
            return
        capturable = group["capturable"] and held[0].device.type != "cpu"
        adamw(
            [local_of(param) for param in held],
            [_gradient(param) for param in held],
            [local_of(state["exp_avg"]) for state in states],
            [local_of(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=not is_tensor or capturable,
            capturable=capturable,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )

    # --- matrices ---------------------------------------------------------------------------------

    def _orthogonal_step(self, group: Mapping[str, Any], params: Sequence[nn.Parameter]) -> None:
        """Update ``params``, those of a group that have gradients.

        All matrices of the group are exchanged, those without gradient as zeros. A rank of a wrapper does not know
        whether a parameter has a gradient of which it holds nothing, and all ranks must call the same collectives.
        """
        for param in params:
            if not self.state[param]:
                self.state[param]["momentum_buffer"] = _zeros_like(param)
        gradients = [_gradient(param) for param in params]
        averages = [local_of(self.state[param]["momentum_buffer"]) for param in params]
        updates: Sequence[Tensor] = averages
        if params:
            momentum = group["momentum"]
            torch._foreach_lerp_(averages, gradients, 1 - momentum)
            if group["nesterov"]:
                updates = torch._foreach_lerp(gradients, averages, momentum)
        by_param = dict(zip(map(id, params), updates, strict=True))
        every = [
            by_param[id(param)].contiguous()
            if id(param) in by_param
            else torch.zeros_like(local_of(param).detach())
            for param in group["params"]
        ]
        results = [torch.empty_like(update) for update in every]
        self._orthogonalizer_of(group["params"]).run(every, results, group, self._dtype)
        found = [
            result
            for param, result in zip(group["params"], results, strict=True)
            if id(param) in by_param
        ]
        if params:
            lr, locals_ = group["lr"], [local_of(param) for param in params]
            torch._foreach_mul_(locals_, 1 - lr * group["weight_decay"])
            torch._foreach_mul_(found, -lr)
            torch._foreach_add_(locals_, found)

    def _orthogonalizer_of(self, params: Sequence[nn.Parameter]) -> _Orthogonalizer:
        key = tuple(map(id, params))
        if key not in self._orthogonalizers:
            self._check_params()  # users may have changed the groups
            self._orthogonalizers[key] = _Orthogonalizer(param_cuts(params), self._bucket_numel)
        return self._orthogonalizers[key]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `load_state_dict`, or a copy, brings."""
        options = {**state.get("defaults", {}), **self.__dict__.get("defaults", {})}
        super().__setstate__(state)
        for group in self.param_groups:
            # Options that torch's Muon does not have, or that states lack because they were saved before the options existed.
            for option, value in options.items():
                group.setdefault(option, value)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_bucket_numel": self._bucket_numel, "_dtype": self._dtype}
        return {**super().__getstate__(), **kept, "_orthogonalizers": {}, "_is_built": True}


class _Orthogonalizer:
    """Exchange and orthogonalisation of the matrices of some parameters, by process group."""

    def __init__(self, cuts: Sequence[ParamCut], bucket_numel: int) -> None:
        by_group: dict[ProcessGroup | None, list[int]] = {}
        for index, cut in enumerate(cuts):
            by_group.setdefault(cut.group, []).append(index)
        self._cuts = cuts
        self._parts = [
            (group, indices, self._buckets(group, indices, bucket_numel))
            for group, indices in by_group.items()
        ]
        self._lists = [
            listed([cuts[index].label for index in indices]) for indices in by_group.values()
        ]
        """The parameters of each part, for tags."""

    def _buckets(
        self, group: ProcessGroup | None, indices: Sequence[int], bucket_numel: int
    ) -> list[Bucket]:
        rank = global_rank()
        ranks = [rank] if group is None else torch.distributed.get_process_group_ranks(group)
        cut = [
            CutParam(
                sharding=self._cuts[index].sharding,
                stack=self._cuts[index].stack,
                anyone_owns=isinstance(self._cuts[index].param, DTensor),
            )
            for index in indices
        ]
        return plan_buckets(cut, ranks, rank, bucket_numel)

    def run(
        self,
        updates: Sequence[Tensor],
        results: Sequence[Tensor],
        group: Mapping[str, Any],
        dtype: torch.dtype | None,
    ) -> None:
        """Write the orthogonalised ``updates`` to ``results``; both are this rank's shards."""
        for (process_group, indices, buckets), what in zip(self._parts, self._lists, strict=True):
            exchange = _Exchange(
                [updates[index] for index in indices],
                [results[index] for index in indices],
                [self._cuts[index] for index in indices],
                process_group,
                group,
                dtype,
                what,
            )
            exchange.run(buckets)


class _Exchange:
    """One step of the matrices of one process group."""

    def __init__(
        self,
        updates: Sequence[Tensor],
        results: Sequence[Tensor],
        cuts: Sequence[ParamCut],
        process_group: ProcessGroup | None,
        options: Mapping[str, Any],
        dtype: torch.dtype | None,
        what: str,
    ) -> None:
        """Prepare; ``what`` says which parameters, for tags."""
        self._updates, self._results, self._cuts = updates, results, cuts
        self._group = process_group
        self._options = options
        self._device = updates[0].device
        self._dtype = dtype or (torch.float32 if self._device.type == "cpu" else torch.bfloat16)
        self._what = f"{what}, in {str(self._dtype).removeprefix('torch.')}"

    def run(self, buckets: Sequence[Bucket]) -> None:
        """Exchange and compute bucket after bucket. All ranks call the same collectives in the same order."""
        gathers = self._gathers(buckets)
        scatters: list[tuple[Bucket, Tensor, Work | None]] = []
        for bucket in buckets:
            stacks = self._computed(bucket, next(gathers))
            for each in scatters:
                self._land(*each)
            scatters = [(bucket, *self._scatter(bucket, stacks))]
        for each in scatters:
            self._land(*each)

    def _gathers(self, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        """Yield the pieces that this rank gets of each bucket; the gather of the next one has begun then."""
        started: tuple[Tensor, Work | None] | None = None
        for number in range(len(buckets) + 1):
            previous = started
            if number < len(buckets):
                bucket = buckets[number]
                message = self._packed(bucket.sent.views(self._updates))
                started = self._exchange(
                    message,
                    bucket.gathered.sizes,
                    bucket.sent.sizes,
                    f"{bucket.text} to their owners",
                )
            if previous is not None:
                received, work = previous
                if work is not None:
                    work.wait()
                yield received

    def _packed(self, pieces: Sequence[Tensor]) -> Tensor:
        message = torch.empty(
            sum(piece.numel() for piece in pieces), dtype=self._dtype, device=self._device
        )
        if pieces:
            parts = message.split([piece.numel() for piece in pieces])
            into = [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]
            torch._foreach_copy_(into, list(pieces))
        return message

    def _exchange(
        self, message: Tensor, received: Sequence[int], sent: Sequence[int], what: str
    ) -> tuple[Tensor, Work | None]:
        if self._group is None:
            return message, None
        output = message.new_empty(sum(received))
        return output, collectives.exchange(
            output, (received, sent), message, self._group, _tag(f"{what}, {self._what}")
        )

    def _computed(self, bucket: Bucket, received: Tensor) -> list[Tensor]:
        """Return the updates of the owned matrices, scaled."""
        by_kind: dict[tuple[tuple[int, int], float], list[int]] = {}
        for number, matrix in enumerate(bucket.owned):
            by_kind.setdefault((matrix.shape, self._scale(matrix)), []).append(number)
        matrices: list[Tensor] = [received] * len(bucket.owned)
        stacks = {}
        for kind, numbers in by_kind.items():
            stack = stacks[kind] = received.new_empty(len(numbers), *kind[0])
            for number, each in zip(numbers, stack.unbind(), strict=True):
                matrices[number] = each
        if matrices:
            torch._foreach_copy_(bucket.gathered.views(matrices), bucket.gathered.split(received))
        for (kind, numbers), stack in zip(by_kind.items(), stacks.values(), strict=True):
            found = orthogonalize(
                stack,
                coefficients=self._options["ns_coefficients"],
                steps=self._options["ns_steps"],
                eps=self._options["eps"],
            )
            found = found.mul(kind[1]).contiguous()
            for number, each in zip(numbers, found.unbind(), strict=True):
                matrices[number] = each
        return matrices

    def _scale(self, matrix: Matrix) -> float:
        rows, columns = self._cuts[matrix.param].in_model_order(matrix.shape)
        if self._options["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def _scatter(self, bucket: Bucket, matrices: Sequence[Tensor]) -> tuple[Tensor, Work | None]:
        message = self._packed(bucket.scattered.views(matrices))
        return self._exchange(
            message, bucket.received.sizes, bucket.scattered.sizes, f"updates of {bucket.text}"
        )

    def _land(self, bucket: Bucket, received: Tensor, work: Work | None) -> None:
        if work is not None:
            work.wait()
        if bucket.received.windows:
            torch._foreach_copy_(
                bucket.received.views(self._results), bucket.received.split(received)
            )


@functools.cache
def _tag(what: str) -> Tag:
    return tag(f"Muon: {what}")


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of a model that are hidden matrices, or stacks of them: see `Muon`."""
    cuts = param_cuts([param for param in model.parameters() if param.requires_grad])
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    rows = {embedding.num_embeddings for embedding in embeddings}
    others: set[int] = set()
    for module in model.modules():
        is_output = isinstance(module, nn.Linear) and module.out_features in rows
        if is_output or isinstance(module, (nn.Embedding, nn.EmbeddingBag, *_CONVOLUTIONS)):
            others.update(id(param) for param in module.parameters(recurse=False))
    return [cut.param for cut in cuts if id(cut.param) not in others and len(cut.shape) in (2, 3)]


def _chosen_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = hidden_matrices(model)
    chosen = set(map(id, matrices))
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "use_muon": True},
        {"params": rest, "use_muon": False},
    ]
    return [group for group in groups if group["params"]]


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options, of a group or of all, that no update can be computed with."""
    rules: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "lr": ("at least 0", lambda lr: bool(lr >= 0)),
        "weight_decay": ("at least 0", lambda decay: bool(decay >= 0)),
        "momentum": ("at least 0 and below 1", lambda momentum: bool(0 <= momentum < 1)),
        "ns_steps": ("at least 1 and below 100", lambda steps: 1 <= steps < 100),
        "bucket_numel": ("at least 1", lambda numel: numel >= 1),
        "adjust_lr_fn": (
            "'match_rms_adamw', 'original' or None",
            lambda scale: scale in ("match_rms_adamw", "original", None),
        ),
    }
    wrong = [
        f"{name} must be {rule}, got {options[name]!r}."
        for name, (rule, fits) in rules.items()
        if name in options and not fits(options[name])
    ]
    if wrong:
        raise ConfigurationError(" ".join(wrong))


def _gradient(param: nn.Parameter) -> Tensor:
    """Return this rank's gradient in the parameter's dtype."""
    assert param.grad is not None, "the caller has looked"
    gradient, local = local_of(param.grad), local_of(param)
    return gradient if gradient.dtype == local.dtype else gradient.to(local.dtype)


def _zeros_like(param: nn.Parameter) -> Tensor:
    return like_param(param, torch.zeros_like(local_of(param).detach()))
