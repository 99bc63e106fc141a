"""Policies choose the modules that torch's choose, and the engine wraps these once, everywhere, or none.

Trees are random. torch's side wraps the same tree with the same dummy wrapper; what may differ is said
where it is tested.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp._wrap_utils import _auto_wrap as torch_auto_wrap

import fullshard.wrap
from fullshard import ConfigurationError, UnsupportedError
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    auto_wrap,
    enable_wrap,
    size_based_auto_wrap_policy,
    wrap,
)

OURS_AND_TORCH_S = pytest.mark.parametrize(
    "api", [fullshard.wrap, torch_wrap], ids=["ours", "torch"]
)


class Wrapper(nn.Module):
    """Remembers its arguments."""

    def __init__(
        self,
        module: nn.Module,
        mixed_precision: object = None,
        use_orig_params: bool = True,
        auto_wrap_policy: None = None,
        tag: object = None,
    ) -> None:
        super().__init__()
        self.inner = module
        self.mixed_precision = mixed_precision
        self.tag = tag

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Block(nn.Sequential):
    """A class of its own, which is a Sequential too."""


class ShapedNorm(nn.LayerNorm):
    """A leaf with a child."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.scale = nn.Linear(size, 1)


# --- trees ----------------------------------------------------------------------------------------

LEAVES: list[Callable[[int], nn.Module]] = [
    lambda size: nn.Linear(size, size),
    lambda size: nn.Embedding(size, 2),
    nn.BatchNorm1d,
    ShapedNorm,
    lambda size: nn.MultiheadAttention(size, 1),
    lambda size: nn.ReLU(),
]
CONTAINERS: list[Callable[[list[nn.Module]], nn.Module]] = [
    lambda children: nn.Sequential(*children),
    lambda children: Block(*children),
    nn.ModuleList,
    lambda children: nn.ModuleDict({f"key{i}": child for i, child in enumerate(children)}),
]


def tree(seed: int, *, shared: bool = False) -> nn.Module:
    """A random tree; with ``shared``, some modules have several parents or names."""
    return copied(built_tree(seed, shared), {})


