"""Tensor subclasses without an all-gather extension, and shards that get one after sharding: as with torch."""

from __future__ import annotations

import importlib
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fullshard import ConfigurationError, FullyShardedDataParallel, fully_shard, replicate
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.training import FULLSHARD, TORCH

aten = torch.ops.aten


class Boxed(Tensor):
    """Has its data in another tensor, and only the operators that torch's FSDP2 needs to shard it."""

    boxed: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.boxed = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Boxed({self.boxed})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def opened(value: Any) -> Any:
            return value.boxed if isinstance(value, Boxed) else value

        args_, kwargs_ = pytree.tree_map(opened, (args, kwargs or {}))
        result = function(*args_, **kwargs_)
        if function in (aten.copy_.default, aten.add_.Tensor):
            return args[0]
        stays = function in (
            aten.detach.default,
            aten.split.Tensor,
            aten.slice.Tensor,
            aten.view.default,
            aten.new_zeros.default,
        )
        return pytree.tree_map_only(Tensor, Boxed, result) if stays else result


class Named(Tensor):
    """Plain data under another name."""


def boxed(tensor: Tensor) -> Tensor:
    return Boxed(tensor)


def named(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Named)


class Net(nn.Module):
    """Rows that do not divide, one row, no dimensions; and a plain bias."""

    def __init__(self, kind: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"first": (5, 3), "second": (1, 5), "scale": (), "bias": (5,)}
        for name, shape in shapes.items():
            data = torch.randn(shape, generator=generator)
            data = kind(data) if kind is not None and name != "bias" else data
            self.register_parameter(name, nn.Parameter(data))

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.first, DTensor):
            raise AssertionError("not gathered")
        self.seen = [type(param.data) for param in (self.first, self.second, self.scale)]
        hidden = torch.nn.functional.linear(x, self.first, self.bias).tanh()  # type: ignore[arg-type]
        return (torch.nn.functional.linear(hidden, self.second) * self.scale).square().mean()  # type: ignore[arg-type, operator]


def train(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        loss = model(x)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def data_of(tensor: Any) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.data
    return (local.boxed if isinstance(local, Boxed) else local.as_subclass(Tensor)).detach()


def like_one_process(make: Any, how: str) -> None:
    model: Any = Net(make)
    if how == "replicate":
        replicate(model)
    elif how == "columns":
        fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.shape == (5, 3) else None)
    elif how == "hybrid":
        shape = (2, dist.get_world_size() // 2)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))
    else:
        fully_shard(model)
    kind = type(make(torch.ones(1)))
    assert type(model.first.to_local()) is kind
    alone = Net()
    assert_close(train(model), train(alone), rtol=1e-5, atol=1e-6)
    assert model.seen == [Tensor] * 3  # compute gets plain data
    assert type(model.first.to_local()) is kind
    for name, param in model.named_parameters():
        plain = DTensor.from_local(
            data_of(param),
            param.device_mesh,
            param.placements,
            shape=param.shape,
            stride=param.stride(),
        )
        assert_close(
            plain.full_tensor(), dict(alone.named_parameters())[name], rtol=1e-5, atol=1e-6
        )
    with torch.inference_mode():
        model(torch.ones(1, 3))
    model(torch.ones(1, 3)).backward()
    assert model.first.grad is not None
    if kind is Boxed:  # others lose their type where operators see plain tensors, with torch, too
        assert type(model.state_dict()["first"].to_local()) is Boxed


def like_one_process_in_all_ways(*ways: str) -> None:
    for how in ways:
        for make in (boxed, named):
            like_one_process(make, how)


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [(1, ["rows"]), (2, ["rows", "replicate"]), (3, ["rows", "columns"]), (4, ["hybrid"])],
)
def test_a_subclass_without_the_protocol_is_sharded_by_its_own_operators(ranks, ways, world):
    world(ranks).run(like_one_process_in_all_ways, *ways)


# --- with torch -----------------------------------------------------------------------------------


