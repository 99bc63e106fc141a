"""Imports go one way, each side effect has one home, and the public names are those we say.

The source is read, not run. What a check finds is a list of lines "file:line: what is wrong"; the last
tests show each check code that it must object to.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import fullshard

FOLDER = Path(fullshard.__file__).parent

LAYERS = [
    ["errors", "names", "files", "torch_border"],
    ["plan", "mesh", "api", "wrap"],
    ["storage"],
    ["comm"],
    ["engine"],
    ["fsdp2", "fsdp_module", "fsdp1", "fully_sharded_data_parallel", "sharded_grad_scaler"],
    ["optim", "tracing", "checkpoint"],
    ["__init__"],  # `from fullshard import ...`: what users see, and the programs below are users
    ["programs", "report", "__main__"],
]
"""Files and folders of the package from first to last: each imports from its left and from lines above."""

ORDER = [unit for layer in LAYERS for unit in layer]
PROGRAMS = LAYERS[-1]
WHERE = "LAYERS in tests/test_architecture.py"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of the package."""

    path: Path
    """Relative to the package's folder."""
    tree: ast.Module

    @property
    def unit(self) -> str:
        """Its name in `LAYERS`: the file's or, within a folder, the folder's."""
        return self.path.with_suffix("").parts[0]

    @property
    def package(self) -> list[str]:
        """What one dot stands for in its imports."""
        return ["fullshard", *self.path.parent.parts]

    def fault(self, node: ast.AST, text: str) -> str:
        """A line about a place in it."""
        return f"src/fullshard/{self.path}:{getattr(node, 'lineno', 1)}: {text}"


def sources() -> list[Source]:
    paths = [path.relative_to(FOLDER) for path in sorted(FOLDER.rglob("*.py"))]
    return [Source(path=path, tree=ast.parse((FOLDER / path).read_text())) for path in paths]


SOURCES = sources()


# --- reading ---------------------------------------------------------------------------------------------


def imports(source: Source) -> Iterator[tuple[ast.stmt, str, str]]:
    """Every import, wherever it stands: the statement, the local name, the absolute dotted name."""
    for node in ast.walk(source.tree):
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
    for node in ast.walk(source.tree):
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
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if attribute_chain(node)[:-1] in (["self"], ["cls"]):
                    names.add(node.attr)
    return names


# --- checks ----------------------------------------------------------------------------------------------


def wrong_way_imports(all_sources: Sequence[Source]) -> list[str]:
    faults = []
    for source in all_sources:
        for node, _, name in imports(source):
            if not within(name, "fullshard") or name == "fullshard.__version__":
                continue
            part = name.split(".")[1] if "." in name else ""
            target = part if part in ORDER else "__init__"
            if target != source.unit and ORDER.index(target) > ORDER.index(source.unit):
                text = f"{source.unit} imports {name}, but {target} comes after it; see {WHERE}"
                faults.append(source.fault(node, text))
    return faults


def imports_of_torch_fsdp(all_sources: Sequence[Source]) -> list[str]:
    return [
        source.fault(node, f"{name} is what this package replaces")
        for source in all_sources
        for node, name in dotted_names(source)
        if within(name, "torch.distributed.fsdp") or within(name, "torch.distributed._composable")
    ]


COLLECTIVE = re.compile(
    r"_?(all_?gather|reduce_?scatter|all_?reduce|all_?to_?all|alltoall|barrier|broadcast)"
    r"(_(?!to$|tensors$|shapes$)\w+)?"
)
"""Of torch.distributed and of process groups; `broadcast_to` and its like only share the word."""
POINT_TO_POINT = {"gather", "scatter", "reduce", "send", "recv", "isend", "irecv"}
"""Words too common to be noticed anywhere but in torch.distributed."""
OF_DTENSOR = {"full_tensor", "redistribute", "distribute_tensor", "distribute_module"}


def collectives_outside_comm(all_sources: Sequence[Source]) -> list[str]:
    faults = []
    for source in all_sources:
        if source.unit in ("comm", "torch_border", *PROGRAMS):
            continue
        names = dict(dotted_names(source))
        local = {local: name for _, local, name in imports(source)}
        for node in ast.walk(source.tree):
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
                text = f"{source.unit} calls {called}; collectives are called in comm"
                faults.append(source.fault(node, text))
    return faults


GRADIENT_WRITERS = ("comm/reductions", "optim/fused_shards", "storage/sharded_params")


def gradients_written_elsewhere(all_sources: Sequence[Source]) -> list[str]:
    faults = []
    for source in all_sources:
        if str(source.path.with_suffix("")) in GRADIENT_WRITERS:
            continue
        for node in ast.walk(source.tree):
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
    faults = []
    for source in all_sources:
        prose = {id(n.value) for n in ast.walk(source.tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(source.tree):
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
OF_TRANSFORMERS = {"_init_weights"}
"""What every model of transformers defines for others to call."""


def private_torch_names_outside_the_border(all_sources: Sequence[Source]) -> list[str]:
    own = own_names(all_sources) | OF_NAMED_TUPLES | OF_TRANSFORMERS
    faults = []
    for source in all_sources:
        if source.unit == "torch_border":
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


def _foreign_private_names(source: Source, own: set[str]) -> Iterator[tuple[ast.AST, str]]:
    imported = dict(dotted_names(source))
    for node, name in imported.items():
        if within(name, "torch"):
            yield from ((node, part) for part in name.split(".") if is_private(part))
    for node in ast.walk(source.tree):
        if node in imported:
            continue
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
        ):
            names = [name for name in _constants(node) if isinstance(name, str)]
            yield from ((node, name) for name in names if is_private(name) and name not in own)


def none(faults: Sequence[str]) -> bool:
    """Whether nothing was found; otherwise the test fails and shows all of it."""
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)
    return True


