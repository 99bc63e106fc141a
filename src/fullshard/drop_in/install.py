"""`install`: torch's public FSDP names mean fullshard's classes and functions, in the whole process.

    import fullshard

    fullshard.install()
    from torch.distributed.fsdp import fully_shard    # fullshard's

Programs that call torch's FSDP, directly or through a library, then train with fullshard, unchanged.

    where a name is                                        what happens to it
    torch.distributed.fsdp, and its public modules         rebound; imports from now on get fullshard's
    any other imported module (an alias, by identity)      rebound
    torch's private FSDP modules (_flat_param, ...)        left alone: its checkpoints and dynamo need them
    containers, classes, partial functions                 left alone: install before they are made

This is the one module of fullshard that imports torch's FSDP. `import fullshard` does not import it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

import torch.distributed.fsdp
from torch import nn

from fullshard import (
    api,
    fsdp_module,
    fully_sharded_data_parallel,
    mesh,
    policies,
    sharded_grad_scaler,
    wrap,
)
from fullshard.divergence import monitor
from fullshard.drop_in.aliases import Alias, Sources, aliases_of, within
from fullshard.drop_in.children import call_in_children
from fullshard.errors import LifecycleError
from fullshard.fsdp2 import fully_shard

OURS = (
    api,
    fsdp_module,
    fully_shard,
    fully_sharded_data_parallel,
    policies,
    sharded_grad_scaler,
    wrap,
)
"""Modules in which the classes and functions are that replace torch's; they have the same names."""

PUBLIC = {
    "torch.distributed.fsdp": ("FlatParameter",),
    "torch.distributed.fsdp.api": (),
    "torch.distributed.fsdp.fully_sharded_data_parallel": (),
    "torch.distributed.fsdp.sharded_grad_scaler": ("ShardedGradScaler",),
    # Programs import these policies, and torch's apply_activation_checkpointing asks for the class.
    "torch.distributed.fsdp.wrap": ("_Policy", "_module_wrap_policy", "_or_policy"),
    "torch.distributed._composable.replicate_with_fsdp": ("ReplicateModule", "replicate"),
}
"""Torch's modules whose ``__all__`` is rebound, and further names of them that programs import."""

