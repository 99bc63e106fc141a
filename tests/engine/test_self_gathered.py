"""Parameters with an all-gather extension of their own, alone and among plain ones."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Replicate, Shard

from examples.int8_gather import CountingAllGather, Int8Gathered, gather_linear_weights_as_int8
from fullshard import ConfigurationError, fully_shard, replicate
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.models import Decoder, ModelOptions, make_decoder
from tests.helpers.training import FULLSHARD, TORCH, batch_of, gradients, mine, of_both, whole


class Lossless(Int8Gathered):
    """Sends what it is; the whole parameter is the output itself."""

    def fsdp_pre_all_gather(self, mesh: Any, *told: Any) -> tuple[tuple[Tensor, ...], Any]:
        outer_size, outer_stride, module, policy = told
        assert (mesh.ndim, len(outer_size), len(outer_stride)) == (1, 2, 2)
        assert module.weight is not None and policy.param_dtype is None
        return (self.data_,), outer_size

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        outer_size: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        return None if out is not None else (outputs[0], ())


class OldSignature(Lossless):
    """Is told the mesh only."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:  # type: ignore[override]
        return (self.data_,), None


class CopyOfOutput(Lossless):
    """The whole parameter has memory of its own."""

    def fsdp_post_all_gather(
        self, outputs: Any, outer_size: Any, dtype: Any, *, out: Any = None
    ) -> Any:
        rows = outputs[0][: outer_size[0]]
        if out is not None:
            local = out.to_local() if isinstance(out, DTensor) else out
            local.detach().copy_(rows)
            return None
        copy = rows.to(dtype, copy=True)
        return copy, (copy,)


class SizesDiffer(Lossless):
    """Sends one number more on each rank."""

    def fsdp_pre_all_gather(self, mesh: Any, *told: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.data_, torch.ones(1 + mesh.get_local_rank())), None


class NumbersDiffer(Lossless):
    """Sends another tensor on all ranks but the first."""

    def fsdp_pre_all_gather(self, mesh: Any, *told: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.data_,) + (torch.ones(1),) * (mesh.get_local_rank() > 0), None