def copied(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a module and those below it, but no parameters: wrapping puts modules in the places of others, only."""
    if module not in made:
        made[module] = new = object.__new__(type(module))
        for name, value in vars(module).items():
            new.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
        for name, child in module._modules.items():  # named_children leaves out what is shared
            new._modules[name] = None if child is None else copied(child, made)
    return made[module]


@functools.cache
def built_tree(seed: int, shared: bool) -> nn.Module:
    """The tree that copies are made of: building it takes ten times as long."""
    rng = random.Random(seed)
    made: list[nn.Module] = []

    def build(depth: int) -> nn.Module:
        if shared and made and rng.random() < 0.3:
            return rng.choice(made)
        if depth == 0 or rng.random() < 0.3:
            module = rng.choice(LEAVES)(rng.randint(1, 6))
        else:
            children = [build(depth - 1) for _ in range(rng.randint(0, 4))]
            module = rng.choice(CONTAINERS)(children)
        made.append(module)
        return module

    with torch.device("meta"):
        return nn.Sequential(*[build(4) for _ in range(3)])


def named(root: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in root.named_modules()}


def wrappers(root: nn.Module) -> dict[str, tuple[bool, object]]:
    """Names that wrapped modules had before, and whether with mixed precision, and with which tag."""
    return {
        name.replace(".inner", ""): (module.mixed_precision is not None, module.tag)
        for name, module in root.named_modules()
        if isinstance(module, Wrapper)
    }


def partial(function: str, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda api: functools.partial(getattr(api, function), **kwargs)


def by_class_or_size(api: Any) -> Any:
    by_size = functools.partial(api.size_based_auto_wrap_policy, min_num_params=30)
    policies = [by_size, api.ModuleWrapPolicy([Block])]
    return functools.partial(api._or_policy, policies=policies)


def with_tags(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, nn.Linear):
        return {"tag": module.in_features} if module.in_features % 2 else {}
    return isinstance(module, (Block, nn.BatchNorm1d))


POLICIES: dict[str, Callable[[Any], Any]] = {
    "always": lambda api: api.always_wrap_policy,
    "lambda": partial(
        "lambda_auto_wrap_policy",
        lambda_fn=lambda module: sum(p.numel() for p in module.parameters()) % 2,
    ),
    "transformer": partial("transformer_auto_wrap_policy", transformer_layer_cls={Block}),
    "module": partial("_module_wrap_policy", module_classes={nn.Sequential, nn.Linear}),
    "size 1": partial("size_based_auto_wrap_policy", min_num_params=1),
    "size 20": partial("size_based_auto_wrap_policy", min_num_params=20),
    "size 60": partial("size_based_auto_wrap_policy", min_num_params=60),
    "size, leaves": partial(
        "size_based_auto_wrap_policy", min_num_params=20, force_leaf_modules={Block}
    ),
    "size, all": partial(
        "size_based_auto_wrap_policy",
        min_num_params=20,
        force_leaf_modules=set(),
        exclude_wrap_modules=set(),
    ),
    "or": by_class_or_size,
    "classes": lambda api: api.ModuleWrapPolicy([nn.Sequential, nn.Linear]),
    "custom": lambda api: api.CustomPolicy(with_tags),
}


LOOK_AWAY = {"size 1", "size 20", "size 60", "size, leaves", "or"}
"""Policies that do not look into some modules."""


def assert_as_torch(
    seed: int,
    policy: Callable[[Any], Any],
    *,
    ignored: float = 0.0,
    full_precision: tuple[type[nn.Module], ...] | None = None,
) -> None:
    ours = tree(seed)
    theirs = tree(seed)
    mixed = (
        None
        if full_precision is None
        else MixedPrecision(torch.bfloat16, _module_classes_to_ignore=full_precision)
    )
    kwargs = {"mixed_precision": mixed, "use_orig_params": True, "tag": "root"}
    rng = random.Random(seed)
    out = [name for name, _ in ours.named_modules() if name and rng.random() < ignored]

    # Also torch's wrapper class hands over ignored modules with all modules and parameters below them.
    below = {module for name in out for module in theirs.get_submodule(name).modules()}
    params = {param for module in below for param in module.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_auto_wrap(theirs, policy(torch_wrap), below, params, dict(kwargs), Wrapper)
    before = named(ours)
    plan = auto_wrap(
        ours,
        policy(fullshard.wrap),
        Wrapper,
        root_kwargs=kwargs,
        ignored_modules=[ours.get_submodule(name) for name in out],
        class_kwargs={cls: {"mixed_precision": None} for cls in full_precision or ()},
    )
    assert wrappers(ours) == wrappers(theirs)
    assert {w.name for w in plan} == set(wrappers(ours))
    assert all(w.name == before[w.module] for w in plan)


SEEDS = range(8)
every_policy = pytest.mark.parametrize("policy", POLICIES)


@every_policy
def test_the_modules_are_those_that_torch_wraps(policy: str) -> None:
    for seed in SEEDS:
        assert_as_torch(seed, POLICIES[policy])


@every_policy
def test_ignored_modules_are_left_out_as_in_torch(policy: str) -> None:
    for seed in SEEDS:
        assert_as_torch(seed, POLICIES[policy], ignored=0.15)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in LOOK_AWAY])
def test_batch_norms_keep_full_precision_as_in_torch(policy: str) -> None:
    for seed in SEEDS:
        assert_as_torch(seed, POLICIES[policy], full_precision=(nn.BatchNorm1d, nn.Embedding))
        assert_as_torch(seed, POLICIES[policy], full_precision=(Block,), ignored=0.1)


@every_policy
def test_a_shared_module_is_wrapped_once_and_replaced_everywhere(policy: str) -> None:
    for seed in SEEDS:
        root = tree(seed, shared=True)
        before = [
            (parent, name, child)
            for parent in root.modules()
            for name, child in parent._modules.items()
        ]
        plan = auto_wrap(root, POLICIES[policy](fullshard.wrap), Wrapper, root_kwargs={})
        chosen = {w.module for w in plan}
        assert len(chosen) == len(plan)
        wrapper_of = {w.inner: w for w in root.modules() if isinstance(w, Wrapper)}
        assert set(wrapper_of) == chosen
        for parent, name, child in before:
            assert parent._modules[name] is wrapper_of.get(child, child)


@pytest.mark.parametrize("policy", ["always", "lambda", "module", "classes", "custom"])
def test_sharing_does_not_change_the_choice(policy: str) -> None:
    """torch makes several wrappers or forgets places; which modules it chooses is the same."""
    for seed in SEEDS:
        root = tree(seed, shared=True)
        names = named(root)
        theirs = POLICIES[policy](torch_wrap)
        if isinstance(theirs, torch_wrap._Policy):
            chosen = set(theirs._run_policy(root, set(), {})) - {root}
        else:
            chosen = {m for m in names if m is not root and theirs(m, False, 0)}
        plan = auto_wrap(root, POLICIES[policy](fullshard.wrap), Wrapper, root_kwargs={})
        assert {w.name for w in plan} == {names[module] for module in chosen}


# --- the engine -----------------------------------------------------------------------------------


def small() -> Any:
    return nn.Sequential(
        nn.Linear(2, 2), Block(nn.Linear(2, 3), nn.BatchNorm1d(3), Block(nn.Linear(3, 3)))
    )


@pytest.mark.parametrize("least", [0, 7, 20])
def test_a_function_is_asked_what_torch_asks(least: int) -> None:
    def questions(run: Callable[[nn.Module, Any], object]) -> list[tuple[str, bool, int]]:
        root, asked = small(), []
        names = named(root)

        def policy(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            asked.append((names[module], recurse, nonwrapped_numel))
            return nonwrapped_numel >= least

        run(root, policy)
        return asked

    kwargs = {"mixed_precision": None, "use_orig_params": True}
    ours = questions(lambda root, policy: auto_wrap(root, policy, Wrapper, root_kwargs=kwargs))
    theirs = questions(
        lambda root, policy: torch_auto_wrap(root, policy, set(), set(), kwargs, Wrapper)
    )
    assert ours == theirs
    assert ours[0] == ("", True, 6 + 9 + 6 + 12)


def test_ignored_parameters_do_not_count() -> None:
    def wrapped(*ignored: nn.Parameter) -> list[str]:
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=12)
        plan = auto_wrap(root, policy, Wrapper, root_kwargs={}, ignored_params=ignored)
        return [w.name for w in plan]

    root = small()
    last = root[1][2][0]
    assert wrapped(last.bias) == ["1"]
    root = small()
    assert wrapped() == ["1.2.0", "1"]


def test_a_parameter_shared_by_wrapped_modules_is_subtracted_once() -> None:
    """torch subtracts it once for each of them, and may ask about a negative number."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    numels = {}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        numels[type(module), recurse] = nonwrapped_numel
        return recurse or module in (first, second)

    block = Block(first, second, nn.ReLU(), nn.PReLU())
    auto_wrap(nn.Sequential(block), policy, Wrapper, root_kwargs={})
    assert numels[Block, True] == 4 + 2 + 2 + 1
    assert numels[Block, False] == 1


def test_children_are_wrapped_before_parents_and_the_root_is_not() -> None:
    root = small()
    order = []

    class Recorder(Wrapper):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            order.append([type(child).__name__ for child in module.children()])

    plan = auto_wrap(root, ModuleWrapPolicy([nn.Sequential]), Recorder, root_kwargs={})
    assert [w.name for w in plan] == ["1.2", "1"]
    assert order == [["Linear"], ["Linear", "BatchNorm1d", "Recorder"]]
    assert type(root) is nn.Sequential


def test_a_wrapped_model_computes_the_same_also_with_modules_of_several_names() -> None:
    shared = nn.Linear(2, 2)
    root: Any = nn.Sequential(shared, nn.Tanh(), Block(shared, nn.Tanh()), shared)
    root.register_module("absent", None)
    x = torch.randn(3, 2)
    expected = shared(torch.tanh(shared(torch.tanh(shared(x)))))
    auto_wrap(root, ModuleWrapPolicy({nn.Linear, Block}), Wrapper, root_kwargs={})
    assert root[0] is root[3] is root[2].inner[0]
    assert root.absent is None
    torch.testing.assert_close(root[3](root[2](root[1](root[0](x)))), expected)


def test_overrides_of_classes_win_over_those_of_the_policy() -> None:
    root = small()
    policy = CustomPolicy(
        lambda module: (
            {"tag": "policy", "mixed_precision": 1} if isinstance(module, nn.BatchNorm1d) else False
        )
    )
    plan = auto_wrap(
        root,
        policy,
        Wrapper,
        root_kwargs={"mixed_precision": 2},
        class_kwargs={
            nn.BatchNorm1d: {"mixed_precision": None},
            nn.Module: {"auto_wrap_policy": None},
        },
        ignored_modules=[root[0], root[1][0], root[1][2]],
    )
    assert [(w.name, w.kwargs) for w in plan] == [
        ("1.1", {"mixed_precision": None, "tag": "policy", "auto_wrap_policy": None}),
        ("1", {"mixed_precision": 2, "auto_wrap_policy": None}),
    ]


def test_what_a_policy_does_not_look_into_stays_whole_but_for_classes_with_overrides() -> None:
    """torch looks everywhere then, and wraps the projection that attention uses without calling it."""

    class Attention(nn.MultiheadAttention):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.norm = nn.BatchNorm1d(4)

    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1)
    plan = auto_wrap(
        nn.Sequential(Attention(), nn.Linear(2, 2)),
        policy,
        Wrapper,
        root_kwargs={},
        class_kwargs={nn.BatchNorm1d: {"mixed_precision": None}},
    )
    assert [w.name for w in plan] == ["0.norm", "1"]


