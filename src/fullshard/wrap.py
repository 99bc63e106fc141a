"""Which modules get a wrapper of their own: the names of `torch.distributed.fsdp.wrap`.

    from fullshard.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({TransformerBlock})

A policy is an object that names all modules at once (`ModuleWrapPolicy`, `CustomPolicy`) or a
function that is asked about one module at a time:

    policy(module=..., recurse=True, nonwrapped_numel=...)     look into this module?
    policy(module=..., recurse=False, nonwrapped_numel=...)    wrap it? its children are decided

``nonwrapped_numel`` counts the module's parameters; in the second question, without those of the
modules below that are going to be wrapped. Functions with more arguments get them from
`functools.partial`. `auto_wrap` asks a policy and does what it says.
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
        module: The module asked about.
        recurse: Whether the question is to look into it, or to wrap it.
        nonwrapped_numel: Elements of its parameters that are in no other wrapper.
        min_num_params: So many elements are enough.
        force_leaf_modules: Classes not to look into, and so not to wrap; by default
            ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``.
        exclude_wrap_modules: Classes to look into, but not to wrap; by default
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


# Containers without a forward; attention that uses its child's weight without calling the child.
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
    """A policy that names all modules at once."""

    @abstractmethod
    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        """The modules to wrap, each with its wrapper's keyword arguments; the root may be among them."""


class ModuleWrapPolicy(_Policy):
    """Wrap the modules of the given classes, with the root's keyword arguments."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = _classes("module_classes", module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Answer as a policy function does, so that it can be one of several."""
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
    """Wrap what a function says, with keyword arguments of its choice.

        CustomPolicy(lambda module: {"forward_prefetch": True} if module is model.head else False)

    Args:
        lambda_fn: Takes a module. False or an empty dict: not wrapped; True: wrapped with the
            root's keyword arguments; a dict: wrapped with the root's, overridden by these.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        if not callable(lambda_fn):
            raise OptionTypeError(
                f"lambda_fn of CustomPolicy must be a function of a module, got {lambda_fn!r}."
            )
        self._lambda_fn = lambda_fn

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
                "lambda_fn of CustomPolicy must return True, False or a dict of keyword arguments; it returned\n  "
                + "\n  ".join(wrong)
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
"""What `wrap` calls, on this thread; None outside of `enable_wrap`."""


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Let `wrap` wrap modules within this context, on this thread.

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=0):
            self.layer = wrap(nn.Linear(5, 5))

    Args:
        wrapper_cls: Called with a module and keyword arguments, returns its wrapper.
        **wrapper_kwargs: Keyword arguments for all wrappers made within.
    """
    if not callable(wrapper_cls):
        raise OptionTypeError(f"wrapper_cls must be a class of wrappers, got {wrapper_cls!r}.")
    if _wrapper.get() is not None:
        raise UnsupportedError(
            "enable_wrap contexts cannot be nested. Override single arguments in the calls of wrap."
        )
    token = _wrapper.set(functools.partial(wrapper_cls, **_readable_again([wrapper_kwargs])[0]))
    try:
        yield
    finally:
        _wrapper.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module if this happens within `enable_wrap`, and return it unchanged otherwise.

    Args:
        module: The module.
        **wrap_overrides: Keyword arguments for its wrapper; they override those of `enable_wrap`.
    """
    wrapper = _wrapper.get()
    return module if wrapper is None else wrapper(module, **wrap_overrides)


# --- the engine -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrapping:
    """One module to wrap."""

    name: str
    """Its full name below the root; of a shared module, the first."""
    module: nn.Module
    kwargs: dict[str, Any]
    """Keyword arguments for its wrapper."""
    places: list[tuple[nn.Module, str]]
    """Its parents and its names in them."""


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

    The root itself is left to the caller. A shared module gets one wrapper, which replaces it in
    all its parents. Everything is decided and checked before the first module is replaced.

    Batch norm does not work in low precision, so with mixed precision it is wrapped whatever the
    policy says, and computes in full precision:

        class_kwargs={cls: {"mixed_precision": None} for cls in classes_to_ignore}

    Args:
        root: The module whose submodules are wrapped.
        policy: One of those above, or a function that answers the same questions.
        wrapper_cls: Called as ``wrapper_cls(module, **kwargs)``.
        root_kwargs: Keyword arguments for all wrappers, without the policy.
        ignored_modules: Never wrapped, nor is anything below them; their parameters do not count.
        ignored_params: Do not count in ``nonwrapped_numel``.
        class_kwargs: Classes that are wrapped whatever the policy says, with keyword arguments
            that override those of the root and of the policy.
        check: Called with what is going to be wrapped; may raise.

    Returns:
        What was wrapped, in this order.
    """
    _check_policy(policy)
    _check_not_wrapped(root, wrapper_cls)
    root_kwargs = _readable_again([root_kwargs])[0]
    ignored = {below for module in ignored_modules for below in module.modules()}
    forced = _of_classes(root, class_kwargs or {}, ignored)
    chosen = _chosen_by_policy(root, policy, root_kwargs, ignored, ignored_params, forced)
    for module, kwargs in forced.items():
        chosen[module] = {**chosen.get(module, root_kwargs), **kwargs}
    places = _places(root)
    plan = [
        Wrapping(name, module, chosen[module], places[module])
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
    """The modules that are wrapped whatever the policy says."""
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
    """The modules below the root for which a policy function answers yes, and the forced ones."""
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
    """Every module once, with its name, after all modules below it."""
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        seen.add(module)
        for child_name, child in module.named_children():
            if child not in seen:
                yield from visit(f"{name}.{child_name}" if name else child_name, child)
        yield name, module

    return visit("", root)


def _places(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """For every module below the root, its parents and its names in them."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in child_table(parent).items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    return places


def reiterable(value: Any) -> Any:
    """Return a value that several wrappers can read: of a generator, the tuple of what it yields."""
    return tuple(value) if isinstance(value, Iterator) else value


def _readable_again(kwargs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Keyword arguments for several wrappers, with generators replaced by what they yield.

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
    """Classes for `isinstance` that a policy function reads in each of its calls."""
    _check_not_iterator(argument, given)
    return _classes(argument, given)


def _check_not_iterator(argument: str, given: object) -> None:
    if isinstance(given, Iterator):
        raise ConfigurationError(
            f"{argument} of a policy function is read for every module, but {type(given).__name__} can be read once. Pass "
            "a set or a list."
        )


def _classes(argument: str, given: Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    """A set of classes as `isinstance` takes it."""
    classes = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(isinstance(cls, type) for cls in classes):
        raise OptionTypeError(f"{argument} must be a set of module classes, got {given!r}.")
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
            f"With a policy, no module may be a {wrapper_cls.__name__} yet, but these are: {wrapped}. "
            "Leave all wrapping to the policy, or pass none."
        )


def _check_kwargs(plan: Iterable[Wrapping], wrapper_cls: type[nn.Module]) -> None:
    """Check that the wrapper takes the arguments it is going to get."""
    signature = inspect.signature(wrapper_cls)
    faults = []
    for wrapping in plan:
        try:
            signature.bind(wrapping.module, **wrapping.kwargs)
        except TypeError as error:
            faults.append(f"{wrapping.name}: {error}")
    if faults:
        raise OptionTypeError(
            f"{wrapper_cls.__name__} does not take the arguments that the policy gives:\n  "
            + "\n  ".join(faults)
        )
