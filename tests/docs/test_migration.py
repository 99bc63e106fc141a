"""docs/migration.md and docs/migration_fsdp1.md are true: names, signatures, checkpoints in both directions."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import fullshard
from fullshard import FullyShardedDataParallel as FSDP, fully_shard, fully_sharded_data_parallel
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.models import Block, make_decoder
from tests.helpers.training import (
    FULLSHARD,
    TORCH,
    Run,
    batch_of,
    mine,
    needs_torch_2_13,
    shard,
    weights,
    whole,
)

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `(torch\.[\w.]+)` \| `(fullshard\.[\w.]+)` \|$", re.MULTILINE)
NEW_IN_2_15 = {"GradientReductionHandle"}
"""Public names that torch did not have before."""
HAS_2_15 = hasattr(torch.distributed.fsdp.FSDPModule, "finalize_backward")
NAMES = [
    row
    for page in ("migration.md", "migration_fsdp1.md")
    for row in ROW.findall((DOCS / page).read_text())
    if HAS_2_15 or row[0].rsplit(".", 1)[1] not in NEW_IN_2_15
]

PUBLIC = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
"""The names of FSDP2 in torch.distributed.fsdp."""

NEIGHBOURS = ("_", "wrap.", "sharded_grad_scaler.")
"""How names begin that are in modules of torch.distributed.fsdp, not in itself."""


# --- names -------------------------------------------------------------------------------------------


def found(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


OURS = ("wire_dtype",) if HAS_2_15 else ("wire_dtype", "param_dtype_override_fn")
"""Options that torch does not have; they are None by default."""


def parameters(function: Any) -> list[tuple[str, Any, str]]:
    """Names, kinds and defaults of a signature; defaults of the two packages compare as text."""
    return [
        (
            parameter.name,
            parameter.kind,
            re.sub(rf", ({'|'.join(OURS)})=None", "", repr(parameter.default)),
        )
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in OURS
    ]


def methods(cls: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") or name in ("__call__", "allocate")
    }


OURS_ONLY = {"fullshard.fully_shard": ("fuse_gradients",)}
"""Keywords that torch's functions do not have."""


@needs_torch_2_13
@pytest.mark.parametrize(("theirs", "ours"), NAMES, ids=[theirs for theirs, _ in NAMES])
def test_a_name_of_the_table_is_there_with_the_same_signature(theirs: str, ours: str) -> None:
    our = found(ours)
    assert our.__name__ == theirs.rsplit(".", 1)[1]
    their = found(theirs)
    assert isinstance(their, type) == isinstance(our, type)
    if isinstance(their, type):
        for name, method in methods(their).items():
            assert parameters(getattr(our, name)) == parameters(method), name
    else:
        ours_only = [each for each in parameters(our) if each[0] in OURS_ONLY.get(ours, ())]
        assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in ours_only)
        assert [each for each in parameters(our) if each not in ours_only] == parameters(their)


@needs_torch_2_13
@pytest.mark.parametrize(
    "name",
    [
        theirs
        for theirs, _ in NAMES
        if "Policy" in theirs or "Mesh" in theirs or theirs.endswith("Config")
    ],
)
def test_values_take_the_same_arguments(name: str) -> None:
    ours = dict(NAMES)[name]
    assert parameters(found(ours)) == parameters(found(name))


@needs_torch_2_13
def test_the_table_has_all_public_names_and_so_has_torch() -> None:
    in_table = {
        name
        for theirs, _ in NAMES
        if (name := theirs.removeprefix("torch.distributed.fsdp.")) != theirs
        and not name.startswith(NEIGHBOURS)
    }
    assert in_table == {*torch.distributed.fsdp.__all__, "FlatParameter"}  # which is importable
    assert set(PUBLIC) <= in_table <= set(fullshard.__all__)


MODULES = ["api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap"]
"""Modules of torch.distributed.fsdp that programs import from, and that fullshard has under the same names."""

IMPORTED_FROM_MODULES = {
    "fully_sharded_data_parallel": ["FLAT_PARAM", "FSDP_PREFIX", "FSDP_WRAPPED_MODULE"],
    "wrap": ["_Policy", "_module_wrap_policy", "_or_policy"],
}
"""Names that programs import from these modules although torch's `__all__` does not have them."""