def test_wrappers_get_arguments_of_their_own() -> None:
    kwargs = {"tag": 1}
    root = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for policy in (ModuleWrapPolicy([nn.Linear]), fullshard.wrap.always_wrap_policy):
        first, second = auto_wrap(copy.deepcopy(root), policy, Wrapper, root_kwargs=kwargs)
        assert first.kwargs == second.kwargs == kwargs
        assert len({id(kwargs), id(first.kwargs), id(second.kwargs)}) == 3


# --- functions and objects ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*torch_wrap.__all__, "_or_policy", "_module_wrap_policy"])
def test_arguments_are_those_of_torch(name: str) -> None:
    def arguments(api: Any) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(getattr(api, name)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert arguments(fullshard.wrap) == arguments(torch_wrap)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "custom"])
def test_functions_answer_as_torch_s_do(policy: str) -> None:
    ours, theirs = POLICIES[policy](fullshard.wrap), POLICIES[policy](torch_wrap)
    modules = [make(2) for make in LEAVES] + [make([nn.Linear(2, 2)]) for make in CONTAINERS]
    for module in modules:
        for recurse in (True, False):
            for numel in (0, 19, 20, 21, 60, 10**9):
                answer = bool(theirs(module=module, recurse=recurse, nonwrapped_numel=numel))
                assert ours(module=module, recurse=recurse, nonwrapped_numel=numel) is answer
                assert ours(module, recurse, numel) is answer