PRIVATE: dict[str, dict[str, object]] = {
    # torchtitan imports these for the placement functions of experts.
    "torch.distributed.fsdp._fully_shard._fsdp_common": {
        "DDPMeshInfo": mesh.DDPMeshInfo,
        "DataParallelMeshInfo": mesh.DataParallelMeshInfo,
        "FSDPMeshInfo": mesh.FSDPMeshInfo,
        "HSDPMeshInfo": mesh.HSDPMeshInfo,
        "ShardPlacementResult": mesh.ShardPlacementResult,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_init": {"_get_mesh_info": mesh.sharding_mesh_info},
}
"""Names of private modules that programs import. They are rebound there, and outside of torch."""

ENGINE = ("torch.distributed.fsdp._", "torch.distributed._tools.")
"""Beginnings of the names of torch's modules that work on the insides of its own FSDP and keep its names."""
REEXPORTS = "torch.distributed.fsdp._fully_shard"
"""A private package that only collects public names, which programs import from there."""

MODELS = (torch.distributed.fsdp.FSDPModule, torch.distributed.fsdp.FullyShardedDataParallel)
OUR_MODELS = (fsdp_module.FSDPModule, fully_sharded_data_parallel.FullyShardedDataParallel)


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The names that `install` has rebound, and those that it has not, in one line as text; `listing` returns all of it."""

    rebound: list[str]
    """Names that meant something of torch and now mean fullshard's, as ``module.name``."""
    left_alone: list[str]
    """Public names of torch's FSDP for which fullshard has nothing; they are torch's."""
    subclasses: list[str]
    """Subclasses of torch's classes that existed before. They are torch's, and `install` has warned of them."""
    _aliases: list[Alias] = field(repr=False)
    _replacements: dict[int, tuple[object, object]] = field(repr=False)
    """Torch's objects and ours, by identity of torch's."""
    _own: list[Alias] = field(repr=False)
    """Names that meant fullshard's objects before."""
    _models: list[weakref.ref[nn.Module]] = field(repr=False)
    """Models that fullshard had sharded before."""
    _leave_children: Callable[[], None] = field(repr=False)
    """Makes processes that are started from then on do without."""

    def __str__(self) -> str:
        modules = {name.rpartition(".")[0] for name in self.rebound}
        return (
            f"fullshard has replaced torch's FSDP: {len(self.rebound)} names in {len(modules)} modules, "
            f"{len(self.left_alone)} left alone."
        )

    def listing(self) -> str:
        """Return all names, a line each."""
        return "\n".join(
            [
                str(self),
                *(f"  rebound     {name}" for name in self.rebound),
                *(f"  left alone  {name}" for name in self.left_alone),
                *(f"  subclass    {name}" for name in self.subclasses),
            ]
        )


_installation: Installation | None = None


def install(*, verbose: bool = False) -> Installation:
    """Rebind torch's public FSDP names to fullshard's, in the whole process, and return what was rebound.

    Processes that `multiprocessing` starts from now on install it, too, before they import the program.
    Call it before a model is sharded, best before other imports: objects that were made of torch's classes (options,
    policies, subclasses) stay torch's. A second call changes nothing. See docs/install.md.

    Args:
        verbose: Print all rebound names.

    Raises:
        LifecycleError: a model that torch's FSDP has sharded exists.
    """
    global _installation
    monitor.install()
    if _installation is None:
        _put_back_patched()
        _refuse_torch_models()
        _installation = _rebind()
        _warn_of_subclasses(_installation.subclasses)
    if verbose:
        print(_installation.listing(), flush=True)
    return _installation


def uninstall() -> None:
    """Undo `install` completely: all names have their old meaning again, also in modules imported since.

    A module imported since then whose source takes a name from fullshard itself keeps it. Models that fullshard has
    sharded keep working, but a program that asks whether they are torch's (``isinstance(model, FSDPModule)``) is told
    that they are not; there is a warning if such models exist. Does nothing if fullshard is not installed.

    A name that something else has rebound since then, such as ``mock.patch``, is left alone, with a warning. If that puts
    fullshard's back later, call this function again.
    """
    global _installation
    _put_back_patched()
    done = _installation
    if done is None:
        return
    _installation = None
    done._leave_children()
    back = {id(ours): theirs for theirs, ours in done._replacements.values()}
    rebound = {alias.key for alias in done._aliases}
    own = {alias.key for alias in done._own}
    for alias in done._aliases:
        ours = done._replacements[id(alias.value)][1]
        now = alias.namespace.get(alias.name, alias.value)
        if now is ours:
            alias.namespace[alias.name] = alias.value
        elif now is not alias.value:
            _patched.append((alias, ours))
    sources = Sources()
    for alias in aliases_of(ours for _, ours in done._replacements.values()):
        is_own = within(alias.module, "fullshard") or alias.key in own
        if not is_own and (alias.key in rebound or not sources.comes_from("fullshard", alias)):
            alias.namespace[alias.name] = back[id(alias.value)]
    _warn_of_patched()
    _warn_of_models(done)


_patched: list[tuple[Alias, object]] = []
"""Names that meant something else when fullshard was uninstalled, each with what `install` had put there."""


def _put_back_patched() -> None:
    """Complete the last `uninstall`, if what had rebound names then has ended and put fullshard's back."""
    for alias, ours in _patched:
        if alias.namespace.get(alias.name) is ours:
            alias.namespace[alias.name] = alias.value
    _patched.clear()


@contextlib.contextmanager
def installed() -> Iterator[Installation]:
    """Return a context in which fullshard is installed. If it was before, it stays so afterwards."""
    was_installed = _installation is not None
    try:
        yield install()
    finally:
        if not was_installed:
            uninstall()


# --- what is rebound ------------------------------------------------------------------------------


def _rebind() -> Installation:
    # Private modules that are imported later would take fullshard's names.
    for module in pkgutil.walk_packages(torch.distributed.fsdp.__path__, "torch.distributed.fsdp."):
        importlib.import_module(module.name)
    public, left_alone = _public_replacements()
    private = _private_replacements()
    replacements = {id(pair[0]): pair for pair in (*public, *private)}
    of_private = {id(theirs) for theirs, _ in private}
    own = list(aliases_of(ours for _, ours in replacements.values()))
    aliases = [
        alias
        for alias in aliases_of(theirs for theirs, _ in replacements.values())
        if _is_to_rebind(alias, id(alias.value) in of_private)
    ]
    for alias in aliases:
        alias.namespace[alias.name] = replacements[id(alias.value)][1]
    classes = [theirs for theirs, _ in public if isinstance(theirs, type)]
    return Installation(
        rebound=sorted(map(str, aliases)),
        left_alone=left_alone,
        subclasses=_foreign_subclasses(classes),
        _aliases=aliases,
        _replacements=replacements,
        _own=own,
        _models=[weakref.ref(model) for model in _living(OUR_MODELS)],
        _leave_children=call_in_children(install),
    )


def _public_replacements() -> tuple[list[tuple[object, object]], list[str]]:
    """Return pairs of torch's objects and ours, and the names for which there is nothing of ours."""
    pairs, left_alone = [], []
    for name, further in PUBLIC.items():
        module = importlib.import_module(name)
        for each in (*getattr(module, "__all__", ()), *further):
            theirs = getattr(module, each, None)
            ours = next((vars(place)[each] for place in OURS if each in vars(place)), None)
            if theirs is not None and ours is not None:
                pairs.append((theirs, ours))
            elif theirs is not None:
                left_alone.append(f"{name}.{each}")
    return pairs, sorted(left_alone)


def _private_replacements() -> list[tuple[object, object]]:
    return [
        (theirs, ours)
        for name, names in PRIVATE.items()
        for each, ours in names.items()
        if (theirs := getattr(_module(name), each, None)) is not None
    ]


def _module(name: str) -> ModuleType | None:
    """Import one of torch's private modules; None if this version of torch has none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _is_to_rebind(alias: Alias, is_private: bool) -> bool:
    if within(alias.module, "fullshard"):
        return False
    if is_private:
        return alias.name in PRIVATE.get(alias.module, ()) or not within(alias.module, "torch")
    return alias.module == REEXPORTS or not alias.module.startswith(ENGINE)


# --- what cannot be rebound -----------------------------------------------------------------------


def _living(classes: tuple[type, ...]) -> list[nn.Module]:
    """Return all instances that exist. Types are asked, not objects: proxies compute their ``__class__``."""
    found = [each for each in gc.get_objects() if issubclass(type(each), classes)]
    if found:  # some may be in cycles of garbage
        del found
        gc.collect()
        found = [each for each in gc.get_objects() if issubclass(type(each), classes)]
    return found


def _described(models: Iterable[nn.Module]) -> list[str]:
    """Return a line per class of those models that are not parts of others among them."""
    models = list(models)
    parts = {id(part) for model in models for part in model.modules() if part is not model}
    roots = [model for model in models if id(model) not in parts]
    names = Counter(map(_sharded_name, roots))
    return [f"{name} (x {count})" if count > 1 else name for name, count in sorted(names.items())]


def _sharded_name(model: nn.Module) -> str:
    """Return the name of a sharded module's class and, if that is a wrapper, of what it wraps."""
    is_wrapper = isinstance(model, (MODELS[1], OUR_MODELS[1]))
    return _name(type(model)) + (f" of {_name(type(model.module))}" if is_wrapper else "")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _refuse_torch_models() -> None:
    models = _living(MODELS)
    if models:
        raise LifecycleError(
            "install must be called before torch's FSDP shards a model, but it has sharded\n  "
            + "\n  ".join(_described(models))
            + "\nInstall first, or delete these models."
        )


def _foreign_subclasses(classes: list[type]) -> list[str]:
    """Return the names of subclasses that are not torch's own, such as those it makes for sharded modules."""
    found: set[str] = set()
    waiting = list(classes)
    while waiting:
        below: list[type] = type.__subclasses__(waiting.pop())
        waiting += below
        for cls in below:
            if not within(cls.__module__, "torch"):
                found.add(_name(cls))
    return sorted(found)


def _warn_of_subclasses(names: list[str]) -> None:
    if names:
        warnings.warn(
            "install does not change subclasses of torch's FSDP classes that exist already:\n  "
            + "\n  ".join(names)
            + "\nThey still use torch's FSDP. Install before they are defined.",
            stacklevel=3,
        )


def _warn_of_patched() -> None:
    if _patched:
        warnings.warn(
            "fullshard is no longer installed, but something else has rebound names since install:\n  "
            + "\n  ".join(sorted(str(alias) for alias, _ in _patched))
            + "\nThey are left alone. If they are put back later, as a patch does when it ends, they mean fullshard's again: "
            "uninstall after that, or once more.",
            stacklevel=3,
        )


def _warn_of_models(done: Installation) -> None:
    before = {id(ref()) for ref in done._models}
    models = [model for model in _living(OUR_MODELS) if id(model) not in before]
    if models:
        warnings.warn(
            "fullshard is no longer installed, but it has sharded models that exist:\n  "
            + "\n  ".join(_described(models))
            + "\nThey keep working, but programs that ask for torch's classes do not recognise them.",
            stacklevel=3,
        )
