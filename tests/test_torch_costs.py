"""What `tests.helpers.torch_costs` spares changes no result."""

import inspect

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.helpers.groups import alone
from tests.helpers.torch_costs import spare_torchrun_costs


def kinds_of_results() -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of operations whose arguments are equal and whose results are not alike."""
    mesh = init_device_mesh("cpu", (1,))
    count = DTensor.from_local(torch.ones(2, 3, dtype=torch.int64), mesh, [Shard(0)])
    weight = DTensor.from_local(torch.ones(2, 3, dtype=torch.float32), mesh, [Replicate()])
    results = [count * 1, count * 1.0, count * True, weight.sum(0), weight.sum(0, keepdim=True)]
    results += [weight.sum(1), *weight.split(1), *weight.split(2), count + weight]
    assert all(result.device_mesh is mesh for result in results)
    metas = [result._spec.tensor_meta for result in results]
    return [(tuple(meta.shape), meta.dtype) for meta in metas]


def test_operations_with_equal_arguments_of_other_kinds_are_not_mixed_up(
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    for default in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(default)
        with alone():
            assert kinds_of_results() == [
                ((2, 3), torch.int64),
                ((2, 3), default),
                ((2, 3), torch.int64),
                ((3,), torch.float32),
                ((1, 3), torch.float32),
                ((2,), torch.float32),
                ((1, 3), torch.float32),
                ((1, 3), torch.float32),
                ((2, 3), torch.float32),
                ((2, 3), torch.float32),
            ]


def test_the_rendezvous_of_torchrun_finds_the_name_of_its_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamic_rendezvous, "inspect", inspect)
    spare_torchrun_costs()
    assert dynamic_rendezvous.inspect is not inspect
    assert dynamic_rendezvous.get_method_name(depth=1) == inspect.stack()[0].function
