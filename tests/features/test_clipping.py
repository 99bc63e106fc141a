"""`clip_grad_norm_` on both APIs: the norm and the gradients of one process, for every norm, shape, dtype and mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    LifecycleError,
    clip_grad_norm_,
    fully_shard,
    replicate,
)
from fullshard.mesh.axes import FSDPMeshInfo, ShardPlacementResult
from tests.helpers.fake import fake_world
from tests.helpers.training import gradients as gradients_of

ORDERS = [1, 2, 3, 0.5, math.inf, 0, -math.inf, -1]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Weight(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self) -> Tensor:
        return self.weight.square().sum()


class Net(nn.Module):
    """Rows that do not divide, fewer rows than ranks, no dimensions; the gradient of a weight is a function of it."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        shapes = {"wide": (5, 4), "row": (1, 3), "scalar": (), "even": (4, 2), "zeros": (3,)}
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleDict()
        for name, shape in shapes.items():
            self.layers[name] = Weight(torch.randn(shape, generator=generator).to(dtype))
        with torch.no_grad():
            self.layers["zeros"].weight.zero_()  # type: ignore[operator, union-attr]

    def forward(self) -> Any:
        return sum(layer() for layer in self.layers.values())


def one_process(order: float) -> Any:
    """The norm of a process that has all, and the gradients it clips to half of it."""
    net = Net()
    net().backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), math.inf, order)
    torch.nn.utils.clip_grad_norm_(net.parameters(), norm.item() / 2, order)
    return norm, {name: param.grad for name, param in net.named_parameters()}


def on_cpu(net: nn.Module, **options: Any) -> Any:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))


def over_two_meshes(net: Net) -> Any:
    """Some weights over all ranks, some over two, and one replicated, one ignored."""
    mesh = hybrid()
    whole_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    few = FSDPMeshInfo(mesh["s"], shard_mesh_dim=0)

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), few) if param.shape == (4, 2) else None

    replicate(net.layers["zeros"], mesh=whole_mesh)
    ignored = {net.layers["row"].weight}
    return fully_shard(net, mesh=whole_mesh, shard_placement_fn=place, ignored_params=ignored)


APIS: dict[str, Any] = {
    "fully_shard": fully_shard,
    "along another dimension": lambda net: fully_shard(
        net, shard_placement_fn=lambda param: Shard(param.ndim - 1) if param.ndim else None
    ),
    "replicate": replicate,
    "wrapper": lambda net: on_cpu(net, use_orig_params=True),
    "flat": lambda net: on_cpu(net),
    "replicas": lambda net: fully_shard(net, mesh=hybrid()),
    "two meshes": over_two_meshes,
}


def clipped(api: str) -> list[Any]:
    """Per order: the norm, the norm after clipping to half of it, and the clipped gradients."""
    model = APIS[api](Net())
    found = []
    for index, order in enumerate(ORDERS):
        model.zero_grad()
        model().backward()
        given: Any = [model, model.parameters(), set(model.parameters())][index % 3]
        norm = clip_grad_norm_(given, math.inf, order)
        clip_grad_norm_(model, norm.item() / 2, order, foreach=bool(index % 2))
        after = clip_grad_norm_(model, math.inf, order)
        wrapped = isinstance(model, FullyShardedDataParallel)
        gradients = {} if wrapped else gradients_of(model)
        found.append((norm, after, gradients))
    return found


@pytest.mark.parametrize(
    ("ranks", "apis"),
    [
        (2, ["along another dimension", "wrapper"]),
        (3, ["fully_shard", "flat"]),
        (4, ["replicas", "two meshes", "replicate"]),
    ],
)
def test_norms_and_gradients_are_those_of_one_process(ranks, apis, world):
    for api in apis:
        for found in world(ranks).run(clipped, api):
            for order, (norm, after, gradients) in zip(ORDERS, found, strict=True):
                expected, expected_gradients = one_process(order)
                if order == 0 and api == "flat":
                    expected = torch.ones(())  # of one parameter
                assert type(norm) is Tensor and norm.dtype == torch.float64
                case = f"{api}, order {order}"
                assert math.isclose(norm, expected, rel_tol=1e-9), case
                if order != 0:
                    assert math.isclose(after, norm / 2, rel_tol=1e-4, abs_tol=1e-12), case
                for name, gradient in gradients.items():
                    torch.testing.assert_close(gradient, expected_gradients[name], msg=case)


