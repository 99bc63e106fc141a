"""The site that `make docs` builds: no link leads nowhere, nothing comes from elsewhere, and search finds things."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.helpers.browser import Browser

IS_BUILT_HERE = all(map(find_spec, ("sphinx", "furo")))  # importing them takes half a second

pytestmark = [
    pytest.mark.timeout(180),  # a browser on a busy machine
    pytest.mark.skipif(not IS_BUILT_HERE, reason="needs sphinx and furo"),
]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as the Makefile does it: warnings are errors.

    What takes time and is of no matter here is left out: typographic quotes, and collecting garbage.
    """
    folder = tmp_path_factory.mktemp("site")
    strict = ("--quiet", "--nitpicky", "--fail-on-warning", "-D", "smartquotes=0")
    command = [*strict, "-c", "docs", "-d", str(folder / "doctrees"), ".", str(folder / "html")]
    program = "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main())"
    built = subprocess.run(
        [sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


class Page(HTMLParser):
    """What a page links to and loads, and the places in it that links can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given or (tag == "link" and "href" in given):
            self.loaded.append(given.get("src") or given["href"])


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 15
    wrong = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            if urlsplit(link).scheme or link.startswith("//"):
                if link in page.loaded:
                    wrong.append(f"{path.name} loads {link}")
                continue
            file, place = urldefrag(link)
            target = (path.parent / unquote(urlsplit(file).path)).resolve() if file else path
            if not target.exists() or (target in pages and place not in pages[target].places):
                wrong.append(f"{path.name}: {link}")
    assert not wrong


def test_the_first_page_leads_to_all_readers_and_search_finds_a_function(
    browser: Browser, site: Path
) -> None:
    with browser.open((site / "index.html").as_uri()) as tab:
        tab.wait_until("document.querySelector('h1')?.textContent.startsWith('fullshard')")
        for page in ("migration", "migration_fsdp1", "guide", "training", "how_do_i", "looks"):
            assert tab.evaluate(f"!!document.querySelector('article a[href^=\"{page}.html\"]')")
        assert tab.complaints() == []
    with browser.open((site / "search.html").as_uri() + "?q=fully_shard", scheme="dark") as tab:
        tab.wait_until("/found \\d+ pages/.test(document.body.textContent)")
        assert tab.evaluate("!!document.querySelector('#search-results a[href*=\"api.html\"]')")
        assert tab.complaints() == []
        assert {urlsplit(address).scheme for address in tab.requests()} <= {"file", "data"}