# --- the package -----------------------------------------------------------------------------------------


def test_every_module_has_its_place() -> None:
    units = {source.unit for source in SOURCES}
    assert none(
        [f"{unit} has no place: add it to {WHERE}" for unit in sorted(units - set(ORDER))]
        + [f"{unit} is gone: remove it from {WHERE}" for unit in sorted(set(ORDER) - units)]
    )
    assert len(ORDER) == len(set(ORDER))


def test_modules_import_from_their_left_and_from_above() -> None:
    assert none(wrong_way_imports([source for source in SOURCES if source.unit in ORDER]))


def test_torch_s_own_fsdp_is_not_imported() -> None:
    assert none(imports_of_torch_fsdp(SOURCES))


def test_only_comm_calls_collectives() -> None:
    assert none(collectives_outside_comm(SOURCES))


def test_only_gradients_writes_grad() -> None:
    assert none(gradients_written_elsewhere(SOURCES))


def test_nobody_calls_record_stream() -> None:
    assert none(uses_of_record_stream(SOURCES))


def test_only_the_border_touches_private_torch_names() -> None:
    assert none(private_torch_names_outside_the_border(SOURCES))


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
        "plan/layout.py",
        "from ..comm import all_gather",
        "fullshard.comm.all_gather",
    ),
    (wrong_way_imports, "plan/layout.py", "from .. import errors, comm", "fullshard.comm,"),
    (
        wrong_way_imports,
        "plan/layout.py",
        "from ..storage.param import f",
        "fullshard.storage.param.f",
    ),
    (
        wrong_way_imports,
        "plan/mesh.py",
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
        "engine/runtime.py",
        "from ..programs.train.loop import train",
        "fullshard.programs.train.loop.train",
    ),
    (wrong_way_imports, "programs/train/loop.py", "from ...report import x", "fullshard.report.x"),
    (
        imports_of_torch_fsdp,
        "comm/collectives.py",
        "from torch.distributed import fsdp",
        "distributed.fsdp",
    ),
    (imports_of_torch_fsdp, "comm/collectives.py", "import torch.distributed.fsdp.api", "fsdp.api"),
    (
        imports_of_torch_fsdp,
        "programs/train/loop.py",
        "from torch.distributed._composable.fsdp import fully_shard",
        "_composable.fsdp.fully_shard",
    ),
    (
        imports_of_torch_fsdp,
        "plan/mesh.py",
        "import torch.distributed as dist\ndist.fsdp.fully_shard",
        "torch.distributed.fsdp.fully_shard",
    ),
    (
        collectives_outside_comm,
        "plan/mesh.py",
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "torch.distributed.all_reduce",
    ),
    (
        collectives_outside_comm,
        "engine/runtime.py",
        "from torch.distributed import broadcast as tell\ntell(x)",
        "torch.distributed.broadcast",
    ),
    (
        collectives_outside_comm,
        "engine/runtime.py",
        "import torch\ntorch.distributed.reduce(x, 0)",
        "torch.distributed.reduce",
    ),
    (
        collectives_outside_comm,
        "storage/param.py",
        "group.all_gather_into_tensor(x)",
        "all_gather_into",
    ),
    (
        collectives_outside_comm,
        "storage/param.py",
        "self.group._allgather_base(x, y)",
        "_allgather_base",
    ),
    (collectives_outside_comm, "storage/param.py", "self.param.full_tensor()", "full_tensor"),
    (gradients_written_elsewhere, "engine/runtime.py", "x.y.grad = None", "writes .grad"),
    (gradients_written_elsewhere, "engine/runtime.py", "a, x.grad = b", "writes .grad"),
    (gradients_written_elsewhere, "engine/runtime.py", "x.grad += y", "writes .grad"),
    (gradients_written_elsewhere, "engine/runtime.py", "del x.grad", "writes .grad"),
    (gradients_written_elsewhere, "engine/runtime.py", "x.grad.zero_()", "writes .grad"),
    (gradients_written_elsewhere, "engine/runtime.py", "setattr(x, 'grad', y)", "writes .grad"),
    (uses_of_record_stream, "comm/streams.py", "x.record_stream(s)", "record_stream"),
    (uses_of_record_stream, "comm/streams.py", "getattr(x, 'record_stream')(s)", "record_stream"),
    (
        private_torch_names_outside_the_border,
        "comm/collectives.py",
        "import torch\ntorch._C._x()",
        "_C",
    ),
    (
        private_torch_names_outside_the_border,
        "comm/collectives.py",
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
    last = 1 + len(code.splitlines())
    assert fault.startswith(f"src/fullshard/{path}:{last}: ")
    assert named in fault


@pytest.mark.parametrize(
    ("check", "path", "code"),
    [
        (
            wrong_way_imports,
            "plan/layout.py",
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
            collectives_outside_comm,
            "engine/runtime.py",
            "from ..comm import collectives\ncollectives.all_reduce(x)",
        ),
        (
            collectives_outside_comm,
            "storage/param.py",
            "x.broadcast_to(y); x.gather(0, y); f.reduce(x)",
        ),
        (
            collectives_outside_comm,
            "programs/train/loop.py",
            "import torch.distributed as d\nd.barrier()",
        ),
        (gradients_written_elsewhere, "engine/runtime.py", "x = y.grad; y.requires_grad = True"),
        (uses_of_record_stream, "comm/streams.py", "x = 1\n'without record_stream'"),
        (
            private_torch_names_outside_the_border,
            "comm/collectives.py",
            "import torch\ntorch._foreach_add_(x)",
        ),
        (
            private_torch_names_outside_the_border,
            "comm/collectives.py",
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
