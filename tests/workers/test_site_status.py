"""The status page of a server with sites, as data and in a real browser."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from dualdelay.workers.sites import keys
from dualdelay.workers.sites.books import SiteBook
from dualdelay.workers.sites.hub import Hub
from dualdelay.workers.sites.serving import Served
from dualdelay.workers.sites.status import StatusBoard

HOSTILE = "<img src=x onerror='window.hit=1'>"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StatusBoard, str, Hub]]:
    """A board of a run with four sites: one at work, one away, one refused and one that has not come."""
    folder = tmp_path_factory.mktemp("status")
    names = [f"hospital-{letter}" for letter in "abcd"]
    for name in names:
        keys.enroll(name, folder / "sites.txt", folder / f"{name}.key")
    hub, board = Hub(keys.Roster(folder / "sites.txt"), names, 1000, {}), StatusBoard("a token of our own")
    now = time.monotonic()
    first, second, third, _ = hub.sites
    first.session, first.seen, first.doing, first.since, first.address = "s", now, "job 12 at version 40", now, "192.0.2.7"
    first.waiting = asyncio.Event()
    first.jobs, first.loss, first.bytes_up, first.bytes_down = 12, 0.52, 1_234_567, 2_345_678
    second.session, second.seen = "s", now - 7200
    third.session, third.seen, third.refused = "s", now, f"its data are others {HOSTILE}"
    board.begin("DuDe at 4 sites", lambda: hub.sites)
    hub.page = board.page
    for k in range(30):
        signs = {"time": float(k), "updates_per_second": 12.5, "loss": 0.5, "tau_max": 7.0, "faults/crashed": 2.0}
        board(10 * k, {**signs, "worker/0/delay": 3.0, "worker/1/crashes": 2.0})
        board(10 * k, {"objective": 2.0 / (1 + k)})
    served = Served(hub, "127.0.0.1:0", None, None)
    yield board, served.url, hub
    served.close()


def test_who_has_the_token_reads_how_the_run_stands(board: tuple[StatusBoard, str, Hub]) -> None:
    _, url, _ = board
    pool = urllib3.PoolManager(retries=False)
    page = pool.request("GET", f"{url}/")
    assert page.status == 200 and b"hospital" not in page.data, "the page itself holds nothing"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for token in ("", "another", "a token of our ow"):
        refused = pool.request("GET", f"{url}/status.json", headers={"authorization": f"Bearer {token}"})
        assert (refused.status, refused.data) == (403, b"the token is not the one of this server.")
    good = {"authorization": "Bearer a token of our own"}
    status = json.loads(pool.request("GET", f"{url}/status.json", headers=good).data)
    assert status["run"]["facts"]["updates"] == "290" and status["run"]["facts"]["faults"] == "2 crashed"
    assert [site["state"] for site in status["sites"]] == ["there", "away", "refused", "not come"]
    first = status["sites"][0]
    assert (first["delay"], first["jobs"], first["loss"], first["up"], first["address"]) == (
        3.0,
        12,
        0.52,
        1_234_567,
        "192.0.2.7",
    )
    assert first["doing"].startswith("job 12 at version 40, for ") and status["sites"][1]["crashes"] == 2.0
    assert len(status["curve"]) == 30 and status["curve"][-1][1] == pytest.approx(2 / 30)
    assert pool.request("POST", f"{url}/status.json", headers=good).status == 404, "it is read only"
    pool.clear()


def test_silence_and_an_objective_that_is_old_are_told() -> None:
    board, book = StatusBoard(), SiteBook("hospital-a", 0, session="s", seen=time.monotonic() - 12.5, doing="job 3")
    board.begin("DuDe", lambda: [book])
    board(10, {"time": 5.0, "updates_per_second": 1.0})
    board(10, {"objective": 0.5})
    assert board.status()["run"]["facts"]["objective"] == "0.5"
    board(90, {"time": 95.0, "updates_per_second": 1.0})
    status = board.status()
    assert status["run"]["facts"]["objective"] == "0.5, 90 s ago"
    assert status["sites"][0]["state"].startswith("silent for 1") and status["sites"][0]["doing"].startswith("job 3, for ")
    book.travelling = 10**6
    assert board.status()["sites"][0]["state"] == "there", "it is being sent something"


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    board = StatusBoard()
    for k in range(3000):
        board(k, {"time": float(k), "updates_per_second": 1.0})
        board(k, {"objective": float(k)})
    curve = board.status()["curve"]
    assert len(curve) <= 501 and curve[0] == (0.0, 0.0) and curve[-1] == (2999.0, 2999.0)
    assert len(StatusBoard().token) >= 32 and StatusBoard().token != StatusBoard().token


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_shows_it_live_wide_and_on_a_phone(
    board: tuple[StatusBoard, str, Hub], browser: Any, width: int, scheme: str, tmp_path: Path
) -> None:
    _, url, hub = board
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{url}/#a token of our own")
    rows = page.locator("#sites tr")
    rows.first.wait_for()
    text = page.inner_text("body")
    assert rows.count() == 4 and "DuDe at 4 sites" in text and "1.2 MB" in text and "2.0 h ago" in text
    assert page.locator("#curve polyline").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"
    assert HOSTILE in text and page.evaluate("window.hit === undefined")
    hub.sites[0].jobs += 1
    _until(lambda: f"{hub.sites[0].jobs}" in rows.first.inner_text())
    page.screenshot(path=str(tmp_path / "status.png"), full_page=True)
    assert said == []
    page.goto("about:blank")
    page.goto(f"{url}/")
    _until(lambda: "Put the token behind the address" in page.inner_text("#note"))
    page.close()


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)