@OURS_AND_TORCH_S
def test_defaults_of_the_size_policy_are_attributes_that_can_be_changed(api: Any) -> None:
    policy = api.size_based_auto_wrap_policy
    assert policy.EXCLUDE_WRAP_MODULES == {nn.ModuleList, nn.ModuleDict}
    assert policy.FORCE_LEAF_MODULES == {nn.MultiheadAttention}
    ask = functools.partial(policy, Block(), nonwrapped_numel=int(1e8))
    assert ask(recurse=True) and ask(recurse=False)
    assert not policy(Block(), True, int(1e8) - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "FORCE_LEAF_MODULES", {Block})
        assert not ask(recurse=True) and ask(recurse=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "EXCLUDE_WRAP_MODULES", {Block})
        assert ask(recurse=True) and not ask(recurse=False)


@OURS_AND_TORCH_S
def test_policies_that_are_objects_can_be_run(api: Any) -> None:
    root = small()
    kwargs = {"tag": 1, "mixed_precision": 2}
    by_class = api.ModuleWrapPolicy([nn.Sequential])
    assert by_class._run_policy(root[1], {root[1][2]}, kwargs) == {root[1]: kwargs}
    custom = api.CustomPolicy(with_tags)._run_policy(
        nn.Sequential(root[1][0], *root[1]), set(), kwargs
    )
    assert custom == {root[1][1]: kwargs, root[1][2]: kwargs, root[1][2][0]: {**kwargs, "tag": 3}}
    assert isinstance(by_class, api._Policy)


def test_a_policy_says_what_it_is() -> None:
    assert repr(ModuleWrapPolicy([nn.Linear, Block])) == "ModuleWrapPolicy({Linear, Block})"


# --- by hand --------------------------------------------------------------------------------------


@OURS_AND_TORCH_S
def test_wrap_wraps_within_the_context_only(api: Any) -> None:
    layer = nn.Linear(1, 1)
    assert api.wrap(layer, tag=1) is layer
    with api.enable_wrap(wrapper_cls=Wrapper, tag="context", mixed_precision=1):
        plain, overridden = api.wrap(layer), api.wrap(api.wrap(layer), tag="call")
        assert (plain.inner, plain.tag, plain.mixed_precision) == (layer, "context", 1)
        assert (overridden.tag, overridden.mixed_precision) == ("call", 1)
        assert type(overridden.inner) is Wrapper
    assert api.wrap(layer) is layer
    with pytest.raises(KeyError), api.enable_wrap(wrapper_cls=Wrapper):
        raise KeyError
    assert api.wrap(layer) is layer


@OURS_AND_TORCH_S
def test_contexts_cannot_be_nested_and_the_outer_one_stays(api: Any) -> None:
    with api.enable_wrap(wrapper_cls=Wrapper, tag="outer"):
        with pytest.raises(NotImplementedError, match="nested"):
            with api.enable_wrap(wrapper_cls=nn.Identity):
                pass
        assert api.wrap(nn.Linear(1, 1)).tag == "outer"


