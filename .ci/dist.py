"""`make dist`: the sdist and the wheel, built and checked. Nothing is downloaded.

Only what the package is made from is copied to a fresh folder, so files of earlier builds cannot get in. The wheel is built
from the sdist, as pip does it. Then the wheel alone is installed into an empty environment, which imports it.

    python .ci/dist.py [FOLDER]     FOLDER is dist, if it is not given
"""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MADE_FROM = ("LICENSE", "README.md", "pyproject.toml", "src")
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def main() -> None:
    """Build, check and say where the files are."""
    target = Path(*sys.argv[1:2] or [ROOT / "dist"]).absolute()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        check_files(sdist, wheel)
        check_metadata(wheel)
        check_installed(wheel, folder / "environment")
        target.mkdir(parents=True, exist_ok=True)
        for file in (sdist, wheel):
            print(shutil.copy(file, target))


def build(folder: Path) -> tuple[Path, Path]:
    """Return the sdist, and the wheel that is built from it."""
    clone = folder / "clone"
    clone.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in MADE_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, clone)
    built = folder / "built"
    run(sys.executable, "-c", BUILD, "build_sdist", str(built), place=clone)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", BUILD, "build_wheel", str(built), place=source)
    (wheel,) = built.glob("*.whl")
    return sdist, wheel


def check_files(sdist: Path, wheel: Path) -> None:
    """Check the names of both, and that each holds every file of the package, and no other module."""
    stem = f"{PROJECT['name']}-{PROJECT['version']}"
    names = [f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"]
    require([sdist.name, wheel.name] == names, f"the files are not called {names}")
    paths = (ROOT / "src").rglob("*")
    files = {str(path.relative_to(ROOT / "src")) for path in paths if path.is_file()}
    files = {file for file in files if "__pycache__" not in file and ".egg-info" not in file}
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name for member in archive if member.isfile()}
    with zipfile.ZipFile(wheel) as packed:
        require(packed.testzip() is None, "the wheel is damaged")
        in_wheel = set(packed.namelist())
    in_package = {file for file in in_wheel if ".dist-info/" not in file}
    require(in_package == files, f"wheel and sources differ: {sorted(in_package ^ files)}")
    missing = {f"{stem}/src/{file}" for file in files} - in_sdist
    require(not missing, f"the sdist lacks {sorted(missing)}")
    licenses = [file for file in in_wheel if file.endswith("/LICENSE")]
    require(len(licenses) == 1, "the wheel has no license")


def check_metadata(wheel: Path) -> None:
    """Check what an index shows, and that extras are those of the project."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (file for file in packed.namelist() if file.endswith(".dist-info/METADATA"))
        data = email.message_from_bytes(packed.read(name))
    for field, wanted in (
        ("Name", PROJECT["name"]),
        ("Version", PROJECT["version"]),
        ("Summary", PROJECT["description"]),
        ("Requires-Python", PROJECT["requires-python"]),
        ("License-Expression", PROJECT["license"]),
        ("Description-Content-Type", "text/markdown"),
    ):
        require(data[field] == wanted, f"{field} is {data[field]!r}, not {wanted!r}")
    extras = set(data.get_all("Provides-Extra", ()))
    require(extras == set(PROJECT["optional-dependencies"]), f"the extras are {sorted(extras)}")
    text = data.get_payload(decode=True).decode()
    require(text == (ROOT / PROJECT["readme"]).read_text(), "the description is not the README")


def check_installed(wheel: Path, environment: Path) -> None:
    """Install the wheel without what it needs; it still imports and describes itself."""
    venv.create(environment, with_pip=False, symlinks=True)
    python = str(environment / "bin" / "python")
    alone = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet", str(wheel))
    run(sys.executable, "-m", "pip", "--python", python, "install", *alone, place=environment)
    run(python, "-I", "-c", "import fullshard", place=environment)
    said = run(str(environment / "bin" / "fullshard"), "env", place=environment)
    found = said.split()[:2]
    require(found == ["fullshard", PROJECT["version"]], f"fullshard env says {said!r}")


def run(*command: str, place: Path) -> str:
    """Run a command without this environment's paths, and return what it prints; end if it fails."""
    clean = {"PATH": "/usr/bin:/bin", "PYTHONNOUSERSITE": "1"}
    done = subprocess.run(command, cwd=place, env=clean, capture_output=True, text=True)
    require(done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def require(holds: bool, problem: str) -> None:
    """End with a message if something does not hold."""
    if not holds:
        sys.exit(f"make dist: {problem}")


if __name__ == "__main__":
    main()
