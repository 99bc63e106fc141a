"""Policies that choose which modules get wrappers of their own: the names of `torch.distributed.fsdp.wrap`.

    from fullshard.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({TransformerBlock})

A policy is an object that chooses all modules at once (`ModuleWrapPolicy`, `CustomPolicy`), or a function that answers
two questions about each module:

    policy(module=..., recurse=True, nonwrapped_numel=...)     look into this module?
    policy(module=..., recurse=False, nonwrapped_numel=...)    wrap it? its children are decided already

``nonwrapped_numel`` is the number of elements of the module's parameters; in the second question, without those of
modules below that are going to be wrapped. `functools.partial` sets further arguments of a function. `auto_wrap` asks a
policy and wraps the modules.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.errors import ConfigurationError, OptionTypeError, UnsupportedError
from fullshard.torch_border import child_table

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Wrapping",
    "always_wrap_policy",
    "auto_wrap",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

PolicyFn = Callable[..., bool]
"""A function with the arguments ``module``, ``recurse`` and ``nonwrapped_numel``."""


# --- policies that are functions ------------------------------------------------------------------


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules for which ``lambda_fn(module)`` is true."""
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Wrap the modules of the given classes."""
    return recurse or isinstance(
        module, _classes_of_function("transformer_layer_cls", transformer_layer_cls)
    )


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: set[type[nn.Module]]
) -> bool:
    """Wrap the modules of the given classes."""
    return recurse or isinstance(module, _classes_of_function("module_classes", module_classes))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap a module once its parameters that are in no other wrapper have enough elements together.

    Args:
        module: The module in question.
        recurse: Whether the question is to look into the module, or to wrap it.
        nonwrapped_numel: The number of elements of its parameters that are in no other wrapper.
        min_num_params: The number of elements that is enough.
        force_leaf_modules: Classes of modules that are neither looked into nor wrapped; by default
            ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``.
        exclude_wrap_modules: Classes of modules that are looked into, but not wrapped; by default
            ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``.
    """
    name, given = (
        ("force_leaf_modules", force_leaf_modules)
        if recurse
        else ("exclude_wrap_modules", exclude_wrap_modules)
    )
    if given is None:
        default = "FORCE_LEAF_MODULES" if recurse else "EXCLUDE_WRAP_MODULES"
        given = getattr(size_based_auto_wrap_policy, default)
    classes = _classes_of_function(name, given)
    return nonwrapped_numel >= min_num_params and not isinstance(module, classes)


# Containers have no forward. Attention uses its child's weight without calling the child.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[PolicyFn]
) -> bool:
    """Wrap the modules that any of the policies wraps."""
    _check_not_iterator("policies", policies)
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


# --- policies that are objects --------------------------------------------------------------------


class _Policy(ABC):
    """A policy that chooses all modules at once."""

    @abstractmethod
    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap, each with its wrapper's keyword arguments; the root may be among them."""


class ModuleWrapPolicy(_Policy):
    """A policy that wraps the modules of the given classes, with the root's keyword arguments."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = _classes("module_classes", module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Answer as a policy function does, so that `_or_policy` can combine it with others."""
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(cls.__name__ for cls in self._module_classes)}}})"

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, self._module_classes)
        }


class CustomPolicy(_Policy):
    """A policy that wraps the modules that a function chooses, with keyword arguments of its choice.

        CustomPolicy(lambda module: {"forward_prefetch": True} if module is model.head else False)

    Args:
        lambda_fn: Takes a module. False or an empty dict: it is not wrapped. True: it is wrapped with the root's keyword
            arguments. A dict: it is wrapped with the root's keyword arguments, overridden by these.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        if not callable(lambda_fn):
            raise OptionTypeError(
                f"lambda_fn of CustomPolicy must be a function of a module, got {lambda_fn!r}."
            )
        self._lambda_fn = lambda_fn

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Answer as a policy function does: for `_or_policy`, and for torch's `apply_activation_checkpointing`."""
        if recurse:
            return True
        answer = self._lambda_fn(module)
        if answer and isinstance(answer, dict):
            raise UnsupportedError(
                "A policy that is asked about one module at a time must answer True or False, but lambda_fn of CustomPolicy "
                f"returned keyword arguments for a {type(module).__name__}: {answer!r}. Return True. (After "
                "fullshard.install(), torch's apply_activation_checkpointing takes them.)"
            )
        return bool(answer)

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        answers = {
            module: (name, self._lambda_fn(module))
            for name, module in root_module.named_modules()
            if module not in ignored_modules
        }
        wrong = [
            f"{name or 'the root'}: {answer!r}"
            for name, answer in answers.values()
            if not isinstance(answer, (bool, dict))
        ]
        if wrong:
            raise ConfigurationError(
                "lambda_fn of CustomPolicy must return True, False or a dict of keyword arguments, but it returned\n  "
                + "\n  ".join(wrong)
                + "\nReturn bool(...) for truth values."
            )
        chosen = {module: answer for module, (_, answer) in answers.items() if answer}
        overrides = _readable_again(
            answer if isinstance(answer, dict) else {} for answer in chosen.values()
        )
        return {
            module: {**root_kwargs, **theirs}
            for module, theirs in zip(chosen, overrides, strict=True)
        }


