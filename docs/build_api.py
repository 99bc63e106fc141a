"""Writes docs/api.md from the docstrings in src/fullshard.

    python docs/build_api.py

Sources are read, not imported, so that the page depends on them alone: not on torch's version, nor on
the device of the machine.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fullshard"
PAGE = ROOT / "docs" / "api.md"
WIDTH = 116

INTRODUCTION = """\
# API

Written by `python docs/build_api.py` from the docstrings; do not edit. [guide.md](guide.md) shows how it is used,
[migration.md](migration.md) and [migration_fsdp1.md](migration_fsdp1.md) which names of torch correspond.
"""

CHAPTERS = {
    "Functions": [
        "fully_shard",
        "replicate",
        "balanced_placement",
        "clip_grad_norm_",
        "join",
        "JoinedBatches",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    ],
    "Groups by plan": ["plan_groups", "GroupPlan", "PlannedGroup"],
    "Sharded modules": [
        "FSDPModule",
        "ReplicateModule",
        "UnshardHandle",
        "GradientReductionHandle",
    ],
    "Options": [
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
    ],
    "The wrapper": ["FullyShardedDataParallel", "FlatParameter"],
    "Options of the wrapper": [
        "ShardingStrategy",
        "BackwardPrefetch",
        "MixedPrecision",
        "CPUOffload",
        "StateDictType",
        "StateDictConfig",
        "FullStateDictConfig",
        "ShardedStateDictConfig",
        "LocalStateDictConfig",
        "OptimStateDictConfig",
        "FullOptimStateDictConfig",
        "ShardedOptimStateDictConfig",
        "LocalOptimStateDictConfig",
        "StateDictSettings",
        "OptimStateKeyType",
    ],
    "In the place of torch's FSDP": ["install", "uninstall", "installed", "Installation"],
    "Ranks that diverge": ["debug"],
    "Steps that fail together": ["guarded_step", "GuardedStep", "StepFailure"],
    "Steps in CUDA graphs": ["graphed", "GraphedStep"],
    "Tracing": ["trace", "Recording"],
    "Errors": [
        "FullshardError",
        "ConfigurationError",
        "OptionTypeError",
        "LayoutError",
        "LifecycleError",
        "UsageError",
        "CheckpointError",
        "CommunicationError",
        "DivergenceError",
        "StepFailedError",
        "StreamOrderError",
        "UnsupportedError",
    ],
}
"""The names of `fullshard`, in the order of the page."""

PACKAGES = {
    "checkpoint": [
        "save",
        "async_save",
        "PendingSave",
        "base_of",
        "Base",
        "load",
        "latest",
        "load_huggingface",
        "save_huggingface",
        "Saved",
        "Loaded",
    ],
    "optim": ["ShardedOptimizer", "Muon", "AdamW8bit", "EMA"],
    "mesh": [
        "DataParallelAxes",
        "ProcessGroupAxes",
        "DataParallelMeshInfo",
        "FSDPMeshInfo",
        "DDPMeshInfo",
        "HSDPMeshInfo",
        "ShardPlacementResult",
        "sharding_mesh_info",
    ],
    "comm": [
        "Comm",
        "AllGather",
        "ReduceScatter",
        "DefaultAllGather",
        "DefaultReduceScatter",
        "ProcessGroupAllGather",
        "ProcessGroupReduceScatter",
        "SymmetricAllGather",
        "SymmetricReduceScatter",
        "SymmetricPool",
    ],
}
"""Import paths that show names of other files to users, in the order of the page."""

MODULES = ["wrap", "sharded_grad_scaler"]
"""Modules whose public classes are for users, too."""

GIVEN_TO_USERS = {
    "FSDPModule",
    "ReplicateModule",
    "UnshardHandle",
    "GradientReductionHandle",
    "FlatParameter",
    "GroupPlan",
    "Installation",
    "PlannedGroup",
    "Loaded",
    "PendingSave",
    "Recording",
    "Saved",
}
"""Classes that users do not make instances of."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Entry:
    """A function, class, method or attribute of the page."""

    name: str
    """As in its heading: with the class, if it is a method."""
    signature: str
    """Empty where a name says everything."""
    doc: str
    notes: list[str] = field(default_factory=list)
    """Lines between signature and docstring."""
    attributes: list[str] = field(default_factory=list)
    """List items after the docstring."""
    members: list[Entry] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """The docstring's first sentence, which is its first paragraph."""
        return " ".join(self.doc.split("\n\n")[0].split())


# --- reading --------------------------------------------------------------------------------------


def parse(module: str) -> ast.Module:
    """The syntax tree of a module of the package."""
    path = PACKAGE / module.replace(".", "/")
    return ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )


