"""The page in a real browser: no errors, no requests, and everything answers."""

import pytest

from patternsearch.report.build import compare_page, report_page
from patternsearch.schema.io import dump_config
from patternsearch.selection.options import SelectionOptions
from support.browser import AVAILABLE, Browser
from support.configs import MINFERENCE_PATTERNS, make_config
from support.report_scores import default_grid, write_calibration

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="chromium and chromedriver are not installed"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "x.yaml"
    write_calibration(
        path,
        num_layers=6,
        num_heads=8,
        layer_types=["full", "sliding", "full", "full", "full", "full"],
        lengths=(1024, 4096),
        options=SelectionOptions(target_mass=0.9),
        reference='<img src=x onerror="document.title=1"> & co',
        sources=("</script><b>prose", "code"),
    )
    html = path.with_suffix(".html")
    html.write_text(report_page(path))
    return html


@pytest.fixture(scope="module")
def browser():
    with Browser() as session:
        yield session


def quiet(browser, html):
    """Assert that the page made no noise and asked for nothing but itself."""
    assert browser.messages() == []
    asked = [url for url in browser.requests() if not url.startswith(("data:", "blob:"))]
    assert set(asked) <= {html.resolve().as_uri()}


def cell(browser, layer, head):
    """Viewport coordinates of a cell of the map."""
    return browser.run(
        """const plot = document.querySelector('[data-figure="heads-map"] .plot');
        plot.scrollIntoView({block: 'center'});
        const layout = plot._fullLayout, box = plot.getBoundingClientRect();
        return [box.left + layout.xaxis._offset + layout.xaxis.l2p(arguments[1]),
                box.top + layout.yaxis._offset + layout.yaxis.l2p(arguments[0])];""",
        layer, head,
    )  # fmt: skip


def test_page_answers_hover_click_switch_sort_and_download(browser, page):
    browser.open(page)
    assert browser.run("return document.title").startswith("<img src=x")
    assert browser.run("return document.images.length") == 0
    assert "not measured" in browser.run("return document.querySelector('.cards').innerText")

    browser.mouse(*cell(browser, 2, 3))
    hovers = "return [...document.querySelectorAll('.hoverlayer text')].map(t => t.textContent)"
    for _ in range(100):
        if found := browser.run(hovers):
            break
    assert "layer 2, head 3" in " ".join(found)

    browser.mouse(*cell(browser, 2, 3), press=True)
    assert browser.run("return document.querySelector('#drawer h2').innerText") == (
        "Layer 2 · head 3"
    )
    figures = browser.run(
        "return [...document.querySelectorAll('#drawer [data-figure]')].map(f => f.dataset.figure)"
    )
    assert {"head-budget", "head-cost", "head-samples"} <= set(figures)
    browser.key("\ue014")
    assert "head 4" in browser.run("return document.querySelector('#drawer h2').innerText")
    browser.key("\ue00c")
    assert browser.run("return document.getElementById('drawer').hidden")

    z = "return document.querySelector('[data-figure=\"heads-map\"] .plot').data[0].z[2]"
    kinds = browser.run(z)
    browser.click('#map [data-value="density"]')
    assert browser.run(z) != kinds
    assert browser.run("return document.querySelector('[data-value=\"predicted_ms\"]').disabled")

    first = """return [...document.querySelectorAll('#heads tbody tr')]
        .map(r => Number(r.children[4].innerText))"""
    browser.click("#heads thead th:nth-child(5) button")
    ascending = browser.run(first)
    assert ascending == sorted(ascending)
    browser.click("#heads thead th:nth-child(5) button")
    assert browser.run(first) == sorted(ascending, reverse=True)

    browser.click('[data-figure="heads-map"] .csv:last-child')
    csv = browser.run("return document.documentElement.dataset.lastCsv")
    assert csv.startswith("layer,head,kind,mass_mean,")
    browser.click('[data-figure="heads-map"] .csv:first-child')
    quiet(browser, page)