def trained(api: str, *, boxed_weights: bool) -> Any:
    """Linear layers with boxed weights, in mixed precision; or with weights that travel in fp16."""
    library = importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    layers = (model[0], model[2])
    if boxed_weights:
        for layer in layers:
            layer.weight = nn.Parameter(Boxed(layer.weight.detach().clone()))
        library.fully_shard(model, mp_policy=library.MixedPrecisionPolicy(torch.bfloat16))
    else:
        library.fully_shard(model)
        for layer in layers:
            give_protocol(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(torch.full((2, 3), float(step))).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if not boxed_weights:
        assert model[0].weight._local_tensor.sent >= 3
    return losses, [data_of(param) for param in model.parameters()]


def sends_half(self: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
    self.sent = getattr(self, "sent", 0) + 1
    return (self.to(torch.float16),), size


def receives_half(
    self: Any, outputs: Any, size: Any, dtype: torch.dtype, *, out: Tensor | None = None
) -> Any:
    rows = outputs[0][: size[0]]
    if out is not None:
        out.detach().copy_(rows)
        return None
    whole = rows.to(dtype, copy=True)
    return whole, (whole,)


def give_protocol(param: Any) -> None:
    """Set the methods on a shard that has none, on the tensor itself: `to_local` returns a view of it."""
    local = param._local_tensor
    local.fsdp_pre_all_gather = MethodType(sends_half, local)
    local.fsdp_post_all_gather = MethodType(receives_half, local)


def of_both_libraries(boxed_weights: bool) -> Any:
    return [trained(api, boxed_weights=boxed_weights) for api in (FULLSHARD, TORCH)]


@pytest.mark.parametrize("boxed_weights", [True, False])
def test_shards_end_as_with_torch(boxed_weights, world):
    for ours, theirs in world(2).run(of_both_libraries, boxed_weights):
        assert_equal(ours, theirs)


def kept_in_parts() -> list[str]:
    found = []
    for make in (boxed, None):
        model: Any = Net(make)
        try:
            fully_shard(model, reshard_after_forward=2)
            give_protocol(model.first)
            model(torch.ones(1, 3))
        except ConfigurationError as error:
            found.append(str(error))
    return found


def test_parts_of_them_cannot_be_kept_and_wrappers_do_not_flatten_them(world):
    for first, second in world(4).run(kept_in_parts):
        assert "['first', 'second', 'scale']" in first and "True or False" in first
        assert "['first']" in second and "True or False" in second
    with fake_world(2), pytest.raises(ConfigurationError, match=r"\['first', 'second', 'scale'\]"):
        FullyShardedDataParallel(Net(boxed))


# --- classes and attributes of parameters ---------------------------------------------------------------


class Quantised(nn.Parameter):
    """Knows how its numbers are to be read, as `Params4bit` of bitsandbytes does."""

    def __new__(cls, data: Tensor, state: str) -> Any:
        made: Any = Tensor._make_subclass(cls, data, True)  # type: ignore[attr-defined]
        made.state = state
        return made


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Quantised(torch.randn(3, 4), "by rows")
        self.scale = nn.Parameter(torch.ones(4))
        self.scale.decays = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Quantised
        assert self.weight.state == "by rows"
        assert self.scale.decays is False  # type: ignore[attr-defined]
        return x @ self.weight * self.scale


def parameters_keep_what_they_are() -> None:
    for shard in (
        fully_shard,
        lambda module: FullyShardedDataParallel(
            module, use_orig_params=True, device_id=torch.device("cpu")
        ),
    ):
        torch.manual_seed(0)
        plain, layer = Reader(), Reader()
        layer.load_state_dict(plain.state_dict())
        model: Any = shard(layer)
        for _ in range(2):  # the second forward, too
            for each in (plain, model):
                each.zero_grad()
                each(torch.ones(2, 3)).sum().backward()
        for param in (layer.weight, layer.scale):
            assert {"state", "decays"} & {*param.__dict__}
        if shard is fully_shard:
            gradient: Any = layer.weight.grad
            assert_close(gradient.full_tensor(), plain.weight.grad, rtol=1e-6, atol=1e-6)


def test_unsharded_parameters_keep_class_and_attributes(world) -> None:
    world(2).run(parameters_keep_what_they_are)
