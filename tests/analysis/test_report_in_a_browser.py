"""The page about runs in a real browser: what a person sees, points at, zooms and reaches with the keyboard."""

import dataclasses
import re

import pytest

import dualdelay as dd
from dualdelay.analysis.report import write_report
from dualdelay.engine.trace import Trace

CENTRES = [[0.0], [6.0], [12.0]]
SPEEDS = dd.FixedSpeeds([1.0, 2.0, 4.0])
HOSTILE = "</script><img src=http://x.test/ onerror='window.hit=1'><a href='http://x.test'>&lt;%{x}"
RANGE = "[...document.getElementById('plot-curves')._fullLayout.xaxis.range].map(Number)"


@pytest.fixture(scope="module")
def sweep():
    """Three methods with two seeds each; the last run has had a crash."""
    methods = {"first": dd.DuDe(0.1), "sync": dd.SyncSGD(0.1), HOSTILE: dd.VanillaASGD(0.1)}
    table = dd.compare(methods, dd.Quadratic(CENTRES, noise=0.5), SPEEDS, seeds=[0, 1], updates=60)
    event = {"row": 5, "draw": 2, "version": 5, "after": 5, "time": 6.0, "worker": 1, "kind": "crashed", "text": HOSTILE}
    faulty = table.runs[-1]
    table.runs[-1] = dataclasses.replace(faulty, trace=Trace(faulty.trace.columns, [event]), notes=(HOSTILE,))
    return table


@pytest.fixture(scope="module")
def file(sweep, tmp_path_factory):
    return write_report([sweep], tmp_path_factory.mktemp("page") / "page.html")


def drawn(looked):
    looked.page.wait_for_selector("html[data-drawn=all]")
    return looked.page