def parallel_norms() -> list[tuple[float, float]]:
    """Norms of a model with weights on two meshes, and of the same model in one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model, alone = (nn.ModuleDict({"up": nn.Linear(3, 6), "out": nn.Linear(6, 1)}) for _ in "ab")
    alone.load_state_dict(model.state_dict())
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel()})
    for layer in model.values():
        fully_shard(layer, mesh=mesh["data"])
    x = torch.ones(2, 3)
    for each in (model, alone):
        hidden = each["up"](x)
        if isinstance(hidden, DTensor):
            hidden = hidden.full_tensor()
        elif hidden.shape[-1] != 6:
            parts = [torch.empty_like(hidden) for _ in range(2)]
            dist.all_gather(parts, hidden.detach(), group=mesh.get_group("tensor"))
            parts[mesh.get_local_rank("tensor")] = hidden
            hidden = torch.cat(parts, -1)
        each["out"](hidden).square().sum().backward()
    return [
        (
            clip_grad_norm_(model, math.inf, order).item(),
            torch.nn.utils.clip_grad_norm_(alone.parameters(), math.inf, order).item(),
        )
        for order in (1, 2, math.inf, -math.inf)
    ]


def test_tensor_parallel_parameters_count_once(world):
    for found in world(4).run(parallel_norms):
        for ours, expected in found:
            assert ours == pytest.approx(expected, rel=1e-5)


def unusual() -> list[Any]:
    """Narrow dtypes; gradients that only some ranks have; NaN on one rank; parameters that stay unsharded."""
    rank = dist.get_rank()
    found: list[Any] = []
    narrow = fully_shard(Net(torch.bfloat16))
    narrow().backward()
    norm = clip_grad_norm_(narrow, 1.0)
    found.append((norm.dtype, norm.item()))
    lonely: Any = fully_shard(Net())
    lonely().backward()
    for param in lonely.parameters():
        if rank == 1 and param.ndim:
            param.grad = None
    found.append([clip_grad_norm_(lonely, 1.0, order).item() for order in (2, math.inf, 0)])
    broken: Any = fully_shard(Net())
    broken().backward()
    if rank == 0:
        broken.layers["wide"].weight.grad.to_local()[0, 0] = math.nan
    found.append([clip_grad_norm_(broken, math.inf, order).item() for order in (2, math.inf)])
    try:
        clip_grad_norm_(broken, 1.0, math.inf, error_if_nonfinite=True)
    except LifecycleError as error:
        found.append(str(error))
    kept: Any = fully_shard(Net())
    kept().backward()
    kept.unshard()
    found.append(clip_grad_norm_(kept, 1.0).item())
    try:
        clip_grad_norm_(kept.parameters(), 1.0)
    except LifecycleError as error:
        found.append(str(error))
    return found


def test_unusual_gradients_have_one_norm_on_all_ranks(world):
    first, second = world(2).run(unusual)
    assert str(first) == str(second)
    narrow, lonely, broken, error, kept, unsharded = first
    expected = one_process(2)[0].item()
    assert narrow == (torch.float32, pytest.approx(expected, rel=1e-2))
    assert 0 < lonely[0] < expected
    assert lonely[2] == 4.0  # all but the zeros; rank 0 has a part of each
    assert all(map(math.isnan, broken))
    assert "must be finite" in error and "nan" in error
    assert kept == pytest.approx(expected)
    assert "layers.wide.weight" in unsharded and "Pass the model itself" in unsharded


def test_arguments_are_checked():
    with fake_world(2):
        net = fully_shard(Net())
        for wrong, match in [
            ((net, -1.0), "max_norm"),
            ((net, math.nan), "max_norm"),
            ((net, 1.0, math.nan), "norm_type"),
            (([net], 1.0), "Net"),
        ]:
            with pytest.raises(ConfigurationError, match=match):
                clip_grad_norm_(*wrong)
    assert clip_grad_norm_([], 1.0).item() == 0.0