def wrap(model: Any, kind: type[Int8Gathered]) -> Any:
    """Let the weights of linear layers, and no others, gather themselves."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach().clone()))
    return model


def plain(param: Any) -> Tensor:
    """A parameter gathered from its shards, as plain data."""
    local = param.to_local().detach()
    data = local.data_ if isinstance(local, Int8Gathered) else local
    return whole(
        DTensor.from_local(
            data,
            param.device_mesh,
            param.placements,
            shape=param.shape,
            stride=param.stride(),
        )
    )


# --- like torch's ------------------------------------------------------------------------------------


def trained_as_int8(api: str, policy: dict[str, torch.dtype]) -> Any:
    """A model whose linear weights travel as int8; shapes that the ranks divide."""
    library = importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")
    model = make_decoder(ModelOptions(width=8, hidden=12, depth=2))
    gather_linear_weights_as_int8(model.blocks)
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": library.MixedPrecisionPolicy(**policy),
    }
    for module in (*model.blocks, model):
        library.fully_shard(module, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(2):
        optimizer.zero_grad()
        model(mine(batch_of(step))).backward()
        optimizer.step()
    return gradients(model), {name: plain(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "policy"),
    [(2, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}), (4, {})],
    ids=["2, bf16", "4, fp32"],
)
def test_int8_gathers_train_like_torch_s(world, ranks: int, policy: Any) -> None:
    ours, theirs = zip(*world(ranks).run(of_both, trained_as_int8, policy), strict=True)
    if ranks == 2:
        assert_equal(ours, theirs)
    else:  # gloo adds four numbers in an order that depends on where they lie
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --- like no sharding --------------------------------------------------------------------------------


def apply(model: Decoder, how: str) -> None:
    """Shard a model in one of several ways."""
    options: dict[str, Any] = {}
    if how == "kept":
        options["reshard_after_forward"] = False
    if how == "hsdp":
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options["mesh"] = axes
    for module in (*model.blocks, model):
        (replicate if how == "replicated" else fully_shard)(module, **options)
        if how == "comm object":
            module.set_custom_all_gather(CountingAllGather())


def train_both(model: Any, reference: Any) -> None:
    """Validate and train a sharded and an unsharded model side by side."""
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, foreach=True) for each in (model, reference)
    ]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.no_grad():
            validation = mine(batch_of(9))
            assert_close(model(validation), reference(validation), rtol=1e-5, atol=1e-6)
        model(mine(batch_of(step))).backward()
        reference(batch_of(step)).backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()


def lossless(kind: type[Int8Gathered], how: str, checkpointing: str) -> None:
    """Rows that the ranks do not divide evenly; the last rank has none of some parameters."""
    options = ModelOptions(depth=2, checkpointing=checkpointing)
    model = wrap(make_decoder(options), kind)
    apply(model, how)
    train_both(model, make_decoder(options))


@pytest.mark.parametrize(
    ("ranks", "kind"), [(1, Lossless), (3, Lossless), (3, OldSignature), (3, CopyOfOutput)]
)
def test_uneven_shards_are_padded(world, ranks: int, kind: type[Int8Gathered]) -> None:
    world(ranks).run(lossless, kind, "plain", "none")


@pytest.mark.parametrize("how", ["kept", "hsdp", "comm object", "replicated"])
def test_they_gather_themselves_in_every_setting(world, how: str) -> None:
    world(4 if how == "hsdp" else 2).run(lossless, CopyOfOutput, how, "non_reentrant")


def within_tensor_parallelism() -> None:
    """The local tensor of a tensor-parallel DTensor may have the protocol, too."""
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    layer, reference = nn.Linear(6, 10, bias=False), nn.Linear(6, 10, bias=False)
    reference.load_state_dict(layer.state_dict())
    rows = layer.weight.detach().chunk(2)[axes["tp"].get_local_rank()].clone()
    local = DTensor.from_local(CopyOfOutput(rows), axes["tp"], [Shard(0)], run_check=False)
    layer.weight = nn.Parameter(local)
    fully_shard(layer, mesh=axes["dp"])
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for each, batch in ((layer, x.chunk(2)[axes["dp"].get_local_rank()]), (reference, x)):
            each.zero_grad()
            if each is layer:
                batch = DTensor.from_local(batch, axes["tp"], [Replicate()], run_check=False)
            each(batch).square().mean().backward()
        assert_close(gradients(layer), gradients(reference), rtol=1e-5, atol=1e-7)


def test_within_tensor_parallelism(world) -> None:
    world(4).run(within_tensor_parallelism)


# --- other tensors in backward ------------------------------------------------------------------------


class ByPhase(Lossless):
    """Sends its rows in forward, and its columns in backward, as TransformerEngine's MXFP8 does, and a scale for each row.

    It asks the state of its module for the phase, as that does. The whole parameter has memory of its own.
    """

    sent: ClassVar[list[tuple[tuple[int, ...], ...]]] = []
    gathered: ClassVar[list[tuple[tuple[int, ...], ...]]] = []

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        group = module._get_fsdp_state()._fsdp_param_group
        in_backward = group._training_state == TrainingState.PRE_BACKWARD
        assert in_backward == (TrainingState.PRE_BACKWARD == group._training_state)
        by_columns = group._reshard_after_forward and in_backward
        sent = (self.data_.t().flatten() if by_columns else self.data_, *self.scales(by_columns))
        self.sent.append(tuple(tuple(tensor.shape) for tensor in sent))
        return sent, (outer_size, by_columns)

    def scales(self, by_columns: bool) -> tuple[Tensor, ...]:
        return (torch.full((len(self.data_), 1), 2.0),)

    def fsdp_post_all_gather(self, outputs: Any, told: Any, dtype: Any, *, out: Any = None) -> Any:
        self.gathered.append(tuple(tuple(tensor.shape) for tensor in outputs))
        (rows, width), by_columns = told
        if by_columns:
            parts = [part.view(width, -1).t() for part in outputs[0].chunk(dist.get_world_size())]
            whole = torch.cat(parts)
        else:
            whole = outputs[0]
        if len(outputs) > 1:
            whole = whole * outputs[1]
        whole = whole[:rows]
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.detach().copy_(whole)
            return None
        copy = whole.to(dtype, copy=True)
        return copy, (copy,)


class OneMoreInBackward(ByPhase):
    """Sends scales in backward only."""

    def scales(self, by_columns: bool) -> tuple[Tensor, ...]:
        return (torch.ones(len(self.data_), 1),) if by_columns else ()


def other_tensors_in_backward(api: str, kind: type[ByPhase], reshard: bool) -> Any:
    library = importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")
    kind.sent.clear()
    kind.gathered.clear()
    torch.manual_seed(0)
    # Each sharded module has its weight itself: torch's gives no state to others.
    model: Any = wrap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2)), kind)
    for layer in (*model, model):
        library.fully_shard(layer, reshard_after_forward=reshard)
    found: list[Any] = []
    for step in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        found.append(loss.item())
        found.append({name: plain(param.grad) for name, param in model.named_parameters()})
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
        model.zero_grad()
    return found, sorted(kind.sent), sorted(kind.gathered)


@pytest.mark.parametrize("reshard", [True, False])
def test_an_extension_may_send_other_tensors_in_backward(world, reshard: bool) -> None:
    for ours, theirs in world(2).run(of_both, other_tensors_in_backward, ByPhase, reshard):
        assert_equal(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]
        dims = {tuple(map(len, each)) for each in ours[2]}
        assert dims == ({(2, 2), (1, 2)} if reshard else {(2, 2)})


def in_another_number() -> None:
    ours, _, gathered = other_tensors_in_backward(FULLSHARD, OneMoreInBackward, True)
    expected, *_ = other_tensors_in_backward(FULLSHARD, OneMoreInBackward, False)
    assert_equal(ours, expected)
    assert {len(each) for each in gathered} == {1, 2}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_they_may_be_more_than_in_forward(world, ranks: int) -> None:
    """Torch's FSDP2 fails."""
    world(ranks).run(in_another_number)


