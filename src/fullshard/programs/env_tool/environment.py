"""Facts about this machine, for a report of a problem: versions, GPUs, cores and settings.

A broken installation is what many reports are about. So Python's own library is enough here, and a fact that cannot be found
out says why. No process group is made, and no memory of a GPU is used.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from fullshard import __version__
from fullshard.programs.console.safe_text import safe_line

PREFIXES = (
    *("FULLSHARD_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "ONEDNN_"),
    "CUDA_VISIBLE_DEVICES",
)
"""How the variables that are shown begin."""

SECRET = re.compile(r"^[^=]*(TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL|AUTH)[^=]*=|=.*://[^/]*@")
"""Settings whose values are not shown: by their names, and addresses with a user."""

TOOLS = {"benchmarks", "dev", "docs"}
"""Extras that a program of a user does not use."""

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def print_environment() -> None:
    """Print the facts, one below the other."""
    facts = list(environment_facts())
    width = max(len(label) for label, _ in facts) + 2
    for label, text in facts:
        print(f"{label:<{width}}{safe_line(text)}")


def environment_facts() -> Iterator[tuple[str, str]]:
    """Yield labels and texts. A label is empty where a text belongs to the one above."""
    yield "fullshard", __version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    for label, fact in (
        ("torch", _torch),
        ("backends", _backends),
        ("torch sees", _visible_gpus),
        ("GPUs", _gpus),
        ("OS", _operating_system),
        ("CPU", _cpu),
        ("libraries", _libraries),
    ):
        yield label, _known(fact)
    for label, setting in zip(("settings", *[""] * len(os.environ)), _settings(), strict=False):
        yield label, setting


def _known(fact: Callable[[], str]) -> str:
    try:
        return fact()
    except Exception as error:  # anything may be broken; the other facts are still worth having
        return f"not known: {type(error).__name__}: {error}"


def _torch() -> str:
    import torch

    gpu = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"{torch.__version__} ({f'ROCm {torch.version.hip}' if torch.version.hip else gpu})"


def _backends() -> str:
    import torch
    from torch import distributed

    if not distributed.is_available():
        return "none: this torch is built without torch.distributed"
    found = ["gloo"] if distributed.is_gloo_available() else []
    if distributed.is_nccl_available():
        found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    return ", ".join(found) or "none"


def _visible_gpus() -> str:
    from torch import cuda

    return _counted(cuda.get_device_name(i) for i in range(cuda.device_count()))


def _gpus() -> str:
    """GPUs and driver as the driver's own tool has them: torch sees none if the driver is too old for it."""
    try:
        listed = subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True)
    except FileNotFoundError:
        return "not known: there is no nvidia-smi"
    except subprocess.CalledProcessError as error:
        return f"not known: nvidia-smi says {(error.stdout + error.stderr).strip()}"
    rows = [row.rsplit(", ", 1) for row in listed.stdout.splitlines()]
    drivers = sorted({driver for _, driver in rows})
    return _counted(gpu for gpu, _ in rows) + "".join(f", driver {driver}" for driver in drivers)


def _counted(names: Iterator[str]) -> str:
    return "; ".join(f"{number} x {name}" for name, number in Counter(names).items()) or "none"


def _operating_system() -> str:
    try:
        distribution = f"{platform.freedesktop_os_release()['PRETTY_NAME']}, "
    except (OSError, KeyError):
        distribution = ""
    return distribution + platform.platform()


def _cpu() -> str:
    allowed = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{allowed} of {os.cpu_count()} cores, {memory_gib:.1f} GiB of memory"


def _libraries() -> str:
    """Libraries of the extras, as far as they are installed."""
    try:
        lines = requires("fullshard") or []
    except PackageNotFoundError:
        return "not known: fullshard itself is not installed"
    names = set()
    for line in lines:
        extra = re.search(r"""extra *== *['"](.+?)['"]""", line)
        if extra and extra[1] not in TOOLS:
            names |= set(re.findall(r"^[\w.-]+", line)) - {"fullshard"}
    found = []
    for name in sorted(names, key=str.lower):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found) or "none"


def _settings() -> list[str]:
    shown = []
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES):
            setting = f"{name}={value}"
            is_secret = SECRET.search(setting)
            shown.append(f"{name} is set, and not shown" if is_secret else setting)
    return shown or ["none"]