def modules_of_names() -> dict[str, str]:
    """The modules of all public names."""
    constants = {
        target.id: node.value
        for node in parse("__init__").body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names = ast.literal_eval(constants["__all__"])
    known = ast.literal_eval(constants["_MODULES"])
    return {name: known.get(name, "errors") for name in names}


def doc_of(node: Function | ast.ClassDef | ast.Module) -> str:
    """The docstring of a node, or nothing."""
    return ast.get_docstring(node) or ""


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Functions and methods of a body that are not private; of overloads the implementation."""
    for node in body:
        if isinstance(node, Function) and (node.name[0] != "_" or node.name == "__call__"):
            if "overload" not in decorators(node):
                yield node


def decorators(node: Function | ast.ClassDef) -> list[str]:
    """Names of decorators, without arguments."""
    return [ast.unparse(each).partition("(")[0] for each in node.decorator_list]


def signature(name: str, arguments: list[str], returns: str = "") -> str:
    """A signature on one line, or on one line per argument."""
    end = f" -> {returns}" if returns else ""
    line = f"{name}({', '.join(arguments)}){end}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){end}"


def arguments_of(function: Function) -> list[str]:
    """Arguments as they are written, without self."""
    arguments, given = function.args, []
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        default = arguments.defaults[index - without] if index >= without else None
        given.append(argument_text(argument, default))
    if arguments.vararg:
        given.append("*" + argument_text(arguments.vararg, None))
    elif arguments.kwonlyargs:
        given.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        given.append(argument_text(argument, default))
    if arguments.kwarg:
        given.append("**" + argument_text(arguments.kwarg, None))
    return given[1:] if given[:1] == ["self"] else given


def argument_text(argument: ast.arg, default: ast.expr | None) -> str:
    """One argument with its annotation and default."""
    text = argument.arg
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation)}"
    if default is not None:
        text += f" = {ast.unparse(default)}" if argument.annotation else f"={ast.unparse(default)}"
    return text


def function_entry(node: Function, prefix: str = "") -> Entry:
    """The entry of a function or method."""
    returns = ast.unparse(node.returns) if node.returns is not None else ""
    name = prefix + node.name
    return Entry(name, signature(node.name, arguments_of(node), returns), doc_of(node))


def class_entry(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Entry:
    """The entry of a class, with public attributes and methods.

    Args:
        node: The class.
        classes: All classes of its module, for what it inherits.
    """
    line = list(ancestors(node, classes))
    entry = Entry(node.name, constructor(node, line), doc_of(node))
    if bases := [base for base in map(ast.unparse, node.bases) if base[0] != "_" and base != "ABC"]:
        entry.notes.append(f"Bases: {', '.join(f'`{base}`' for base in bases)}")
    entry.attributes = [text for text in map(attribute_text, attributes(node)) if text]
    for function in public_functions(node.body):
        if "property" in decorators(function):
            entry.attributes.append(f"`{function.name}`: {' '.join(doc_of(function).split())}")
        else:
            entry.members.append(function_entry(function, f"{node.name}."))
    return entry


def ancestors(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """A class and its bases within the module, nearest first."""
    yield node
    for base in map(ast.unparse, node.bases):
        if base in classes:
            yield from ancestors(classes[base], classes)


def constructor(node: ast.ClassDef, line: list[ast.ClassDef]) -> str:
    """How an instance is made; nothing if users do not make any, or there is nothing to say."""
    if node.name in GIVEN_TO_USERS:
        return ""
    if "dataclass" in decorators(node):
        fields: dict[str, str] = {}
        for each in reversed(line):
            for attribute, _ in attributes(each):
                if not isinstance(attribute, ast.AnnAssign):
                    continue
                text = ast.unparse(attribute.annotation)
                value = attribute.value
                if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
                    options = {k.arg: k.value for k in value.keywords}
                    if "init" in options:
                        continue
                    value = options.get("default")
                default = f" = {ast.unparse(value)}" if value is not None else ""
                fields.setdefault(name_of(attribute), f"{text}{default}")
        return signature(node.name, [f"{name}: {text}" for name, text in fields.items()])
    for each in line:
        for function in each.body:
            if isinstance(function, Function) and function.name == "__init__":
                return signature(node.name, arguments_of(function))
    return ""


def attributes(node: ast.ClassDef) -> list[tuple[ast.AnnAssign | ast.Assign, str]]:
    """Public attributes of a class, each with the string literal that follows it."""
    found = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign | ast.Assign) and name_of(statement)[0] != "_":
            is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = following.value.value if is_doc else ""  # type: ignore[union-attr]
            found.append((statement, str(text)))
    return found


def name_of(statement: ast.AnnAssign | ast.Assign) -> str:
    """What is assigned to."""
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
    return ast.unparse(target)


def attribute_text(attribute: tuple[ast.AnnAssign | ast.Assign, str]) -> str:
    """A list item, or nothing for an attribute whose name says everything."""
    statement, doc = attribute
    return f"`{name_of(statement)}`: {' '.join(doc.split())}" if doc else ""


# --- writing --------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """Where a link to a heading goes."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    """A paragraph or list item in lines of the page's width."""
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def rendered_doc(doc: str) -> list[str]:
    """The paragraphs of a docstring as Markdown.

    Text that is indented is code; ``Args``, ``Returns`` and ``Raises`` become lists, and lists stay lists.
    """
    parts: list[str] = []
    for block in re.split(r"\n\n(?=\S)", doc.strip()):
        section = re.match(r"(Args|Returns|Raises):\n", block)
        if section:
            parts.append(f"{section[1]}:")
            parts.append(rendered_section(textwrap.dedent(block[section.end() :])))
            continue
        text, _, code = block.partition("\n\n")
        if text.startswith("- "):
            items = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
            parts.append("\n".join(wrapped(item, "- ", "  ") for item in items))
        else:
            parts.append(wrapped(text))
        if code:
            parts.append(fenced(textwrap.dedent(code).strip("\n")))
    return parts


def rendered_section(text: str) -> str:
    """Items of a section, one ``name: text`` each; or its text, where there is no name."""
    items = [" ".join(item.split()) for item in re.split(r"\n(?=\S)", text.strip())]
    if not all(re.match(r"[\w*]+: ", item) for item in items):
        return wrapped(" ".join(items), "- ", "  ")
    named = (item.split(": ", 1) for item in items)
    return "\n".join(wrapped(f"`{name}`: {rest}", "- ", "  ") for name, rest in named)


def fenced(code: str) -> str:
    """A code block; of Python if it is."""
    try:
        ast.parse(code)
    except SyntaxError:
        return f"```text\n{code}\n```"
    return f"```python\n{code}\n```"


def rendered(entry: Entry, level: int) -> list[str]:
    """An entry and its members as Markdown."""
    parts = [f"{'#' * level} `{entry.name}`"]
    if entry.signature:
        parts.append(f"```python\n{entry.signature}\n```")
    parts += entry.notes
    parts += rendered_doc(entry.doc)
    if entry.attributes:
        parts.append("\n".join(wrapped(text, "- ", "  ") for text in entry.attributes))
    for member in entry.members:
        parts += rendered(member, level + 1)
    return parts


def index_of(title: str, entries: list[Entry]) -> str:
    """The part of the index for one chapter."""
    lines = [f"**[{title}](#{anchor(title)})**", ""]
    for entry in entries:
        lines.append(
            wrapped(f"[`{entry.name}`](#{anchor(entry.name)}): {entry.summary}", "- ", "  ")
        )
        lines += [
            wrapped(f"[`{name}`](#{anchor(each.name)}): {each.summary}", "  - ", "    ")
            for each in entry.members
            if (name := each.name.rpartition(".")[2])
        ]
    return "\n".join(lines)


def chapters() -> dict[str, tuple[str, list[Entry]]]:
    """By title: the text that begins a chapter, and its entries."""
    modules = modules_of_names()
    if missing := modules.keys() ^ {name for names in CHAPTERS.values() for name in names}:
        raise SystemExit(f"CHAPTERS and fullshard.__all__ must agree; they differ in {missing}.")
    found: dict[str, tuple[str, list[Entry]]] = {}
    for title, names in CHAPTERS.items():
        found[title] = "", [entry_of(name, modules[name]) for name in names]
    for package, names in PACKAGES.items():
        tree = parse(package)
        files = {
            alias.name: (node.module or "").removeprefix("fullshard.")
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        if missing := files.keys() ^ set(names):
            raise SystemExit(f"PACKAGES and fullshard.{package} differ in {missing}.")
        # A path that shows the names of one file only is introduced by that file.
        (first, *others) = set(files.values())
        found[f"fullshard.{package}"] = (
            doc_of(tree if others else parse(first)),
            [entry_of(name, files[name]) for name in names],
        )
    for module in MODULES:
        tree = parse(module)
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        public = [name for name in classes if name[0] != "_"]
        found[f"fullshard.{module}"] = doc_of(tree), [entry_of(name, module) for name in public]
    return found


def entry_of(name: str, module: str) -> Entry:
    """The entry of a name of a module."""
    tree = parse(module)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name in classes:
        return class_entry(classes[name], classes)
    (function,) = (node for node in public_functions(tree.body) if node.name == name)
    return function_entry(function)


def page() -> str:
    """The whole page."""
    all_chapters = chapters()
    parts = [INTRODUCTION.rstrip()]
    parts += [index_of(title, entries) for title, (_, entries) in all_chapters.items()]
    for title, (text, entries) in all_chapters.items():
        parts.append(f"## {title}")
        parts += rendered_doc(text) if text else []
        for entry in entries:
            parts += rendered(entry, 3)
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