# --- at rest -----------------------------------------------------------------------------------------


def memory_and_state_dicts() -> None:
    model = wrap(make_decoder(), CopyOfOutput)
    apply(model, "plain")
    saved = {name: plain(param) for name, param in model.named_parameters()}
    model(mine(batch_of(0))).backward()
    for state in fully_shard.state(model).step.states:
        for group in state.groups:
            beside = group.routes.beside
            for member in beside.members if beside else ():
                tensors = (*member._outputs, *member._inner)
                assert tensors and not any(t.untyped_storage().nbytes() for t in tensors)
    state_dict = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    model.load_state_dict(state_dict)
    assert_equal({name: plain(param) for name, param in model.named_parameters()}, saved)
    assert isinstance(model.head.weight.to_local(), CopyOfOutput)
    train_both(model, make_decoder())


def test_memory_is_given_back_and_state_dicts_load(world) -> None:
    world(2).run(memory_and_state_dicts)


# --- mistakes ----------------------------------------------------------------------------------------


def ranks_send_different_sizes(kind: type[Int8Gathered]) -> None:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), kind)
    fully_shard(model)
    model(torch.ones(1, 4))


def kept_in_parts() -> None:
    model = wrap(nn.Sequential(nn.Linear(4, 4)), Lossless)
    fully_shard(model, reshard_after_forward=2)


@pytest.mark.parametrize(
    ("kind", "sizes"), [(SizesDiffer, ["[32, 4]", "[32, 8]"]), (NumbersDiffer, ["[32]", "[32, 4]"])]
)
def test_ranks_that_send_different_sizes_are_refused_on_all_of_them(
    world, kind: type[Int8Gathered], sizes: list[str]
) -> None:
    outcomes = world(3).outcomes(ranks_send_different_sizes, kind)
    assert {type(outcome) for outcome in outcomes} == {ConfigurationError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    for part in ("0.weight", "1.weight", *sizes, "same size"):
        assert part in str(outcomes[0]), outcomes[0]


def test_parts_of_them_cannot_be_kept(world) -> None:
    for outcome in world(4).outcomes(kept_in_parts):
        assert isinstance(outcome, ConfigurationError) and "0.weight" in str(outcome)
