"""Settings of Sphinx for the site that `make docs` builds.

Its pages are the Markdown files that people also read in the repository, so paths are those of the repository. Everything
works from a folder, without a server or a network.
"""

from sphinx.application import Sphinx

project = "fullshard"
copyright = "the fullshard authors"

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/decisions/*.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "examples/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
myst_heading_anchors = 4  # "#a-one-process", as GitHub has them
myst_enable_extensions = ["colon_fence", "html_image"]

html_theme = "furo"
html_title = "fullshard"
html_extra_path = ["site"]  # the folder's own index.html leads to the root page
html_copy_source = False
html_show_search_summary = False  # a browser may not read other pages of a folder
copybutton_prompt_text = "$ "

FOLDERS = {"docs/decisions/README": "[0-9]*", "benchmarks/README": "results/*"}
"""Pages that lead to all pages of a folder, which the start does not list."""


def list_folder(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the folder's pages under its own page."""
    if name in FOLDERS:
        source[0] += f"\n:::{{toctree}}\n:hidden:\n:glob:\n\n{FOLDERS[name]}\n:::\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", list_folder)
