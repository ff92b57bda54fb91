"""Messages that share the server's line: a schedule by hand, and what must hold of any."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualdelay as dd
from dualdelay.analysis.report.reproduce import command
from dualdelay.simulation import FixedSpeeds, Link, SharedLink, TruncatedNormalSpeeds
from dualdelay.storage.folder import Folder
from helpers import heterogeneous
from own import refused

BYTES = 8  # of the one float64 that these problems train


def simulated(method: Any, workers: int, speeds: Any, link: Link, **more: Any) -> dd.Run:
    return dd.simulate(method, heterogeneous(workers), dd.SimulatedFleet(speeds, link=link), **more)


def test_a_schedule_of_three_workers_by_hand() -> None:
    """Eight bytes take one second on the server's line, half a second of latency each way, and the server 0.25 s.

    The models of workers 0, 1, 2 leave at 1, 2, 3 and are there at 1.5, 2.5, 3.5. Worker 0 computes for 1 s, is at the line
    at 1.5 + 1 + 0.5 = 3, through it at 4, and the server is done at 4.25; worker 1 (2 s) is there at 5 and done at 6.25;
    worker 2 (0.25 s) is there at 4.25 and done at 5.5. So the order is 0, 2, 1. Worker 0's next model leaves at 4.25 and is
    there at 5.75; it is at the line at 7.25, behind nobody, and done at 8.5.
    """
    link = SharedLink(latency=0.5, server_bandwidth=BYTES, service=0.25)
    run = simulated(dd.VanillaASGD(0.1), 3, FixedSpeeds([1.0, 2.0, 0.25]), link, updates=4)
    line = max(4.25, 4.0) + 1  # worker 2 reaches the line when it is free
    first = [(4.25, 0), (line + 0.25, 2)]
    one = max(5.0, line) + 1 + 0.25  # worker 1 reaches it at 5.0, while worker 2's message is on it until 5.25
    first.append((one, 1))
    assert list(zip(run.trace.time.tolist(), run.trace.worker.tolist(), strict=True))[:3] == first
    # worker 2's next model leaves at 5.5, is there at 7.0 and computed at 7.25, at the line at 7.75; worker 0's is at 7.25
    assert (run.trace.time[3], run.trace.worker[3]) == (7.25 + 1 + 0.25, 0)


def test_models_sent_at_once_leave_one_after_the_other_and_a_worker_that_goes_on_needs_none() -> None:
    link = SharedLink(server_bandwidth=BYTES)
    run = simulated(dd.SyncSGD(0.1), 3, FixedSpeeds([1.0] * 3), link, updates=2)
    assert run.trace.time.tolist() == [3.0, 4.0, 5.0, 8.0, 9.0, 10.0]  # models at 1, 2, 3; messages back behind one another


class Again(dd.VanillaASGD):
    """Workers go on at the model that they have."""

    def step(self, s: Any, a: Any) -> Any:
        super().step(s, a)
        return [dd.again(a.worker)]


def test_an_order_without_bytes_does_not_queue_behind_models() -> None:
    run = simulated(Again(0.1), 2, FixedSpeeds([1.0, 100.0]), SharedLink(server_bandwidth=BYTES), updates=3)
    assert run.trace.time.tolist() == [3.0, 5.0, 7.0]  # 1 s for the model once, then 1 s of work and 1 s on the line


METHODS = [
    dd.VanillaASGD(0.05),
    dd.DuDe(0.05, wait_for=2),
    dd.FedBuff(0.05, buffer=3),
    dd.SyncSGD(0.05),
    dd.algorithms.ALGORITHMS["rennala"](lr=0.05),  # cancels and goes on
    dd.algorithms.ALGORITHMS["ringmaster"](lr=0.05),
    dd.algorithms.ALGORITHMS["quafl"](lr=0.05),  # polls
    dd.algorithms.ALGORITHMS["favano"](lr=0.05),  # wakes
]
UNEVEN = TruncatedNormalSpeeds(6, std=2.0, seed=3)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("own", [Link(), Link(0.3, 40.0)], ids=["no time", "slow"])
def test_a_line_without_limits_gives_the_bits_of_workers_by_themselves(method: Any, own: Link) -> None:
    shared = SharedLink(own.latency, own.bandwidth)
    runs = [simulated(method, 6, UNEVEN, link, updates=60) for link in (own, shared)]
    assert runs[0].trace.time.tolist() == runs[1].trace.time.tolist()
    assert runs[0].trace.worker.tolist() == runs[1].trace.worker.tolist()
    assert runs[0].trace.fingerprint.tolist() == runs[1].trace.fingerprint.tolist()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("link", [SharedLink(0.1, 30.0, 20.0), SharedLink(0.0, None, 4.0, 2, 0.3), SharedLink(service=1.0)])
def test_no_line_and_no_server_is_ever_busier_than_always(method: Any, link: SharedLink) -> None:
    run = simulated(method, 6, UNEVEN, link, updates=60)
    times = run.trace.time
    assert (np.diff(times) >= 0).all()
    counts = np.arange(1, len(times) + 1)
    assert (counts * link.server_seconds(BYTES) <= times * (1 + 1e-12)).all()  # the line to the server
    assert (counts * link.service / link.shards <= times * (1 + 1e-12)).all()


@pytest.mark.parametrize("shards", [1, 4, 16])
def test_workers_that_saturate_the_line_make_as_many_updates_as_it_has_room_for(shards: int) -> None:
    """Bandwidth over bytes is 1 a second for each shard; 200 workers of one second would make 200 alone."""
    link = SharedLink(server_bandwidth=BYTES, shards=shards)
    run = simulated(dd.VanillaASGD(0.01), 200, FixedSpeeds([1.0] * 200), link, updates=1000)
    times = run.trace.time
    assert 800 / (times[999] - times[199]) == pytest.approx(shards, rel=1e-9)


def test_a_busy_server_makes_as_many_updates_as_it_can_and_shards_share_its_work() -> None:
    for shards in (1, 4):
        link = SharedLink(service=0.5, shards=shards)
        times = simulated(dd.VanillaASGD(0.01), 50, FixedSpeeds([1.0] * 50), link, updates=400).trace.time
        assert 200 / (times[399] - times[199]) == pytest.approx(shards / 0.5, rel=1e-9)


def test_a_short_vector_stands_for_a_long_one() -> None:
    long = SharedLink(0.1, 1e6 * 30.0, 1e6 * 20.0, scale=1e6)
    runs = [simulated(dd.DuDe(0.05), 6, UNEVEN, link, updates=60) for link in (SharedLink(0.1, 30.0, 20.0), long)]
    assert runs[1].trace.time.tolist() == pytest.approx(runs[0].trace.time.tolist(), rel=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_run_that_was_stopped_goes_on_with_the_queue_as_it_was(method: Any, tmp_path: Path) -> None:
    link = SharedLink(0.1, 30.0, 10.0, 2, 0.2)
    whole = simulated(method, 6, UNEVEN, link, updates=60)
    simulated(method, 6, UNEVEN, link, updates=23, folder=tmp_path / "run", checkpoint_every=5)
    resumed = dd.resume(tmp_path / "run", updates=60)
    assert resumed.trace.time.tolist() == whole.trace.time.tolist()
    assert resumed.trace.fingerprint.tolist() == whole.trace.fingerprint.tolist()
    assert dd.replay(tmp_path / "run").same_bits


def test_a_report_says_that_no_command_has_such_a_link(tmp_path: Path) -> None:
    simulated(
        dd.VanillaASGD(0.1), 2, FixedSpeeds([1.0, 2.0]), SharedLink(server_bandwidth=8.0), updates=3, folder=tmp_path / "r"
    )
    line, unsaid = command(Folder(tmp_path / "r").record())
    assert "the link, which all workers share" in unsaid and "bandwidth" not in line


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"server_bandwidth": 0}, "server_bandwidth is 0; expected bytes per second"),
        ({"server_bandwidth": "fast"}, "server_bandwidth"),
        ({"server_bandwidth": math.nan}, "server_bandwidth"),
        ({"server_bandwidth": True}, "server_bandwidth"),
        ({"shards": 0}, "shards"),
        ({"shards": 1.5}, "shards"),
        ({"service": -1.0}, "service"),
        ({"scale": 0.0}, "scale"),
        ({"latency": -1.0}, "latency"),
        ({"bandwidth": 0.0}, "bandwidth"),
    ],
)
def test_lines_that_cannot_be_are_refused(given: dict[str, Any], error: str) -> None:
    refused(lambda: SharedLink(**given), error)
