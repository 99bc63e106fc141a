"""Imports go one way, each side effect has one home, and the public names are those we say.

The source is read, not run. What a check finds is a list of lines "file:line: what is wrong"; the last
tests show each check code that it must object to.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fullshard

FOLDER = Path(fullshard.__file__).parent

DESIGN = (FOLDER.parents[1] / "docs" / "design.md").read_text()
VERSION = "fullshard.__version__"
"""The one name that files take from the package itself; it is there before anything is imported."""


def layers_in(page: str) -> list[str]:
    """Folders and top files of the package, from first to last, as the page lists them."""
    block = page.split("## Layers\n")[1].split("\n## ")[0]
    rows = [
        re.split(" {3,}", line.strip())[0] for line in block.splitlines() if line.startswith("    ")
    ]
    return [unit.rstrip("/") for row in rows for unit in row.split()]


ORDER = layers_in(DESIGN)
WHERE = "Layers in docs/design.md"
PROGRAMS = ("programs", "report", "__main__")
APIS = ("fsdp1", "fsdp2", "fsdp_module", "fully_sharded_data_parallel")
BELOW_THE_APIS = (
    "layout",
    "storage",
    "transport",
    "engine",
    "features",
    "optim",
    "tracing",
    "checkpoint",
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of the package."""

    path: Path
    """Relative to the package's folder."""
    tree: ast.Module

    @property
    def unit(self) -> str:
        """The file's name or, within a folder, the folder's."""
        return self.path.with_suffix("").parts[0]

    @property
    def module(self) -> str:
        """Its dotted name."""
        parts = ["fullshard", *self.path.with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> list[str]:
        """What one dot stands for in its imports."""
        return ["fullshard", *self.path.parent.parts]

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree: to walk it takes longer than what is done with most of them."""
        return list(ast.walk(self.tree))

    def fault(self, node: ast.AST, text: str) -> str:
        """A line about a place in it."""
        return f"src/fullshard/{self.path}:{getattr(node, 'lineno', 1)}: {text}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@functools.cache  # and not when the tests are collected, which every worker does
def sources() -> list[Source]:
    paths = [path.relative_to(FOLDER) for path in sorted(FOLDER.rglob("*.py"))]
    return [Source(path=path, tree=ast.parse((FOLDER / path).read_text())) for path in paths]


# --- reading ---------------------------------------------------------------------------------------------


def imports(source: Source) -> Iterator[tuple[ast.stmt, str, str]]:
    """Every import, wherever it stands: the statement, the local name, the absolute dotted name."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                yield node, local, alias.name
        elif isinstance(node, ast.ImportFrom):
            package = source.package[: len(source.package) - node.level + 1]
            base = [
                *(package if node.level else []),
                *(node.module.split(".") if node.module else []),
            ]
            for alias in node.names:
                yield node, alias.asname or alias.name, ".".join([*base, alias.name])


def dotted_names(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every imported name and every chain of attributes that begins at one, in full."""
    meaning = {}
    for statement, local, name in imports(source):
        yield statement, name
        # `import a.b` makes `a` known, `import a.b as c` and `from a import b as c` make `c` known.
        is_whole = isinstance(statement, ast.Import) and name.startswith(f"{local}.")
        meaning[local] = local if is_whole else name
    for node in source.nodes:
        chain = attribute_chain(node)
        if len(chain) > 1 and chain[0] in meaning:
            yield node, ".".join([meaning[chain[0]], *chain[1:]])


def attribute_chain(node: ast.AST) -> list[str]:
    """``a.b.c`` as a list; empty when it begins with anything but a name."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.append(node.attr)
        node = node.value
    return [node.id, *reversed(chain)] if isinstance(node, ast.Name) else []


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(all_sources: Sequence[Source]) -> set[str]:
    """What the package itself defines: functions, classes, variables, arguments, attributes of self."""
    names: set[str] = set()
    for source in all_sources:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if attribute_chain(node)[:-1] in (["self"], ["cls"]):
                    names.add(node.attr)
    return names


# --- checks ----------------------------------------------------------------------------------------------


def units_imported(source: Source) -> Iterator[tuple[ast.AST, str, str]]:
    """Every import of another folder or top file: the statement, the imported name, the unit."""
    for node, _, name in imports(source):
        if not within(name, "fullshard") or name == VERSION:
            continue
        part = name.split(".")[1] if "." in name else ""
        unit = part if part in ORDER else "__init__"
        if unit != source.unit:
            yield node, name, unit


def wrong_way_imports(all_sources: Sequence[Source]) -> list[str]:
    return [
        source.fault(node, f"{source.unit} imports {name}, but {unit} comes after it; see {WHERE}")
        for source in all_sources
        for node, name, unit in units_imported(source)
        if ORDER.index(unit) > ORDER.index(source.unit)
    ]


def imports_of_apis(all_sources: Sequence[Source]) -> list[str]:
    """The two APIs do not import each other, and what is below them or beside them imports neither."""
    of_fsdp1 = ("fsdp1", "fully_sharded_data_parallel")
    faults = []
    for source in all_sources:
        for node, name, unit in units_imported(source):
            is_other = source.unit in APIS and (source.unit in of_fsdp1) != (unit in of_fsdp1)
            if unit in APIS and (is_other or source.unit in BELOW_THE_APIS):
                faults.append(source.fault(node, f"{source.unit} imports {name}, which is an API"))
    return faults


def module_graph(all_sources: Sequence[Source]) -> dict[str, set[str]]:
    """Which files each file imports when it runs, also inside of functions."""
    modules = {source.module for source in all_sources}
    graph: dict[str, set[str]] = {}
    for source in all_sources:
        unused = {
            id(each)
            for node in source.nodes
            if is_type_checking(node)
            for statement in node.body  # type: ignore[attr-defined]
            for each in ast.walk(statement)
        }
        names = {name for node, _, name in imports(source) if id(node) not in unused}
        found = {name if name in modules else name.rpartition(".")[0] for name in names} & modules
        # Python imports the folders around a file before it; the package itself fetches names when they are used.
        graph[source.module] = {
            name for name in found if not within(source.module, name) and name != "fullshard"
        }
    return graph


def cycles(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def folder_graph(all_sources: Sequence[Source]) -> dict[str, set[str]]:
    """Which folders and top files each of them imports, in the order of the layers."""
    graph: dict[str, set[str]] = {unit: set() for unit in ORDER}
    for source in all_sources:
        graph[source.unit] |= {unit for _, _, unit in units_imported(source)}
    return graph


INSTALL = "drop_in/install"
"""The one file that imports torch's FSDP, to replace it, when a user asks for that."""


def imports_of_torch_fsdp(all_sources: Sequence[Source]) -> list[str]:
    return [
        source.fault(node, f"{name} is what this package replaces; only {INSTALL} imports it")
        for source in all_sources
        if str(source.path.with_suffix("")) != INSTALL
        for node, name in dotted_names(source)
        if within(name, "torch.distributed.fsdp") or within(name, "torch.distributed._composable")
        if not within(name, COMPOSABLE_REGISTRY)
    ]


COMPOSABLE_REGISTRY = "torch.distributed._composable.contract"
"""Where torch notes which functions were applied to a module; no part of its FSDP."""


COLLECTIVE = re.compile(
    r"_?(all_?gather|reduce_?scatter|all_?reduce|all_?to_?all|alltoall|barrier|broadcast)"
    r"(_(?!to$|tensors$|shapes$)\w+)?"
)
"""Of torch.distributed and of process groups; `broadcast_to` and its like only share the word."""
POINT_TO_POINT = {"gather", "scatter", "reduce", "send", "recv", "isend", "irecv"}
"""Words too common to be noticed anywhere but in torch.distributed."""
OF_DTENSOR = {"full_tensor", "redistribute", "distribute_tensor", "distribute_module"}


def collectives_outside_transport(all_sources: Sequence[Source]) -> list[str]:
    faults = []
    for source in all_sources:
        if source.unit in ("transport", "torch_border", *PROGRAMS):
            continue
        names = dict(dotted_names(source))
        local = {local: name for _, local, name in imports(source)}
        for node in source.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = names.get(node.func, "")
            if isinstance(node.func, ast.Name):
                called = local.get(node.func.id, "")
            elif isinstance(node.func, ast.Attribute) and not called:
                if attribute_chain(node.func)[:-1] in (["self"], ["cls"]):
                    continue
                called = node.func.attr  # of an object: a process group, a tensor
            word = called.rpartition(".")[2]
            if within(called, "fullshard"):
                continue
            if (
                COLLECTIVE.fullmatch(word)
                or word in OF_DTENSOR
                or (within(called, "torch.distributed") and word in POINT_TO_POINT)
            ):
                text = f"{source.unit} calls {called}; collectives are called in transport"
                faults.append(source.fault(node, text))
    return faults


GRADIENT_WRITERS = (
    "engine/reduction",
    "engine/reduction_state",
    "optim/fused_shards",
    "storage/sharded_params",
)


def gradients_written_elsewhere(all_sources: Sequence[Source]) -> list[str]:
    faults = []
    for source in all_sources:
        if str(source.path.with_suffix("")) in GRADIENT_WRITERS:
            continue
        for node in source.nodes:
            if _writes_grad(node):
                text = f"{source.unit} writes .grad; only {', '.join(GRADIENT_WRITERS)} do that"
                faults.append(source.fault(node, text))
    return faults


def _writes_grad(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "grad":
        return not isinstance(node.ctx, ast.Load)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):  # x.grad.add_(y)
        of_grad = isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "grad"
        return of_grad and node.func.attr.endswith("_")
    is_setattr = isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr")
    return is_setattr and "grad" in _constants(node)


def _constants(call: ast.Call) -> list[object]:
    return [argument.value for argument in call.args if isinstance(argument, ast.Constant)]


def uses_of_record_stream(all_sources: Sequence[Source]) -> list[str]:
    """Uses of it, but for the check of users' own programs, which may call it."""
    faults = []
    for source in all_sources:
        prose = {id(n.value) for n in source.nodes if isinstance(n, ast.Expr)}
        for node in source.nodes if source.path != Path("checks/cuda_streams.py") else ():
            is_name = "record_stream" in (getattr(node, "attr", ""), getattr(node, "id", ""))
            is_text = isinstance(node, ast.Constant) and "record_stream" in str(node.value)
            if is_name or (is_text and id(node) not in prose):
                text = "record_stream; hold the buffer and its event instead, see streams"
                faults.append(source.fault(node, text))
    return faults


ALLOWED_PRIVATE = ("_foreach_",)
"""Beginnings of private torch names that may be used everywhere."""
OF_NAMED_TUPLES = {"_fields", "_make", "_replace", "_asdict"}
"""Python's own, and public despite their looks."""
HOMES_OF_PRIVATE_NAMES = ("torch_border", "virtual/torch_internals")
"""Places that may name them: the border, and what a virtual device changes in torch, which no step on a real one needs."""
OF_TRANSFORMERS = {"_init_weights"}
"""What every model of transformers defines for others to call."""


def private_torch_names_outside_the_border(all_sources: Sequence[Source]) -> list[str]:
    own = own_names(all_sources) | OF_NAMED_TUPLES | OF_TRANSFORMERS
    faults = []
    for source in all_sources:
        if {source.unit, str(source.path.with_suffix(""))} & {*HOMES_OF_PRIVATE_NAMES}:
            continue
        found = {
            (node.lineno, part): node  # type: ignore[attr-defined]
            for node, part in _foreign_private_names(source, own)
            if not part.startswith(ALLOWED_PRIVATE)
        }
        faults += [
            source.fault(
                node, f"{source.unit} uses torch's private {part}; wrap it in torch_border"
            )
            for (_, part), node in sorted(found.items(), key=lambda item: item[0])
        ]
    return faults


OF_TORCH = {
    name
    for owner in (nn.Module, Tensor, nn.Parameter, DTensor, DeviceMesh, Optimizer, ProcessGroup)
    for name in dir(owner)
    if is_private(name)
} | {"_metadata", "_checkpoint_wrapped_module", "_orig_mod", "_extra_state"}
"""Names of torch that are torch's even where the package has one of its own that is called the same."""


def _foreign_private_names(source: Source, own: set[str]) -> Iterator[tuple[ast.AST, str]]:
    imported = dict(dotted_names(source))
    for node, name in imported.items():
        if within(name, "torch"):
            yield from ((node, part) for part in name.split(".") if is_private(part))
    of_self = _set_on_self(source)
    ours = own | of_self
    for node in source.nodes:
        if node in imported:
            continue
        yield from (found for found in _overridden(node) if found[1] in OF_TORCH)
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_ours = node.attr in (of_self if node.attr in OF_TORCH else ours)
            if not (is_ours and (node.attr not in OF_TORCH or attribute_chain(node)[0] == "self")):
                yield node, node.attr
        elif isinstance(node, ast.Constant) and node.value in OF_TORCH:
            yield node, str(node.value)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
        ):
            names = [name for name in _constants(node) if isinstance(name, str)]
            yield from ((node, name) for name in names if is_private(name) and name not in own)


def _set_on_self(source: Source) -> set[str]:
    """Attributes and methods that classes of a file give themselves."""
    methods = {
        node.name
        for owner in source.nodes
        if isinstance(owner, ast.ClassDef) and not owner.bases
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
    }
    return methods | {
        node.attr
        for node in source.nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and attribute_chain(node)[:-1] == ["self"]
    }


def _overridden(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Methods of a class that torch may call, since the class derives from another."""
    if isinstance(node, ast.ClassDef) and node.bases:
        yield from ((each, each.name) for each in node.body if isinstance(each, ast.FunctionDef))


def none(faults: Sequence[str]) -> bool:
    """Whether nothing was found; otherwise the test fails and shows all of it."""
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)
    return True


# --- the package -----------------------------------------------------------------------------------------


def test_the_design_lists_every_folder_and_top_file_once() -> None:
    units = {source.unit for source in sources()}
    assert none(
        [f"{unit} has no place: add it to {WHERE}" for unit in sorted(units - set(ORDER))]
        + [f"{unit} is gone: remove it from {WHERE}" for unit in sorted(set(ORDER) - units)]
    )
    assert len(ORDER) == len(set(ORDER))


def test_folders_import_from_above_only() -> None:
    graph = folder_graph(sources())
    for unit, imported in graph.items():  # shown by -s, and when the test fails
        print(f"{unit:28} imports {', '.join(sorted(imported, key=ORDER.index)) or 'nothing'}")
    assert none(wrong_way_imports(sources()))
    assert none(cycles(graph))


def test_no_file_imports_itself_through_others() -> None:
    assert none(cycles(module_graph(sources())))


def test_the_apis_are_imported_neither_by_each_other_nor_from_below() -> None:
    assert none(imports_of_apis(sources()))


def test_every_folder_says_what_it_holds_may_import_and_owns() -> None:
    for source in sources():
        if source.path.name == "__init__.py" and len(source.path.parts) == 2:
            doc = ast.get_docstring(source.tree) or ""
            for words in ("may import", " own"):
                assert words in doc, f"the docstring of src/fullshard/{source.path}: {words}"


def test_files_that_the_design_names_are_there() -> None:
    section = DESIGN.split("## Where is ...?\n")[1].split("\n## ")[0]
    answers = re.findall(r"^\| .*\? \| `(.+?)`", section, re.MULTILINE)
    assert len(answers) >= 12
    assert none([name for name in answers if not (FOLDER / name).is_file()])


def test_the_glossary_names_classes_that_are_there() -> None:
    rows = DESIGN.split("## Words\n")[1].split("\n## ")[0].strip().splitlines()
    assert len(rows) <= 40
    classes = {
        node.name for source in sources() for node in source.nodes if isinstance(node, ast.ClassDef)
    }
    named = [name for row in rows[2:] for name in re.findall(r"`(\w+)`", row.split("|")[3])]
    assert len(named) >= len(rows) - 2
    assert none([f"there is no class {name}" for name in named if name not in classes])


def test_functions_are_short_and_the_top_is_a_short_list() -> None:
    entries = [path for path in FOLDER.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 32
    assert none(long_functions(sources()))


def names_taken_from(all_sources: Sequence[Source]) -> dict[str, set[str]]:
    """By room, the names that files of other rooms import from it: its public side."""
    taken: dict[str, set[str]] = {}
    for source in all_sources:
        for _, name, unit in units_imported(source):
            taken.setdefault(unit, set()).add(name)
    return taken


MOST_NAMES = {
    "torch_border": 8,
    "layout": 40,
    "storage": 52,
    "transport": 42,
    "engine": 44,
    "features": 22,
    "divergence": 14,
    "checkpoint": 40,
}
"""By room, the names that others take from it: its public side. A room without walls is no room."""


@pytest.mark.parametrize("room", MOST_NAMES)
def test_a_room_shows_few_names_to_other_rooms(room: str) -> None:
    names = names_taken_from(sources())[room]
    print("\n".join(sorted(names)))
    assert len(names) <= MOST_NAMES[room]


def long_functions(all_sources: Sequence[Source]) -> list[str]:
    """Functions above 60 lines; the wrapper's constructor has as many arguments as torch's."""
    return [
        source.fault(node, f"{node.name} has {lines} lines")
        for source in all_sources
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > 60
        and (source.unit, node.name) != ("fsdp1", "__init__")
    ]


def test_tools_of_tests_are_not_imported() -> None:
    names = [(source, node, name) for source in sources() for node, _, name in imports(source)]
    assert none([s.fault(node, name) for s, node, name in names if name.startswith("unittest")])


def test_torch_s_own_fsdp_is_not_imported() -> None:
    assert none(imports_of_torch_fsdp(sources()))


def test_install_is_imported_only_when_a_user_asks_for_it() -> None:
    graph = module_graph(sources())
    importers = [
        name for name, imported in graph.items() if "fullshard.drop_in.install" in imported
    ]
    assert importers == ["fullshard.drop_in.program"]
    (source,) = (source for source in sources() if source.module == "fullshard.drop_in.program")
    at_once = [ast.unparse(node) for node in source.tree.body]
    assert not [line for line in at_once if line.startswith("from fullshard.drop_in.install")]


def test_only_transport_calls_collectives() -> None:
    assert none(collectives_outside_transport(sources()))


def test_only_gradients_writes_grad() -> None:
    assert none(gradients_written_elsewhere(sources()))


def test_nobody_calls_record_stream() -> None:
    assert none(uses_of_record_stream(sources()))


def test_only_the_border_touches_private_torch_names() -> None:
    assert none(private_torch_names_outside_the_border(sources()))


def test_all_is_what_is_visible_sorted() -> None:
    visible = {name: getattr(fullshard, name) for name in dir(fullshard) if name[0] != "_"}
    public = {name for name, value in visible.items() if not isinstance(value, ModuleType)}
    assert public - set(fullshard.__all__) == set(), "visible and not in __all__"
    assert set(fullshard.__all__) - public == set(), "in __all__ and not visible"
    assert fullshard.__all__ == sorted(public)


def test_public_names_say_that_they_are_ours() -> None:
    for name in fullshard.__all__:
        value = getattr(fullshard, name)
        assert value.__name__ == name
        assert within(value.__module__, "fullshard")
    with pytest.raises(AttributeError, match="no_such_name"):
        fullshard.no_such_name  # noqa: B018


# --- the checks themselves -------------------------------------------------------------------------------

BREACHES: list[tuple[Callable[[Sequence[Source]], list[str]], str, str, str]] = [
    (
        wrong_way_imports,
        "layout/segments.py",
        "from ..engine import gather",
        "fullshard.engine.gather",
    ),
    (wrong_way_imports, "layout/segments.py", "from .. import errors, comm", "fullshard.comm,"),
    (
        wrong_way_imports,
        "layout/segments.py",
        "from ..storage.param import f",
        "fullshard.storage.param.f",
    ),
    (
        wrong_way_imports,
        "mesh/axes.py",
        "def f():\n    import fullshard.engine",
        "fullshard.engine",
    ),
    (
        wrong_way_imports,
        "storage/param.py",
        "from fullshard import fully_shard",
        "fullshard.fully_shard",
    ),
    (wrong_way_imports, "fsdp2/fully_shard.py", "import fullshard", "fullshard,"),
    (
        wrong_way_imports,
        "engine/step.py",
        "from ..programs.train.loop import train",
        "fullshard.programs.train.loop.train",
    ),
    (wrong_way_imports, "programs/train/loop.py", "from ...report import x", "fullshard.report.x"),
    (imports_of_apis, "fsdp1/wrapper.py", "from fullshard.fsdp2 import x", "fullshard.fsdp2.x"),
    (imports_of_apis, "fsdp2/group_plan.py", "from fullshard.fsdp1.a import b", "fsdp1.a.b"),
    (imports_of_apis, "checkpoint/save.py", "def f():\n  import fullshard.fsdp1", "fsdp1"),
    (private_torch_names_outside_the_border, "fsdp1/a.py", "super()._apply(f)", "_apply"),
    (
        private_torch_names_outside_the_border,
        "fsdp1/a.py",
        "class A(nn.Module):\n    def _apply(self): ...",
        "_apply",
    ),
    (private_torch_names_outside_the_border, "fsdp1/a.py", "found._metadata = x", "_metadata"),
    (private_torch_names_outside_the_border, "layout/names.py", "NAME = '_orig_mod'", "_orig_mod"),
    (
        private_torch_names_outside_the_border,
        "layout/names.py",
        "NAME = '_extra_state'",
        "_extra_state",
    ),
    (
        private_torch_names_outside_the_border,
        "layout/names.py",
        "child = '_checkpoint_wrapped_module'",
        "_checkpoint_wrapped_module",
    ),
    (long_functions, "wrap.py", f"def f(): return [{chr(10) * 60}]", "f has 61 lines"),
    (
        imports_of_torch_fsdp,
        "transport/collectives.py",
        "from torch.distributed import fsdp",
        "distributed.fsdp",
    ),
    (
        imports_of_torch_fsdp,
        "transport/collectives.py",
        "import torch.distributed.fsdp.api",
        "fsdp.api",
    ),
    (
        imports_of_torch_fsdp,
        "drop_in/program.py",
        "import torch.distributed.fsdp",
        "only drop_in/install",
    ),
    (
        imports_of_torch_fsdp,
        "programs/train/loop.py",
        "from torch.distributed._composable.fsdp import fully_shard",
        "_composable.fsdp.fully_shard",
    ),
    (
        imports_of_torch_fsdp,
        "mesh/axes.py",
        "import torch.distributed as dist\ndist.fsdp.fully_shard",
        "torch.distributed.fsdp.fully_shard",
    ),
    (
        collectives_outside_transport,
        "mesh/axes.py",
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "torch.distributed.all_reduce",
    ),
    (
        collectives_outside_transport,
        "engine/step.py",
        "from torch.distributed import broadcast as tell\ntell(x)",
        "torch.distributed.broadcast",
    ),
    (
        collectives_outside_transport,
        "engine/step.py",
        "import torch\ntorch.distributed.reduce(x, 0)",
        "torch.distributed.reduce",
    ),
    (
        collectives_outside_transport,
        "storage/param.py",
        "group.all_gather_into_tensor(x)",
        "all_gather_into",
    ),
    (
        collectives_outside_transport,
        "storage/param.py",
        "self.group._allgather_base(x, y)",
        "_allgather_base",
    ),
    (collectives_outside_transport, "storage/param.py", "self.param.full_tensor()", "full_tensor"),
    (gradients_written_elsewhere, "engine/step.py", "x.y.grad = None", "writes .grad"),
    (gradients_written_elsewhere, "engine/step.py", "a, x.grad = b", "writes .grad"),
    (gradients_written_elsewhere, "engine/step.py", "x.grad += y", "writes .grad"),
    (gradients_written_elsewhere, "engine/step.py", "del x.grad", "writes .grad"),
    (gradients_written_elsewhere, "engine/step.py", "x.grad.zero_()", "writes .grad"),
    (gradients_written_elsewhere, "engine/step.py", "setattr(x, 'grad', y)", "writes .grad"),
    (uses_of_record_stream, "transport/streams.py", "x.record_stream(s)", "record_stream"),
    (
        uses_of_record_stream,
        "transport/streams.py",
        "getattr(x, 'record_stream')(s)",
        "record_stream",
    ),
    (
        private_torch_names_outside_the_border,
        "transport/collectives.py",
        "import torch\ntorch._C._x()",
        "_C",
    ),
    (
        private_torch_names_outside_the_border,
        "transport/collectives.py",
        "from torch.distributed.tensor._dtensor_spec import DTensorSpec",
        "_dtensor_spec",
    ),
    (
        private_torch_names_outside_the_border,
        "storage/param.py",
        "self.param._local_tensor",
        "_local_tensor",
    ),
    (private_torch_names_outside_the_border, "storage/param.py", "param()._spec = spec", "_spec"),
    (
        private_torch_names_outside_the_border,
        "storage/param.py",
        "getattr(param, '_spec')",
        "_spec",
    ),
]


@pytest.mark.parametrize(("check", "path", "code", "named"), BREACHES)
def test_a_breach_is_found_and_named_with_file_and_line(
    check: Callable[[Sequence[Source]], list[str]], path: str, code: str, named: str
) -> None:
    (fault, *_) = check([Source(path=Path(path), tree=ast.parse(f'"""Doc."""\n{code}'))])
    line = 2 if check is long_functions else 1 + len(code.splitlines())
    assert fault.startswith(f"src/fullshard/{path}:{line}: ")
    assert named in fault


@pytest.mark.parametrize(
    ("check", "path", "code"),
    [
        (
            wrong_way_imports,
            "layout/segments.py",
            "from ..errors import LayoutError\nfrom .mesh import m",
        ),
        (
            wrong_way_imports,
            "programs/train/loop.py",
            "from fullshard import fully_shard\nimport torch",
        ),
        (
            wrong_way_imports,
            "programs/train/loop.py",
            "from .model import M\nfrom ...errors import E",
        ),
        (
            collectives_outside_transport,
            "engine/step.py",
            "from ..comm import collectives\ncollectives.all_reduce(x)",
        ),
        (
            collectives_outside_transport,
            "storage/param.py",
            "x.broadcast_to(y); x.gather(0, y); f.reduce(x)",
        ),
        (
            collectives_outside_transport,
            "programs/train/loop.py",
            "import torch.distributed as d\nd.barrier()",
        ),
        (imports_of_torch_fsdp, "drop_in/install.py", "import torch.distributed.fsdp"),
        (gradients_written_elsewhere, "engine/step.py", "x = y.grad; y.requires_grad = True"),
        (uses_of_record_stream, "transport/streams.py", "x = 1\n'without record_stream'"),
        (
            private_torch_names_outside_the_border,
            "transport/collectives.py",
            "import torch\ntorch._foreach_add_(x)",
        ),
        (
            private_torch_names_outside_the_border,
            "transport/collectives.py",
            "self._x = 1\nother._x\nx.__dict__",
        ),
        (
            private_torch_names_outside_the_border,
            "engine/tensor_trees.py",
            "import os\nos._exit(1); t._fields",
        ),
    ],
)
def test_what_is_allowed_is_not_objected_to(
    check: Callable[[Sequence[Source]], list[str]], path: str, code: str
) -> None:
    assert check([Source(path=Path(path), tree=ast.parse(code))]) == []
