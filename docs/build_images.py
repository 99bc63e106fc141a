"""Makes the pictures in docs/images: the trainer in a terminal, its report, the trace of one step, and the page of a plan.

    python docs/build_images.py             # trains for a minute or two on two CPU ranks; needs Chromium and Pillow
    python docs/build_images.py RUN         # the report's pictures only, of a run that is there
    python docs/build_images.py plan.html   # the plan's pictures only, of a page that is there

Every picture is made twice, for light and for dark pages. Run it when nothing else runs: a busy machine shows as waits.
"""

from __future__ import annotations

import base64
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers.browser import Browser, Tab, find_chromium  # noqa: E402

IMAGES = ROOT / "docs" / "images"
COLUMNS = 80
LINE_HEIGHT = 24.4
LIGHT = TerminalTheme(
    (250, 250, 250),
    (36, 41, 47),
    [(36, 41, 47), (160, 17, 31), (17, 99, 41), (77, 45, 0), (5, 80, 174), (130, 80, 223), (27, 124, 131), (110, 119, 129)],
)  # fmt: skip
THEMES = {"light": LIGHT, "dark": DIMMED_MONOKAI}

RUN = """\
[run]
folder = "runs/readme"
device = "cpu"

[model]
layers = 8
width = 192
heads = 4

[data]
path = "pages"

[train]
steps = 40

[trace]
start = 20

[samples]
prompt = "A checkpoint "
tokens = 50
"""

PLAN = ("plan", "large", "--gpus", "1024", "--gpu", "h100", "--seq", "2048", "--set", "compute.precision=bf16")  # fmt: skip

TERMINAL = """\
<svg viewBox="0 0 {terminal_width} HEIGHT" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="BACKGROUND"/>
<g transform="translate(8, 8)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""
"""How rich draws a terminal, without a window around it and without fonts from elsewhere."""


def main() -> None:
    """Make all pictures, or those of a run."""
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        if given is not None and given.suffix == ".html":
            draw_plan(given)
            return
        if given is not None:
            run = given
        else:
            page = Path(folder) / "plan.html"
            shown_by([sys.executable, "-m", "fullshard", *PLAN, "--html", str(page)], folder)
            draw_plan(page)
            run = Path(folder) / "runs" / "readme"
            (Path(folder) / "run.toml").write_text(RUN)
            (Path(folder) / "pages").mkdir()
            for page in (ROOT / "docs").glob("*.md"):
                shutil.copy(page, Path(folder) / "pages")
            command = [sys.executable, "-m", "fullshard", "train", "run.toml"]
            # The folder is of no interest, and another each time.
            draw_terminal(
                "fullshard train run.toml", shown_by(command, folder).replace(folder, "~")
            )
        draw_report(run / "report.html")
    total = sum(file.stat().st_size for file in IMAGES.iterdir())
    print(f"{total / 1024:.0f} KiB in {IMAGES}")


# --- the terminal --------------------------------------------------------------------------------


def shown_by(command: list[str], folder: str) -> str:
    """Run a command in a terminal, and return all that it wrote there."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", PYTHONPATH=str(ROOT / "src"))
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    written = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # how Linux says that nobody writes there any more
            break
        written += part
    _, status = os.waitpid(process, 0)
    text = written.decode()
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{text}")
    return text


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows after this, with their colours. It knows as much as rich uses."""
    lines: list[str] = []
    for line in re.sub(r"\x1b\[\?25[hl]", "", written).replace("\r\n", "\n").split("\n"):
        for _ in range(line.count("\x1b[1A")):
            lines.pop()
        lines.append(re.split(r"\r|\x1b\[2K", line)[-1])
    return lines


def draw_terminal(command: str, written: str) -> None:
    """Draw the run in its middle and at its end."""
    steps = [found.start() for found in re.finditer(r"\r\x1b\[2Kstep", written)]
    middle = screen(written[: steps[len(steps) * 2 // 3]])
    end = screen(written.rstrip())
    begun = [line for line in middle if line in end]
    running = screen(written[: steps[len(steps) * 2 // 3 + 1]])[-1]
    lines = [f"\x1b[1m$ {command}\x1b[0m", *begun, running, "\x1b[2m...\x1b[0m", *end[len(begun) :]]
    for scheme, theme in THEMES.items():
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        for line in lines:
            console.print(Text.from_ansi(line), no_wrap=True, crop=True)
        terminal = TERMINAL.replace("BACKGROUND", theme.background_color.hex)
        terminal = terminal.replace("HEIGHT", str(round((len(lines) + 1) * LINE_HEIGHT)))
        picture = console.export_svg(theme=theme, code_format=terminal, unique_id="trainer")
        (IMAGES / f"trainer-{scheme}.svg").write_text(picture)


# --- the report ----------------------------------------------------------------------------------


def draw_report(page: Path) -> None:
    """Take pictures of the top of the page, and of the timeline."""
    for scheme, tab in opened(page):
        tab.wait_until("!!document.querySelector('#timeline .main-svg')")
        steps, _ = place(tab, "steps")
        take(tab, IMAGES / f"report-{scheme}.png", 0, min(steps, 900))
        top, height = place(tab, "timeline")
        take(tab, IMAGES / f"trace-{scheme}.png", top - 8, height + 16)


def draw_plan(page: Path) -> None:
    """Take pictures of the top of the page with the timeline, and of the curve of scaling."""
    for scheme, tab in opened(page):
        tab.wait_until("!!document.querySelector('#scaling .main-svg')")
        top, height = place(tab, "timeline")
        take(tab, IMAGES / f"plan-{scheme}.png", 0, top + height + 16)
        top, height = place(tab, "scaling")
        take(tab, IMAGES / f"scaling-{scheme}.png", top - 8, height + 16)


def opened(page: Path) -> Iterator[tuple[str, Tab]]:
    """Yield a page in each colour scheme."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit("The pictures of pages need Chromium.")
    with Browser(chromium) as browser:
        for scheme in THEMES:
            with browser.open(page.resolve().as_uri(), width=1000, scheme=scheme) as tab:
                yield scheme, tab


def place(tab: Tab, name: str) -> tuple[float, float]:
    """Return where an element of the page begins, and how high it is."""
    box = f"document.getElementById('{name}').getBoundingClientRect()"
    return tab.evaluate(f"{box}.top + scrollY"), tab.evaluate(f"{box}.height")


def take(tab: Tab, path: Path, top: float, height: float) -> None:
    """Take a picture of a strip of the page, in few colours."""
    from PIL import Image

    clip = {"x": 0, "y": top, "width": 1000, "height": height, "scale": 1}
    shot = tab.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    picture = Image.open(io.BytesIO(base64.b64decode(shot["data"])))
    picture.convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main()