def test_axes_ranks_and_the_runner_up_read_as_meant(browser, page):
    browser.open(page)
    browser.run("location.hash = 'head-2-3'")
    ticks = (
        "return [...document.querySelectorAll('[data-figure=\"head-budget\"] .xtick text')]"
        ".map(t => t.textContent)"
    )
    for _ in range(200):
        if found := browser.run(ticks):
            break
    assert "0.5" in found
    browser.key("\ue014")
    assert browser.run("return location.hash") == "#head-2-4"
    browser.click("#close")
    assert browser.run("return location.hash") == ""
    # Counted work chose these heads, so a runner-up executes fewer pairs only within a tie.
    costs = browser.run(
        "return [...document.querySelectorAll('#heads tbody td:last-child')].map(c => c.innerText)"
    )
    assert costs
    assert min(float(c.replace("−", "-").rstrip("%")) for c in costs if c != "–") >= -2.0
    sizes = browser.run(
        "return [...document.querySelectorAll('[data-figure=\"ranks\"] .segments button')]"
        ".map(b => b.innerText)"
    )
    assert sizes == ["TP 1", "TP 2", "TP 4", "TP 8"]
    wrap = "return [...document.querySelectorAll('.tablewrap')]"
    assert browser.run(wrap + ".every(t => t.scrollWidth <= t.clientWidth)")


def test_theme_switches_and_the_page_prints(browser, page):
    browser.open(page)
    background = "return getComputedStyle(document.documentElement).backgroundColor"
    light = browser.run(background)
    browser.click("#theme")
    assert browser.run(background) != light
    assert browser.pdf().startswith(b"%PDF")
    quiet(browser, page)


@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_a_phone(page, dark):
    with Browser(width=390, height=844, dark=dark) as phone:
        phone.open(page, "#head-3-2")
        assert phone.run("return document.documentElement.scrollWidth") <= 390
        assert phone.run("return document.getElementById('drawer').clientWidth") <= 390
        assert phone.run("return document.documentElement.dataset.theme") == (
            "dark" if dark else "light"
        )
        quiet(phone, page)


def test_an_imported_config_has_a_page(browser, tmp_path):
    path = tmp_path / "x.yaml"
    document = make_config(patterns=MINFERENCE_PATTERNS).model_dump(mode="json")
    document.update(
        calibration=None, selection=None, fingerprints=None,
        imported={"format": "minference", "file_sha256": "0" * 64, "score_kind": "mass"},
    )  # fmt: skip
    for heads in document["heads"]:
        for entry in heads:
            entry.update(lengths=[], runner_up=None, imported_score=0.5)
    dump_config(type(make_config()).model_validate(document), path)
    html = tmp_path / "x.html"
    html.write_text(report_page(path))
    browser.open(html, "#head-1-1")
    assert "0.5000" in browser.run("return document.getElementById('drawer').innerText")
    quiet(browser, html)


def test_compare_page_shows_what_changed(browser, tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    dump_config(make_config(num_layers=4, num_query_heads=8, seed=0), a)
    dump_config(make_config(num_layers=4, num_query_heads=8, seed=1), b)
    html = tmp_path / "diff.html"
    html.write_text(compare_page(a, b))
    browser.open(html)
    assert browser.run("return document.querySelectorAll('#heads tbody tr').length") > 0
    browser.click('#map [data-value="kind_b"]')
    browser.click('#map [data-value="density"]')
    quiet(browser, html)


@pytest.mark.slow
def test_large_page_is_small_and_opens_fast(browser, tmp_path):
    path = tmp_path / "big.yaml"
    write_calibration(
        path, grid=default_grid(), lengths=(4096, 32768), num_layers=32, num_heads=32,
        num_kv_heads=8, options=SelectionOptions(target_mass=0.9, tp_size=4),
    )  # fmt: skip
    html = tmp_path / "big.html"
    html.write_text(report_page(path))
    assert html.stat().st_size < 6e6
    browser.cdp("Performance.enable", timeDomain="threadTicks")
    browser.open(html)
    metrics = {m["name"]: m["value"] for m in browser.cdp("Performance.getMetrics")["metrics"]}
    assert metrics["TaskDuration"] < 2.0
    assert browser.run("return document.querySelectorAll('#heads tbody tr').length") == 50
    quiet(browser, html)