def test_a_context_is_one_thread_s() -> None:
    layer, found = nn.Linear(1, 1), []
    with enable_wrap(wrapper_cls=Wrapper):
        thread = threading.Thread(target=lambda: found.append(wrap(layer)))
        thread.start()
        thread.join()
    assert found == [layer]


# --- errors ---------------------------------------------------------------------------------------


@pytest.fixture
def unchanged() -> Iterator[nn.Module]:
    """A tree that must be as it was when the test is over."""
    root = small()
    before = dict(root.named_modules())
    yield root
    assert dict(root.named_modules()) == before


@pytest.mark.parametrize(
    "policy",
    [None, 3, {nn.Linear}, nn.Linear, torch_wrap.CustomPolicy(with_tags)],
    ids=["none", "number", "set", "class", "torch's"],
)
def test_a_policy_must_be_a_policy(unchanged: nn.Module, policy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a function.*pass ModuleWrapPolicy"):
        auto_wrap(unchanged, policy, Wrapper, root_kwargs={})


@pytest.mark.parametrize("classes", [nn.Linear, None, {3}, [nn.Linear(1, 1)], "Linear"], ids=repr)
def test_classes_must_be_classes(classes: Any) -> None:
    message = "must be a set of module classes, got"
    with pytest.raises(ConfigurationError, match=f"module_classes {message}"):
        ModuleWrapPolicy(classes)
    for policy, argument in [
        (fullshard.wrap.transformer_auto_wrap_policy, "transformer_layer_cls"),
        (fullshard.wrap._module_wrap_policy, "module_classes"),
        *([(size_based_auto_wrap_policy, "exclude_wrap_modules")] if classes else []),
    ]:
        with pytest.raises(ConfigurationError, match=f"{argument} {message}"):
            policy(nn.Linear(1, 1), False, 10**9, **{argument: classes})


@pytest.mark.parametrize("answer", [None, 1, "x", []])
def test_a_custom_policy_must_answer_with_a_bool_or_a_dict(
    unchanged: nn.Module, answer: Any
) -> None:
    policy = CustomPolicy(lambda module: answer if isinstance(module, Block) else True)
    with pytest.raises(ConfigurationError, match=r"must return True, False or a dict") as caught:
        auto_wrap(unchanged, policy, Wrapper, root_kwargs={})
    assert f"\n  1: {answer!r}\n  1.2: {answer!r}" in str(caught.value)


@pytest.mark.parametrize("wrong", [{"tga": 1}, {1: 2}], ids=repr)
def test_arguments_that_the_wrapper_does_not_take_are_found_first(
    unchanged: nn.Module, wrong: Any
) -> None:
    policy = CustomPolicy(lambda module: wrong if isinstance(module, Block) else True)
    with pytest.raises(
        ConfigurationError, match=r"arguments that Wrapper takes.*\n  1\.2: .*\n  1: "
    ):
        auto_wrap(unchanged, policy, Wrapper, root_kwargs={"tag": 1})


def test_a_policy_that_fails_changes_nothing(unchanged: nn.Module) -> None:
    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if isinstance(module, Block) and not recurse:
            raise KeyError
        return True

    with pytest.raises(KeyError):
        auto_wrap(unchanged, policy, Wrapper, root_kwargs={})


@pytest.mark.parametrize("policy", ["always", "classes"])
def test_modules_that_are_wrapped_already_are_refused_by_name(policy: str) -> None:
    """Ignored or not, as by torch's FullyShardedDataParallel."""
    inside = Block(nn.ReLU(), Wrapper(nn.Linear(1, 1)))
    root = nn.Sequential(nn.Linear(1, 1), inside)
    for given_root, name in ((root, "1.1"), (inside[1], "the root")):
        with pytest.raises(
            ConfigurationError, match=rf"Wrapper already, but these are: \['{name}'\]"
        ):
            auto_wrap(
                given_root,
                POLICIES[policy](fullshard.wrap),
                Wrapper,
                root_kwargs={},
                ignored_modules=[inside],
            )
    assert type(root[0]) is nn.Linear


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="lambda_fn of CustomPolicy must be a function"):
        CustomPolicy({nn.Linear: True})
    with pytest.raises(
        ConfigurationError, match="wrapper_cls must be a class of wrappers, got None"
    ):
        with enable_wrap(wrapper_cls=None):
            pass
    with pytest.raises(UnsupportedError, match="Override arguments in the calls of wrap"):
        with enable_wrap(wrapper_cls=Wrapper), enable_wrap(wrapper_cls=Wrapper):
            pass
