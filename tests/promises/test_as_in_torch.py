"""Programs that torch's FSDP runs and that must run here: devices, meshes, switches, other roots, methods."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import fullshard
from fullshard import (
    ConfigurationError,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    LifecycleError,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.training import all_whole


class Net(nn.Module):
    """A body, and a norm and a head that can form a group."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(torch.tanh(self.body(x))))
        return result


def make(kind: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def inputs(rank: int) -> Tensor:
    return torch.linspace(-1, 1, 10).view(2, 5) * (rank + 1)


def gradients(reference: nn.Module, ranks: int) -> dict[str, Tensor]:
    """Averages over ranks, computed by one."""
    for rank in range(ranks):
        (reference(inputs(rank)).sum() / ranks).backward()
    return {name: param.grad for name, param in reference.named_parameters()}  # type: ignore[misc]


def full_gradients(model: nn.Module) -> dict[str, Any]:
    return all_whole({name: param.grad for name, param in model.named_parameters()})


def summoned_gradients(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return {name: param.grad.clone() for name, param in model.named_parameters()}  # type: ignore[union-attr]


# --- a group of several modules on the meta device --------------------------------------------------


def load_into_a_group_on_meta(rank: int = 0) -> None:
    reference = make()
    with torch.device("meta"):
        model = Net()
    fully_shard(model.body)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    empty = model.state_dict()
    loaded = {
        name: distribute_tensor(value, empty[name].device_mesh, empty[name].placements)
        for name, value in reference.state_dict().items()
    }
    model.load_state_dict(loaded, assign=True)
    assert_equal(model(inputs(0)), reference(inputs(0)))
    # And one that is left half way says so.
    with torch.device("meta"):
        other = Net()
    fully_shard([other.norm, other.head])
    fully_shard(other)
    other.norm.load_state_dict(
        {name.removeprefix("norm."): v for name, v in loaded.items() if name.startswith("norm.")},
        assign=True,
    )
    with pytest.raises(ConfigurationError, match="one device"):
        other(inputs(0))


def test_a_group_of_modules_on_meta_is_loaded_through_the_root(world) -> None:
    world(2).run(load_into_a_group_on_meta)


# --- devices and meshes ------------------------------------------------------------------------------


def test_a_cpu_with_an_index_is_the_cpu() -> None:
    with fake_world(2):
        for device in (torch.device("cpu:0"), torch.device("cpu", 1), "cpu:0"):
            for model in (make(), Net().to("meta")):
                wrapped = FSDP(
                    model,
                    device_id=device,  # type: ignore[arg-type]
                    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                )
                assert wrapped.compute_device == torch.device("cpu")
                wrapped(inputs(0)).sum().backward()


def train_on_meshes_without_names(ranks: int) -> None:
    expected = gradients(make(), ranks)
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    model = make()
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(inputs(rank)).sum().backward()
    assert_close(full_gradients(model), expected, rtol=1e-5, atol=1e-6)
    wrapped = FSDP(
        make(),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    )
    wrapped(inputs(rank)).sum().backward()
    assert_close(summoned_gradients(wrapped), expected, rtol=1e-5, atol=1e-6)


def test_meshes_of_replicas_need_no_names(world) -> None:
    world(4).run(train_on_meshes_without_names, 4)


# --- switches ---------------------------------------------------------------------------------------

METHODS = [
    "set_is_last_backward",
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
    "set_unshard_in_backward",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "_set_unshard_async_op",
]
WRAPPER_OPTIONS = ["sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params"]
VALUES = [
    (MixedPrecision, "keep_low_precision_grads"),
    (MixedPrecision, "cast_forward_inputs"),
    (MixedPrecision, "cast_root_forward_inputs"),
    (CPUOffload, "offload_params"),
    (FullStateDictConfig, "offload_to_cpu"),
    (FullStateDictConfig, "rank0_only"),
    (MixedPrecisionPolicy, "cast_forward_inputs"),
    (CPUOffloadPolicy, "pin_memory"),
]


def test_what_is_true_or_false_can_be_a_switch() -> None:
    with fake_world(2):
        model = make()
        fully_shard(model)
        for given, meant in ((1, True), (0, False), (np.True_, True), (None, False)):
            for method in METHODS:
                getattr(model, method)(given)
            for option in WRAPPER_OPTIONS:
                wrapped = FSDP(make(), **{option: given})  # type: ignore[arg-type]
                assert getattr(wrapped, option, meant) is meant
            for kind, option in VALUES:
                assert getattr(kind(**{option: given}), option) is meant
        for wrong in ("False", torch.ones(2)):
            for method in METHODS:
                with pytest.raises(TypeError, match="must be True or False"):
                    getattr(model, method)(wrong)
            for option in WRAPPER_OPTIONS:
                with pytest.raises(TypeError, match=option):
                    FSDP(make(), **{option: wrong})  # type: ignore[arg-type]
            for kind, option in VALUES:
                with pytest.raises(TypeError, match=option):
                    kind(**{option: wrong})


def test_numbers_are_no_switches_where_torch_wants_a_bool_and_the_other_way_round() -> None:
    with fake_world(2):
        model = make()
        fully_shard(model)
        for wrong in (1, np.True_, None):
            with pytest.raises(ValueError, match="True or False"):
                model.set_reshard_after_forward(wrong)
        for no_int in (True, np.True_, 1.0):
            with pytest.raises(TypeError, match="must be an int"):
                model.set_reduce_scatter_max_input_buffers(no_int)
        with pytest.raises(ValueError, match="True, False, None or an int"):
            fully_shard(make(), reshard_after_forward=np.True_)  # type: ignore[arg-type]
        model.set_gradient_divide_factor(np.float32(2.0))


# --- another root -----------------------------------------------------------------------------------


def wrap_api(module: nn.Module) -> nn.Module:
    return FSDP(module, use_orig_params=True)


def functional_api(module: nn.Module) -> nn.Module:
    return fully_shard(module)


APIS = {"wrapper": wrap_api, "fully_shard": functional_api}


def shared_body(of: Callable[[nn.Module], nn.Module]) -> list[nn.Module]:
    """Two models with one body."""
    torch.manual_seed(1)
    body, heads = of(nn.Linear(5, 5)), [nn.Linear(5, 3), nn.Linear(5, 4)]
    return [of(nn.Sequential(body, nn.Tanh(), head)) for head in heads]


def all_gradients(models: list[nn.Module], api: str) -> list[Tensor]:
    found = []
    for model in models:
        of_one = summoned_gradients(model) if api == "wrapper" else full_gradients(model)
        found += list(of_one.values())
    return found


def train_under_another_root(api: str, ranks: int) -> None:
    of, rank = APIS[api], torch.distributed.get_rank()
    # 1. The layers have run below a root, and by themselves; then the model is wrapped (again).
    torch.manual_seed(1)
    layers = [nn.Linear(5, 5), nn.Linear(5, 3)]
    reference = nn.Sequential(*layers)
    expected = gradients(reference, ranks)
    torch.manual_seed(1)
    inner = nn.Sequential(of(nn.Linear(5, 5)), of(nn.Linear(5, 3)))
    inner[0](inputs(rank)).sum().backward()
    first = of(inner) if api == "wrapper" else inner
    first(inputs(rank)).sum().backward()
    second = of(nn.Sequential(first) if api == "wrapper" else inner)
    first.zero_grad()
    late = first(inputs(rank)).sum()  # its backward comes when the layers belong to another root
    second(inputs(rank))
    late.backward()
    names = [name.replace("_fsdp_wrapped_module.", "") for name in expected]
    found = summoned_gradients(first) if api == "wrapper" else full_gradients(first)
    assert_close([found[name] for name in names], list(expected.values()), rtol=1e-5, atol=1e-6)
    # 2. Two roots share a layer, in one backward, again and again.
    references = shared_body(lambda module: module)
    for other in range(ranks):
        x = inputs(other)
        ((references[0](x).sum() + references[1](x).sum()) / ranks).backward()
    wanted = [param.grad for model in references for param in model.parameters()]
    models = shared_body(of)
    for _ in range(3):
        for model in models:
            model.zero_grad()
        x = inputs(rank)
        (models[0](x).sum() + models[1](x).sum()).backward()
        assert_close(all_gradients(models, api), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("api", APIS)
def test_modules_that_ran_below_one_root_run_below_another(world, api: str) -> None:
    world(2).run(train_under_another_root, api, 2)


def test_a_root_cannot_be_changed_within_a_forward() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = FSDP(nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            other = FSDP(nn.Sequential(self.layer))
            return other(x)  # type: ignore[no-any-return]

    with fake_world(2), pytest.raises(LifecycleError, match=r"is running: \['0'\]"):
        FSDP(Caller())(torch.ones(1, 2))


# --- methods ----------------------------------------------------------------------------------------


class Writer(nn.Module):
    """Has methods that call the module itself, as `generate` of transformers does, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.layer = Net()
        self.head = nn.Linear(3, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(self.embed(tokens)))
        return result

    def generate(self, tokens: Tensor) -> Tensor:
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens)[-1:].argmax(-1)])
        return tokens

    def encode(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embed(tokens))  # type: ignore[no-any-return]


class Holder(nn.Module):
    """Has a writer."""

    def __init__(self, writer: nn.Module) -> None:
        super().__init__()
        self.writer = writer
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.writer(tokens) * self.scale  # type: ignore[no-any-return]


def call_methods(use_orig_params: bool) -> None:
    reference, tokens = make(Writer), torch.tensor([1, 4])
    expected = reference.generate(tokens)
    reference(tokens).sum().backward()
    wanted = {name: param.grad for name, param in reference.named_parameters()}
    for policy in (None, ModuleWrapPolicy({Net}), ModuleWrapPolicy({nn.Linear, nn.Embedding})):
        options: Any = {"auto_wrap_policy": policy, "use_orig_params": use_orig_params}
        model = FSDP(make(Writer), **options)
        assert_equal(model.generate(tokens), expected)
        assert_equal(model.module.generate(tokens), expected)
        with FSDP.summon_full_params(model, recurse=policy is None):
            assert_equal(model.generate(tokens), expected)
        holder = FSDP(Holder(FSDP(make(Writer), **options)), **options | {"auto_wrap_policy": None})
        assert_equal(holder.writer.generate(tokens), expected)
        holder(tokens)
        assert_equal(holder.writer.generate(tokens), expected)
        model.module(tokens).sum().backward()  # the module inside trains as the wrapper does
        if use_orig_params:
            assert_close(summoned_gradients(model), wanted, rtol=1e-5, atol=1e-6)
        register_fsdp_forward_method(model, "encode")
        assert_equal(model.encode(tokens), reference.encode(tokens))
    broken = FSDP(make(Writer), use_orig_params=use_orig_params)
    for call in (broken, broken.module, broken.generate):
        with pytest.raises(IndexError):
            call(torch.tensor([100]))
        assert_equal(broken.generate(tokens), expected)


def test_copies_of_a_wrapped_module_belong_to_no_wrapper() -> None:
    with fake_world(2):
        model = FSDP(make(Writer), use_orig_params=True)
        with FSDP.summon_full_params(model):
            copied = copy.deepcopy(model.module)
            pickled = pickle.loads(pickle.dumps(model.module))
        tokens = torch.tensor([1, 4])
        for other in (copied, pickled):
            with count_gathers(model) as gathers:
                other.generate(tokens)
            assert not gathers


@contextlib.contextmanager
def count_gathers(model: Any) -> Iterator[list[int]]:
    """Note every gather of a wrapper."""
    found: list[int] = []
    (group,) = model._fsdp_state.groups
    before = group.unshard

    def unshard(**options: bool) -> None:
        found.append(1)
        before(**options)

    group.unshard = unshard
    try:
        yield found
    finally:
        del group.unshard


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_methods_that_call_the_wrapped_module_find_its_parameters(world, use_orig_params) -> None:
    world(2).run(call_methods, use_orig_params)


def generate_text(use_orig_params: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def language_model() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=32, num_attention_heads=2, eos_token_id=None, **sizes)
        return LlamaForCausalLM(config).eval()

    tokens, options = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 3, "do_sample": False}
    expected = language_model().generate(tokens, **options)
    model = FSDP(
        language_model(),
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=use_orig_params,
    )
    assert_equal(model.generate(tokens, **options), expected)
    with FSDP.summon_full_params(model, writeback=False):
        assert_equal(model.generate(tokens, **options), expected)
    model(tokens).logits.sum().backward()
    assert_equal(model.generate(tokens, **options), expected)


def test_a_wrapped_transformer_generates(world) -> None:
    pytest.importorskip("transformers")
    world(2).run(generate_text, True)


def test_the_errors_of_options_are_public() -> None:
    assert issubclass(fullshard.OptionTypeError, ConfigurationError)