DOCUMENTED = {
    "checkpoint": "Loaded PendingSave Saved async_save latest load load_huggingface save save_huggingface",
    "comm": "AllGather Comm DefaultAllGather DefaultReduceScatter ProcessGroupAllGather ProcessGroupReduceScatter "
    "ReduceScatter SymmetricAllGather SymmetricPool SymmetricReduceScatter",
    "fsdp_module": "disable_fsdp_module_new_init get_cls_to_fsdp_cls",
    "mesh": "DDPMeshInfo DataParallelAxes DataParallelMeshInfo FSDPMeshInfo HSDPMeshInfo ProcessGroupAxes "
    "ShardPlacementResult sharding_mesh_info",
    "optim": "ShardedOptimizer",
    "report": "write_report",
    "sharded_grad_scaler": "ShardedGradScaler",
    "wrap": "CustomPolicy ModuleWrapPolicy Wrapping always_wrap_policy enable_wrap lambda_auto_wrap_policy "
    "size_based_auto_wrap_policy transformer_auto_wrap_policy wrap",
}
"""Import paths in the documentation of earlier versions; programs may use all of them."""


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_torch_s_name_holds_torch_s_names(module: str) -> None:
    theirs = importlib.import_module(f"torch.distributed.fsdp.{module}")
    ours = importlib.import_module(f"fullshard.{module}")
    own = [
        name
        for name, value in vars(theirs).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == theirs.__name__
    ]
    assert set(getattr(theirs, "__all__", own)) <= set(ours.__all__)
    others = IMPORTED_FROM_MODULES.get(module, [])
    assert [name for name in (*ours.__all__, *others) if not hasattr(ours, name)] == []


@needs_torch_2_13
def test_the_names_of_attributes_are_torch_s() -> None:
    theirs = torch.distributed.fsdp.fully_sharded_data_parallel
    for name in IMPORTED_FROM_MODULES["fully_sharded_data_parallel"]:
        assert getattr(fully_sharded_data_parallel, name) == getattr(theirs, name)


@pytest.mark.parametrize("module", DOCUMENTED)
def test_an_import_path_that_was_documented_works(module: str) -> None:
    names = DOCUMENTED[module].split()
    there = importlib.import_module(f"fullshard.{module}")
    assert [name for name in names if not hasattr(there, name)] == []
    assert set(names) <= set(there.__all__)


@pytest.mark.parametrize(
    "option",
    [
        {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy()},
        {"offload_policy": torch.distributed.fsdp.OffloadPolicy()},
    ],
    ids=str,
)
def test_torch_s_options_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(fullshard.ConfigurationError, match=f"{next(iter(option))}.*torch"):
        fully_shard(nn.Linear(2, 2), **option)


# --- checkpoints -------------------------------------------------------------------------------------


def sharded(api: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(make_decoder(seed=seed), api, Run())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(mine(batch_of(number))).backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    values = weights(model)
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            values[f"{name} {key}"] = whole(value)
    return values


def save(api: str, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train, save, train on; returns everything as it was saved and as it became."""
    model, optimizer = sharded(api, seed=0)
    for number in range(2):
        step(model, optimizer, number)
    saved = everything(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    step(model, optimizer, 2)
    return saved, everything(model, optimizer)


def load(api: str, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = sharded(api, seed=9)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    loaded = everything(model, optimizer)
    step(model, optimizer, 2)
    return loaded, everything(model, optimizer)


@pytest.mark.parametrize(("writer", "reader"), [(TORCH, FULLSHARD), (FULLSHARD, TORCH)])
def test_checkpoints_of_one_are_loaded_by_the_other(
    world, tmp_path: Path, writer: str, reader: str
) -> None:
    saved, trained = world(2).run(save, writer, str(tmp_path))[0]
    assert any(name.endswith("exp_avg_sq") for name in saved)
    for loaded, went_on in world(2).run(load, reader, str(tmp_path)):
        assert_equal(loaded, saved)
        assert_close(went_on, trained, rtol=1e-5, atol=1e-6)


def from_the_wrapper_to_fully_shard() -> tuple[Any, Any]:
    """A full checkpoint of model and optimizer moves from one entry to the other, as the page says."""
    wrapped = FSDP(
        make_decoder(seed=0), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
    )
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, fused=True)
    for number in range(2):
        step(wrapped, optimizer, number)
    saved, states = wrapped.state_dict(), FSDP.optim_state_dict(wrapped, optimizer)
    model, other = sharded(FULLSHARD, seed=9)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, saved, options=options)
    set_optimizer_state_dict(model, other, states, options=options)
    step(wrapped, optimizer, 2)
    step(model, other, 2)
    return wrapped.state_dict(), weights(model)


def test_a_model_moves_from_the_wrapper_to_fully_shard(world) -> None:
    for wrapped, model in world(2).run(from_the_wrapper_to_fully_shard):
        assert_close({name: wrapped[name] for name in model}, model, rtol=1e-5, atol=1e-6)