# --- by hand --------------------------------------------------------------------------------------

_wrapper: ContextVar[Callable[..., nn.Module] | None] = ContextVar("_wrapper", default=None)
"""The function that `wrap` calls on this thread; None outside of `enable_wrap`."""


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Return a context in which `wrap` wraps modules, on this thread.

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=0):
            self.layer = wrap(nn.Linear(5, 5))

    Args:
        wrapper_cls: A class or function that takes a module and keyword arguments and returns the wrapper.
        **wrapper_kwargs: Keyword arguments for all wrappers made within.
    """
    if not callable(wrapper_cls):
        raise OptionTypeError(
            f"wrapper_cls must be a class of wrappers, got {wrapper_cls!r}. Pass for example FullyShardedDataParallel."
        )
    if _wrapper.get() is not None:
        raise UnsupportedError(
            "enable_wrap contexts cannot be nested. Override arguments in the calls of wrap instead."
        )
    token = _wrapper.set(functools.partial(wrapper_cls, **_readable_again([wrapper_kwargs])[0]))
    try:
        yield
    finally:
        _wrapper.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module within `enable_wrap`, and return it unchanged otherwise.

    Args:
        module: The module.
        **wrap_overrides: Keyword arguments of its wrapper; they override those of `enable_wrap`.
    """
    wrapper = _wrapper.get()
    return module if wrapper is None else wrapper(module, **wrap_overrides)


# --- by policy ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrapping:
    """A module to wrap."""

    name: str
    """The full name below the root; of a shared module, its first name."""
    module: nn.Module
    kwargs: dict[str, Any]
    """Keyword arguments of its wrapper."""
    places: list[tuple[nn.Module, str]]
    """The parents of the module, with its name in each."""


def auto_wrap(
    root: nn.Module,
    policy: _Policy | PolicyFn,
    wrapper_cls: type[nn.Module],
    *,
    root_kwargs: Mapping[str, Any],
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    class_kwargs: Mapping[type[nn.Module], Mapping[str, Any]] | None = None,
    check: Callable[[list[Wrapping]], None] | None = None,
) -> list[Wrapping]:
    """Wrap the modules below ``root`` that a policy chooses, children before their parents.

    The caller wraps the root itself. A shared module gets one wrapper, which replaces it in all its parents. Everything is
    checked before the first module is replaced.

    Batch norm does not work in low precision. So with mixed precision it gets a wrapper whatever the policy says, and
    computes in full precision:

        class_kwargs={cls: {"mixed_precision": None} for cls in classes_to_ignore}

    Args:
        root: The module whose submodules are wrapped.
        policy: A policy of this module, or a function that answers the same questions.
        wrapper_cls: The class of wrappers, called as ``wrapper_cls(module, **kwargs)``.
        root_kwargs: Keyword arguments of all wrappers, without the policy.
        ignored_modules: Modules that are not wrapped, nor is anything below them; their parameters do not count.
        ignored_params: Parameters that do not count in ``nonwrapped_numel``.
        class_kwargs: Classes of modules that are wrapped whatever the policy says, with keyword arguments that override
            those of the root and of the policy.
        check: Called with the modules that are going to be wrapped; it may raise.

    Returns:
        The modules that were wrapped, in this order.
    """
    _check_policy(policy)
    _check_not_wrapped(root, wrapper_cls)
    root_kwargs = _readable_again([root_kwargs])[0]
    ignored = {below for module in ignored_modules for below in module.modules()}
    forced = _of_classes(root, class_kwargs or {}, ignored)
    chosen = _chosen_by_policy(root, policy, root_kwargs, ignored, ignored_params, forced)
    for module, kwargs in forced.items():
        chosen[module] = {**chosen.get(module, root_kwargs), **kwargs}
    parents = _parents(root)
    plan = [
        Wrapping(name, module, chosen[module], parents[module])
        for name, module in _children_first(root)
        if module in chosen and module is not root
    ]
    _check_kwargs(plan, wrapper_cls)
    if check is not None:
        check(plan)
    for wrapping in plan:
        wrapper = wrapper_cls(wrapping.module, **wrapping.kwargs)
        for parent, name in wrapping.places:
            setattr(parent, name, wrapper)
    return plan


