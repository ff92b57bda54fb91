"""The picture of a report: python docs/pictures/report.py runs a comparison, writes its page and takes a picture of it.

It needs playwright and a chromium, as the tests of the report do.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import dualdelay as dd

PLACE = Path(__file__).parent / "report.png"


def report(folder: Path) -> Path:
    """The page of a small comparison."""
    methods = [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05), dd.SyncSGD(lr=1.0)]
    problem, speeds = dd.Digits(workers=6, alpha=0.1), dd.TruncatedNormalSpeeds(6, std=5.0)
    evaluation = dd.Evaluation(seconds=10.0)
    table = dd.compare(methods, problem, speeds, seeds=[0, 1, 2], time=200.0, evaluation=evaluation)
    return table.report(folder / "report.html")


def photograph(page: Path, place: Path) -> None:
    """Take a picture of two parts of a page, in so few colours that it is small."""
    browser = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        view = chromium.new_page(viewport={"width": 1280, "height": 1000})
        view.goto(page.as_uri())
        view.wait_for_selector("#plot-curves .main-svg")
        curves = view.locator("#plot-curves").bounding_box()
        assert curves is not None
        shots = [view.screenshot(clip={"x": 0, "y": 0, "width": 1280, "height": curves["y"] + curves["height"]})]
        view.set_viewport_size({"width": 1280, "height": 3000})
        view.locator("#inside").scroll_into_view_if_needed()  # the other pictures are drawn when they are seen
        view.wait_for_selector("#plot-jobs .main-svg")
        view.wait_for_timeout(500)
        inside, jobs = (view.locator(name).bounding_box() for name in ("#inside", "#plot-jobs"))
        assert inside is not None and jobs is not None
        height = jobs["y"] + jobs["height"] - inside["y"]
        shots.append(view.screenshot(clip={"x": 0, "y": inside["y"], "width": 1280, "height": height}))
        chromium.close()
    parts = [Image.open(io.BytesIO(shot)).convert("RGB") for shot in shots]
    both = Image.new("RGB", (1280, sum(part.height for part in parts)))
    for k, part in enumerate(parts):
        both.paste(part, (0, sum(other.height for other in parts[:k])))
    both.quantize(96).save(place, optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        photograph(report(Path(folder)), PLACE)
