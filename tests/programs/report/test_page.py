"""The page in a real browser: drawn, hovered, zoomed, recoloured, on a phone; no complaint, no request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.report import write_report
from tests.helpers.browser import Browser, Tab
from tests.helpers.run_folders import Machine, hostile_run, write_run

pytest.importorskip("plotly")

pytestmark = pytest.mark.timeout(180)  # a browser on a busy machine

CHARTS = ("timeline", "breakdown", "groups", "memory", "loss", "speed", "optimizer")
READY = "document.documentElement.dataset.ready === 'yes'"
MACHINE = Machine(layers=4, gather_us=800, slow_gathers={"layers.2": 4000})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("run"), MACHINE, steps=30, num_traced=2))


@pytest.fixture(scope="module")
def opened(browser: Browser, page: Path) -> Iterator[Tab]:
    with browser.open(page.as_uri()) as tab:
        tab.wait_until(READY)
        yield tab
        assert tab.complaints() == []
        assert tab.requests() == [page.as_uri()]


@pytest.fixture
def tab(opened: Tab) -> Tab:
    """The page as it was when it was opened: the timeline in sight, nothing zoomed."""
    opened.mouse("mouseMoved", 1, 1)
    opened.evaluate("document.querySelector('#timeline [data-do=reset]').click()")
    opened.evaluate("document.activeElement.blur()")
    opened.evaluate("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
    return opened


def x_range(tab: Tab, chart: str = "timeline") -> list[float]:
    # Plotly draws in the next frame.
    tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    return tab.evaluate(f"document.querySelector('[data-chart={chart}]').layout.xaxis.range")


def plot_area(tab: Tab) -> dict[str, float]:
    return tab.evaluate(
        "(() => { const box = document.querySelector('[data-chart=timeline] .nsewdrag').getBoundingClientRect();"
        " return {left: box.left, top: box.top, width: box.width, height: box.height}; })()"
    )


def middle_of_bar(tab: Tab, trace: str, words: str) -> tuple[float, float]:
    """Where on the screen the bar is whose hover text has these words."""
    x, y = tab.evaluate(
        f"""(() => {{
            const chart = document.querySelector('[data-chart=timeline]');
            const at = chart.data.findIndex(each => each.name === '{trace}');
            const bar = chart.data[at].hovertext.findIndex(text => text.includes('{words}'));
            const path = chart.querySelectorAll('.trace.bars')[at].querySelectorAll('.point path')[bar];
            const box = path.getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2];
        }})()"""
    )
    return x, y


def hover_text(tab: Tab) -> str:
    tab.wait_until(
        "document.querySelector('[data-chart=timeline] .hoverlayer .hovertext') !== null"
    )
    return tab.evaluate("document.querySelector('[data-chart=timeline] .hoverlayer').textContent")


def test_every_chart_is_drawn_with_data(tab: Tab):
    assert tab.evaluate(
        "Array.from(document.querySelectorAll('[data-chart]'), each => each.dataset.chart)"
    ) == list(CHARTS)
    for chart in CHARTS:
        drawn = tab.evaluate(
            f"document.querySelectorAll('[data-chart={chart}] :is(.point path, .js-line)').length"
        )
        assert drawn > 0, chart
    bars = tab.evaluate("document.querySelectorAll('[data-chart=timeline] .point path').length")
    # Outside and the root's and layers' compute; waits; gathers; reductions.
    assert bars == 1 + 10 + 4 + 9 + 5


def test_hovering_a_wait_names_its_group(tab: Tab):
    tab.mouse("mouseMoved", *middle_of_bar(tab, "waits", "layers.2, forward"))
    text = hover_text(tab)
    assert "wait for the gather of layers.2, forward" in text
    assert "2.8 ms, from " in text


def test_hovering_a_gather_tells_its_bytes(tab: Tab):
    tab.mouse("mouseMoved", *middle_of_bar(tab, "all-gather", "layers.3, backward"))
    text = hover_text(tab)
    assert "all-gather of layers.3, backward, 2.86 MiB" in text
    assert "800 \u00b5s, from " in text


def test_the_other_steps_can_be_chosen(tab: Tab):
    before = tab.evaluate("document.querySelector('[data-chart=timeline]').data[0].base[0]")
    title = "document.querySelector('#timeline select[data-choice=rank]')"
    assert tab.evaluate(f"{title}.options.length") == 2
    tab.evaluate(f"{title}.value = '1', {title}.dispatchEvent(new Event('change'))")
    assert tab.evaluate("document.querySelector('#memory select[data-choice=rank]').value") == "1"
    tab.evaluate(f"{title}.value = '0', {title}.dispatchEvent(new Event('change'))")
    after = tab.evaluate("document.querySelector('[data-chart=timeline]').data[0].base[0]")
    assert before == after


def test_dragging_zooms_to_what_was_dragged_over_and_a_double_click_resets(tab: Tab):
    whole = x_range(tab)
    area = plot_area(tab)
    y = area["top"] + 10
    tab.drag(area["left"] + 0.25 * area["width"], y, area["left"] + 0.5 * area["width"], y)
    low, high = x_range(tab)
    assert low == pytest.approx(0.25 * whole[1], rel=0.05)
    assert high == pytest.approx(0.5 * whole[1], rel=0.05)
    tab.double_click(area["left"] + 5, y)
    tab.wait_until(
        f"document.querySelector('[data-chart=timeline]').layout.xaxis.range[1] === {whole[1]}"
    )


def test_the_wheel_zooms_a_chart_that_was_clicked_and_scrolls_past_others(tab: Tab):
    whole = x_range(tab)
    area = plot_area(tab)
    x, y = area["left"] + 0.5 * area["width"], area["top"] + 0.5 * area["height"]
    top = tab.evaluate("scrollY")
    tab.wheel(x, y, 40)
    tab.wait_until(f"scrollY > {top}")
    assert x_range(tab) == whole
    y -= tab.evaluate("scrollY") - top
    tab.click(x, y)
    tab.wheel(x, y, -200)
    shown = "document.querySelector('[data-chart=timeline]').layout.xaxis.range"
    tab.wait_until(f"{shown}[1] - {shown}[0] < {0.95 * whole[1]}")


def test_the_keyboard_zooms_pans_and_resets(tab: Tab):
    whole = x_range(tab)
    tab.evaluate("document.querySelector('#timeline [data-do=reset]').focus()")
    for _ in range(20):  # past the entries of the legend
        tab.press("Tab")
        if tab.evaluate("document.activeElement.dataset.chart") == "timeline":
            break
    assert tab.evaluate("document.activeElement.dataset.chart") == "timeline"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("+")
    low, high = x_range(tab)
    assert high - low == pytest.approx(0.6 * whole[1])
    tab.press("ArrowRight")
    assert x_range(tab)[0] > low
    tab.press("ArrowLeft")
    assert x_range(tab) == pytest.approx([low, high])
    tab.press("-")
    assert x_range(tab) == pytest.approx(whole, abs=1e-9)
    tab.press("+")
    tab.press("0")
    assert x_range(tab) == whole


def test_the_theme_recolours_page_and_charts_and_keeps_the_zoom(tab: Tab):
    colours = (
        "[getComputedStyle(document.body).backgroundColor,"
        " document.querySelector('[data-chart=timeline]').data[0].marker.color,"
        " document.querySelector('[data-chart=loss]').layout.font.color]"
    )
    light = tab.evaluate(colours)
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    tab.evaluate("document.querySelector('#timeline [data-do=in]').click()")
    zoomed = x_range(tab)
    tab.evaluate("document.getElementById('theme').click()")
    assert x_range(tab) == zoomed
    dark = tab.evaluate(colours)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    tab.evaluate("document.getElementById('theme').click()")
    assert x_range(tab) == zoomed
    assert tab.evaluate(colours) == light


def test_the_legend_hides_and_shows(tab: Tab):
    button = "document.querySelector('[data-legend=timeline] button')"
    tab.evaluate(f"{button}.focus(), {button}.click()")
    assert tab.evaluate(f"{button}.getAttribute('aria-pressed')") == "false"
    assert tab.evaluate(f"document.activeElement === {button}")
    assert tab.evaluate("document.querySelector('[data-chart=timeline]').data[0].visible") is False
    tab.evaluate(f"{button}.click()")
    assert tab.evaluate("document.querySelector('[data-chart=timeline]').data[0].visible") is True


def test_the_table_of_groups_sorts_by_its_headings(tab: Tab):
    column = "Array.from(document.querySelectorAll('table[data-sortable] tbody tr'), row => row.cells[0].textContent)"
    assert tab.evaluate(column)[0] == "root"
    heading = "document.querySelectorAll('table[data-sortable] th button')[3]"
    tab.evaluate(f"{heading}.click()")  # elements, largest first
    assert tab.evaluate(column)[0] == "root"
    tab.evaluate(f"{heading}.click()")
    assert tab.evaluate(column)[-1] == "root"
    assert tab.evaluate(f"{heading}.parentElement.getAttribute('aria-sort')") == "ascending"


def test_a_phone_that_prefers_dark_and_names_that_mean_harm(browser: Browser, tmp_path: Path):
    page = write_report(hostile_run(tmp_path))
    with browser.open(page.as_uri(), width=360, height=740, scheme="dark", phone=True) as tab:
        tab.wait_until(READY)
        assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
        assert tab.evaluate("document.documentElement.scrollWidth") == 360
        wide = tab.evaluate(
            "Array.from(document.querySelectorAll('[data-chart] .main-svg'))"
            ".filter(svg => svg.getBoundingClientRect().right > 360).length"
        )
        assert wide == 0
        _, y = middle_of_bar(tab, "waits", "hacked")
        tab.evaluate(f"scrollTo({{top: {y - 300}, behavior: 'instant'}})")
        tab.mouse("mouseMoved", *middle_of_bar(tab, "waits", "hacked"))
        assert "of </script><script>window.hacked=1</script><b>x</b><img" in hover_text(tab)
        tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert tab.evaluate("typeof window.hacked") == "undefined"
        assert tab.evaluate("document.querySelectorAll('img').length") == 0
        assert tab.complaints() == []
        assert tab.requests() == [page.as_uri()]