def _of_classes(
    root: nn.Module,
    class_kwargs: Mapping[type[nn.Module], Mapping[str, Any]],
    ignored: Collection[nn.Module],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that are wrapped whatever the policy says, with their keyword arguments."""
    found: dict[nn.Module, dict[str, Any]] = {}
    for module in root.modules():
        for cls, kwargs in class_kwargs.items():
            if isinstance(module, cls) and module not in ignored:
                found.setdefault(module, {}).update(kwargs)
    return found


def _chosen_by_policy(
    root: nn.Module,
    policy: _Policy | PolicyFn,
    root_kwargs: Mapping[str, Any],
    ignored: set[nn.Module],
    ignored_params: Iterable[nn.Parameter],
    forced: Iterable[nn.Module],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that a policy of either kind wraps, each with its keyword arguments."""
    if isinstance(policy, _Policy):
        return policy._run_policy(root, ignored, dict(root_kwargs))
    uncounted = {param for module in ignored for param in module.parameters()}
    asked = _ask(root, policy, ignored, uncounted.union(ignored_params), forced)
    return {module: dict(root_kwargs) for module in asked}


def _ask(
    root: nn.Module,
    policy: PolicyFn,
    ignored: Collection[nn.Module],
    uncounted: Collection[nn.Parameter],
    forced: Iterable[nn.Module],
) -> set[nn.Module]:
    """Return the modules below the root that a policy function wraps, and the forced ones."""
    chosen, seen = set(forced), set(ignored)

    def numel(module: nn.Module, without: Collection[nn.Parameter] = ()) -> int:
        return sum(
            param.numel()
            for param in module.parameters()
            if param not in uncounted and param not in without
        )

    def visit(module: nn.Module) -> None:
        seen.add(module)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel(module)):
            return
        for child in module.children():
            if child not in seen:
                visit(child)
        if module is root:
            return
        wrapped = {
            param
            for below in module.modules()
            if below in chosen and below is not module
            for param in below.parameters()
        }
        if policy(module=module, recurse=False, nonwrapped_numel=numel(module, wrapped)):
            chosen.add(module)

    visit(root)
    return chosen


def _children_first(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, with its name, after all modules below it."""
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        seen.add(module)
        for child_name, child in module.named_children():
            if child not in seen:
                yield from visit(f"{name}.{child_name}" if name else child_name, child)
        yield name, module

    return visit("", root)


def _parents(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return the parents of every module below the root, with its name in each."""
    parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in child_table(parent).items():
            if child is not None:
                parents.setdefault(child, []).append((parent, name))
    return parents


def reiterable(value: Any) -> Any:
    """Return a value that several wrappers can read: of a generator, the tuple of what it yields."""
    return tuple(value) if isinstance(value, Iterator) else value


def _readable_again(kwargs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return keyword arguments that several wrappers can read, with generators replaced by what they yield.

    The first wrapper would exhaust a generator, and all others would find it empty.
    """
    read: dict[int, Any] = {}

    def again(value: Any) -> Any:
        if id(value) not in read:
            read[id(value)] = reiterable(value)
        return read[id(value)]

    return [{name: again(value) for name, value in each.items()} for each in kwargs]


# --- checks ---------------------------------------------------------------------------------------


def _classes_of_function(
    argument: str, given: Iterable[type[nn.Module]]
) -> tuple[type[nn.Module], ...]:
    """Return classes for `isinstance` that a policy function reads in each of its calls."""
    _check_not_iterator(argument, given)
    return _classes(argument, given)


def _check_not_iterator(argument: str, given: object) -> None:
    if isinstance(given, Iterator):
        raise ConfigurationError(
            f"{argument} of a policy function is read for every module, but a {type(given).__name__} can be read only once. "
            "Pass a set or a list."
        )


def _classes(argument: str, given: Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    """Return a set of classes as `isinstance` takes it."""
    classes = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(isinstance(cls, type) for cls in classes):
        raise OptionTypeError(
            f"{argument} must be a set of module classes, got {given!r}. Pass for example {{torch.nn.Linear}}."
        )
    return classes


def _check_policy(policy: object) -> None:
    if isinstance(policy, _Policy) or (callable(policy) and not isinstance(policy, type)):
        return
    raise OptionTypeError(
        "The policy must be a function, or a ModuleWrapPolicy or CustomPolicy of fullshard.wrap, "
        f"got {policy!r}. To wrap the modules of some classes, pass ModuleWrapPolicy(classes)."
    )


def _check_not_wrapped(root: nn.Module, wrapper_cls: type[nn.Module]) -> None:
    wrapped = [
        name or "the root"
        for name, module in root.named_modules()
        if isinstance(module, wrapper_cls)
    ]
    if wrapped:
        raise ConfigurationError(
            f"With a policy, no module may be a {wrapper_cls.__name__} already, but these are: {wrapped}. Let the policy "
            "choose all wrappers, or pass no policy."
        )


def _check_kwargs(plan: Iterable[Wrapping], wrapper_cls: type[nn.Module]) -> None:
    """Refuse keyword arguments that the wrapper does not take."""
    signature = inspect.signature(wrapper_cls)
    faults = []
    for wrapping in plan:
        try:
            signature.bind(wrapping.module, **wrapping.kwargs)
        except TypeError as error:
            faults.append(f"{wrapping.name}: {error}")
    if faults:
        raise OptionTypeError(
            f"The policy must give arguments that {wrapper_cls.__name__} takes, but:\n  "
            + "\n  ".join(faults)
            + "\nRemove these arguments from what the policy returns."
        )