def until(page, condition):
    """Wait until something holds; the page's own policy refuses what playwright has for it."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise TimeoutError(condition)


def at(page, plot, curve, point):
    """Where on the screen a point of a curve is."""
    return page.evaluate(
        """([plot, curve, point]) => {
            const place = document.getElementById(plot), full = place._fullLayout, box = place.getBoundingClientRect();
            const one = place._fullData[curve], x = full.xaxis, y = full.yaxis;
            return [box.left + x._offset + x.d2p(one.x[point]), box.top + y._offset + y.d2p(one.y[point])];
        }""",
        [plot, curve, point],
    )


# what hangs over a picture is drawn a moment later
SHOWN = "document.querySelector('#plot-jobs .hoverlayer').textContent.includes('%s')"


def curves(page):
    """The places of the curves that answer to the mouse."""
    return page.evaluate(
        "document.getElementById('plot-curves').data.map((one, k) => one.rows ? k : -1).filter((k) => k >= 0)"
    )


def hovered(page, plot):
    return page.locator(f"#{plot} .hoverlayer").text_content()


def test_the_page_answers_to_the_mouse_and_the_keyboard(file, sweep, open_page):
    looked = open_page(file, viewport={"width": 1280, "height": 900})
    page = drawn(looked)
    runs = [run for names, run in zip(sweep.points, sweep.runs, strict=True) if names["algorithm"] == "sync"]
    mean = sum(run.metrics.objective[-1] for run in runs) / 2
    _, sync, _ = curves(page)  # the slowest, whose end is far from the others
    last = page.evaluate(f"document.getElementById('plot-curves').data[{sync}].x.length") - 1

    # pointing at the end of a curve shows the mean of the seeds there
    x, y = at(page, "plot-curves", sync, last)
    page.mouse.move(x - 30, y - 30)
    page.mouse.move(x, y)
    until(page, "document.querySelector('#plot-curves .hoverlayer').textContent.includes('objective')")
    text = hovered(page, "plot-curves")
    assert "sync" in text and f"objective: {float(f'{mean:.5g}'):g}"[:16] in text and "runs: 2" in text, text

    # zoom by the button, by the keyboard and by dragging; then back
    whole = page.evaluate(RANGE)
    page.click("button[data-plot=plot-curves][data-do=in]")
    near = page.evaluate(RANGE)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.focus("#plot-curves")
    page.keyboard.press("+")
    assert page.evaluate(RANGE)[1] - page.evaluate(RANGE)[0] == pytest.approx((whole[1] - whole[0]) / 4)
    page.keyboard.press("0")
    assert page.evaluate(RANGE) == pytest.approx(whole)
    box = page.locator("#plot-curves .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 25, steps=4)
    page.mouse.up()
    until(page, f"{RANGE}[0] > {whole[0]}")
    dragged = page.evaluate(RANGE)
    assert dragged[1] - dragged[0] == pytest.approx((whole[1] - whole[0]) / 4, rel=0.05)
    page.click("button[data-plot=plot-curves][data-do=reset]")

    # the other axis, a log scale, each run by itself, another metric
    page.select_option("#axis", "version")
    assert page.evaluate("document.getElementById('plot-curves')._fullLayout.xaxis.title.text") == "updates"
    assert page.evaluate(f"document.getElementById('plot-curves').data[{sync}].x.at(-1)") == 60
    was = page.evaluate("document.getElementById('plot-curves')._fullLayout.yaxis.type")
    page.focus("#ylog")
    page.keyboard.press("Space")
    assert {was, page.evaluate("document.getElementById('plot-curves')._fullLayout.yaxis.type")} == {"log", "linear"}
    assert len(curves(page)) == 3
    page.select_option("#each", "1")
    assert len(curves(page)) == 6
    page.select_option("#metric", "gradient_norm")
    assert page.evaluate("document.getElementById('plot-curves')._fullLayout.yaxis.title.text") == "gradient norm"
    page.locator("#legend-items input").first.uncheck()
    assert len(curves(page)) == 4

    # from point to point with the keyboard: who computed what
    page.select_option("#run", "5")
    page.focus("#plot-jobs")
    page.keyboard.press("ArrowRight")
    trace = sweep.runs[5].trace
    said = page.text_content("#plot-jobs-point")
    assert said.startswith(
        f"worker {trace.worker[0]}, draw {trace.draw[0]}, computed 0 to {trace.time[0]:g}, version 0, after"
    )
    until(page, SHOWN % f"worker {trace.worker[0]}, draw")
    page.keyboard.press("End")
    assert f"draw {trace.draw[-1]}" in page.text_content("#plot-jobs-point")
    page.keyboard.press("ArrowDown")
    assert page.text_content("#plot-jobs-point").startswith("crashed, worker 1, simulated time 6, why </script>")
    until(page, SHOWN % "</script><img src=http")  # as it is written
    assert page.locator(".run.chosen h3").first.text_content() == f"{HOSTILE}, seed 1"
    assert page.locator(".run.chosen").get_by_text("Notes of the run").is_visible()

    # the colour of a bar says how stale it was: the larger the delay, the lighter
    bars = page.evaluate(
        """(() => {
            const [bars] = document.getElementById("plot-jobs").data;
            const part = (c, k) => parseInt(c.slice(k, k + 2), 16);
            const light = (c) => 0.2126 * part(c, 1) + 0.7152 * part(c, 3) + 0.0722 * part(c, 5);
            return bars.rows.map((row, k) => [Number(row[4]), light(bars.marker.color[k])]);
        })()"""
    )
    lightness = dict(sorted(bars))
    assert len(lightness) > 2 and list(lightness.values()) == sorted(lightness.values())

    # the numbers behind a picture
    page.locator("details[data-table=plot-shares] summary").click()
    until(page, "document.querySelector('details[data-table=plot-shares] tr') !== null")  # it is filled a moment later
    rows = page.locator("details[data-table=plot-shares] tr").all_text_contents()
    count = int((trace.worker == 0).sum())
    assert rows[1] == f"worker 0{count}{float(f'{100 * count / len(trace):.5g}'):g}%"

    # every control can be reached, in the order of the page
    page.focus(".skip")
    reached = [""]
    while reached[-1] != "plot-delays" and len(reached) < 90:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.dataset.do || ''"))
    order = [
        "theme",
        "metric",
        "axis",
        "each",
        "ylog",
        "plot-curves",
        "in",
        "reset",
        "run",
        "window",
        "plot-jobs",
        "plot-delays",
    ]
    places = [reached.index(name) for name in order]
    assert places == sorted(places), reached
    page.focus("#metric")
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"

    assert looked.said == [] and looked.network == [] and page.evaluate("window.hit") is None
    assert page.locator("a[href^=http], img").count() == 0


def test_the_buttons_of_a_picture_cover_nothing_and_captions_say_what_is_drawn(file, open_page):
    page = drawn(open_page(file, viewport={"width": 1280, "height": 900}))
    for plot, beside in (("plot-delays", ".legend"), ("plot-losses", ".legend"), ("plot-jobs", ".colorbar")):
        page.hover(f"#{plot}")
        buttons = page.locator(f"#{plot} .modebar").bounding_box()
        for part in (beside, ".nsewdrag"):
            box = page.locator(f"#{plot} {part}").first.bounding_box()
            assert buttons["y"] + buttons["height"] <= box["y"] + 1, (plot, part)
    marked, arrivals = page.evaluate(
        """(() => {
            const place = document.getElementById("plot-delays");
            return [place.querySelectorAll(".points path").length, place.data.reduce((sum, one) => sum + one.x.length, 0)];
        })()"""
    )
    assert 0 < marked < arrivals and "A line goes from arrival to arrival; some of them are marked." in page.text_content(
        "#plot-delays-said"
    )


@pytest.mark.slow
def test_a_page_of_two_problems_shows_one_at_a_time_and_says_which(tmp_path, open_page):
    sweeps = []
    for name, noise, metrics in (("a", 0.5, {"f1": lambda x: 0.5}), ("b", 2.0, None)):
        evaluation, problem = dd.Evaluation(every=5, metrics=metrics), dd.Quadratic(CENTRES, noise=noise)
        methods = [kind(lr=lr) for kind in (dd.DuDe, dd.VanillaASGD) for lr in (0.05, 0.1)]
        dd.compare(methods, problem, SPEEDS, seeds=[0, 1], updates=20, folder=tmp_path / name, evaluation=evaluation)
        sweeps.append(dd.load(tmp_path / name))
    looked = open_page(write_report(sweeps, tmp_path / "page.html"), viewport={"width": 1280, "height": 900})
    page = drawn(looked)
    for value, problem in (("0", "quadratic[noise=0.5]"), ("1", "quadratic[noise=2.0]")):
        page.select_option("#setting", value)
        for plot in ("plot-curves", "plot-steps"):
            assert page.text_content(f"#{plot}-said").startswith(f"On {problem}. The mean over seeds"), plot
        assert "Lowest at the end: " in page.text_content("#plot-curves-said") and len(curves(page)) == 4
    page.select_option("#metric", "f1")
    assert "No run here has f1." in page.text_content("#plot-curves-said") and curves(page) == []
    page.select_option("#setting", "0")
    assert len(curves(page)) == 4 and looked.said == []


CONTRAST = """() => {
    const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
    const linear = (v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
    const light = (c) => { const [r, g, b] = rgb(c).map(linear); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const under = (e) => {
        for (; e; e = e.parentElement) {
            const c = getComputedStyle(e).backgroundColor, v = rgb(c);
            if (v.length < 4 || v[3] > 0) return c;
        }
        return "rgb(255, 255, 255)";
    };
    const found = [], without = ["SCRIPT", "NOSCRIPT", "OPTION", "STYLE"];
    for (const e of document.querySelectorAll("body *")) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || !e.getClientRects().length || without.includes(e.tagName) || e.closest(".bars, .skip")) continue;
        const s = getComputedStyle(e), text = e instanceof SVGElement ? s.fill : s.color;
        const [low, high] = [light(text), light(under(e))].sort((a, b) => a - b);
        found.push([(high + 0.05) / (low + 0.05), e.tagName, e.textContent.trim().slice(0, 40)]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_texts_and_curves_have_contrast_and_nothing_is_wider_than_a_phone(scheme, file, open_page):
    page = drawn(open_page(file, viewport={"width": 390, "height": 844}, color_scheme=scheme))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    texts = page.evaluate(CONTRAST)
    assert len(texts) > 200 and min(texts)[0] >= 4.5, sorted(texts)[:5]
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    paper = [int(part) / 255 for part in re.findall(r"\d+", before)[:3]]
    for colour in page.evaluate("document.getElementById('plot-curves').data.map((one) => one.line.color)"):
        own = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        low, high = sorted(map(luminance, (own, paper)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour
    other = {"light": "dark", "dark": "light"}[scheme]
    page.select_option("#theme", other)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.evaluate("document.getElementById('plot-curves')._fullLayout.paper_bgcolor") != before


def luminance(colour):
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_without_scripts_the_tables_of_all_runs_and_the_settings_are_there(file, open_page):
    page = open_page(file, java_script_enabled=False).page
    assert page.locator(".run table").count() >= 4 and page.locator(".run table").last.is_visible()
    assert page.locator("#settings table").first.is_visible() and not page.locator(".plot").first.is_visible()
    assert page.locator("main > noscript p").first.is_visible()
