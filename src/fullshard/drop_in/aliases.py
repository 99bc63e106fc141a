"""Names at the top level of modules: which of them mean a given object, and where a module took them from."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Alias:
    """One name of one module that means a given object."""

    module: str
    name: str
    value: object = field(repr=False)
    """The object that the name meant when it was found."""
    namespace: dict[str, Any] = field(repr=False)
    """The module's `__dict__`. It is written directly: modules may have a `__setattr__` of their own."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def key(self) -> tuple[int, str]:
        """Its identity: the module may have several names, and may be imported anew under the same one."""
        return id(self.namespace), self.name


def aliases_of(objects: Iterable[object]) -> Iterator[Alias]:
    """Yield every name of every imported module that means one of the objects. Nothing is imported or computed."""
    wanted = {id(each) for each in objects}
    seen = set()
    for module, found in list(sys.modules.items()):
        namespace = getattr(found, "__dict__", None)
        if not isinstance(namespace, dict) or id(namespace) in seen:
            continue
        seen.add(id(namespace))
        for name, value in list(namespace.items()):
            if id(value) in wanted:
                yield Alias(module=module, name=name, value=value, namespace=namespace)


def within(module: str, package: str) -> bool:
    """Return whether a module is a package or lies in it."""
    return module == package or module.startswith(f"{package}.")


class Sources:
    """The sources of modules, each read once: where their names come from."""

    def __init__(self) -> None:
        self._bindings: dict[str, list[tuple[str, str, str]]] = {}

    def comes_from(self, package: str, alias: Alias) -> bool:
        """Return whether a module took a name from a package, directly or through other modules."""
        waiting, seen = [(alias.module, alias.name)], set()
        while waiting:
            module, name = place = waiting.pop()
            if within(module, package):
                return True
            if place in seen:
                continue
            seen.add(place)
            if module not in self._bindings:
                self._bindings[module] = list(_bindings(module))
            waiting += [
                (origin, name if bound == "*" else original)
                for bound, origin, original in self._bindings[module]
                if bound in (name, "*")
            ]
        return False


def _bindings(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield the names that imports, and assignments such as ``a = b.c``, bind, each with the module and name it comes from."""
    found = sys.modules.get(module)
    try:
        tree = ast.parse(inspect.getsource(found))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):  # not imported, made by hand, in a notebook, compiled
        return
    modules: dict[str, str] = {}
    for node in _top_level(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                local = each.asname or each.name.partition(".")[0]
                modules[local] = each.name if each.asname else local
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, str(getattr(found, "__package__", "")))
            for each in node.names:
                yield each.asname or each.name, origin, each.name
                modules[each.asname or each.name] = f"{origin}.{each.name}"
        elif isinstance(node, ast.Assign):
            head, *rest = ast.unparse(node.value).split(".")
            origin = ".".join([modules.get(head, head), *rest[:-1]]) if rest else module
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, origin, rest[-1] if rest else head


def _top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is imported, not those of functions and classes."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            waiting += ast.iter_child_nodes(node)


def _origin(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that an import statement in a package takes names from."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join(filter(None, [*parts[: len(parts) - node.level + 1], node.module]))
