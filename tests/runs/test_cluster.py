"""Runs of a sweep on a cluster, here of several raylets on this machine: the same bits, whatever happens to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from torch import Tensor

import dualdelay as dd
from dualdelay.runs import spread
from dualdelay.workers import ray_tasks
from own import FILES, content, differences

pytestmark = pytest.mark.real

NODE = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 100 << 20}
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}
GRID: dict[str, list[Any]] = {"algorithm": [dd.DuDe(0.05), dd.UniformASGD(0.05)], "lr": [0.02, 0.05], "seed": [0, 1]}
PACE = dd.FixedSpeeds([1.0, 2.0, 3.5])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors, where the driver is, and two machines with one each; the other tests' Ray is ended."""
    import ray
    from ray.cluster_utils import Cluster

    from dualdelay.workers.ray_fleet import staying_here

    ray.shutdown()
    for module in (sys.modules[__name__], sys.modules["own"]):
        cloudpickle.register_pickle_by_value(module)
    with staying_here(True):
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "_system_config": SOON})
        try:
            for _ in range(2):
                cluster.add_node(**NODE, num_cpus=1)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def pid(model: object) -> float:
    return float(os.getpid())


class Eventful(dd.Quadratic):
    """A problem to whose gradients something happens."""

    def __init__(self, happens: Callable[[int, int], None] | None = None, **settings: Any) -> None:
        super().__init__(**{"centers": [[0.0, 1.0], [6.0, -2.0], [1.0, 1.0]], "noise": 0.3, **settings})
        self.happens = happens

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        if self.happens is not None:
            self.happens(self.seed, draw)
        return super().gradient(x, worker, draw)

    def reseeded(self, seed: int) -> Eventful:
        return Eventful(self.happens, **{**self.settings, "seed": seed})


def swept(problem: dd.Problem | None = None, folder: Path | None = None, grid: Any = GRID, **options: Any) -> dd.Sweep:
    options = {"evaluation": dd.Evaluation(every=10, metrics={"pid": pid}), "checkpoint_every": 5, **options}
    return dd.sweep(grid, problem or Eventful(), PACE, updates=30, folder=folder, **options)


def same_bits(one: dd.Sweep, other: dd.Sweep) -> list[str]:
    """What is not the same to the bit in the runs of two sweeps, but for who computed them."""
    assert one.points == other.points
    wrong: list[str] = []
    for run, same in zip(one.runs, other.runs, strict=True):
        if run is None or same is None:
            wrong += [] if run is same else [f"{run} and {same}"]
        else:
            wrong += [name for name in differences(run, same) if "pid" not in name and name not in FILES]
    return wrong


def when(happens: Callable[[], Any]) -> Any:
    """What a function gives once that is something."""
    until = time.monotonic() + 90
    while not (found := happens()):
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.05)
    return found


# --- what is refused, before any cluster is there ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpus": -1.0}, "cpus is -1.0; expected zero or more processors for each run"),
        ({"gpus": float("nan")}, "gpus is nan; expected"),
        ({"cpus": 0}, "a run claims nothing of the cluster, so that all would begin at once; give cpus or gpus"),
        ({"address": 5}, "address is 5; expected a text"),
        ({"address": ""}, "address is ''; expected host and port"),
        ({"address": "nonsense"}, "address is 'nonsense'; expected host and port, such as '10.0.0.5:6379', or 'auto'"),
        ({"host": None}, "host is None; expected a text"),
        ({"resources": {"large": "much"}}, "resources is {'large': 'much'}; expected how much of what by name"),
        ({"patience": -1}, "patience is -1; expected finite seconds, zero or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(dd.BadInput, match=words):
        dd.Cluster(**settings)


def test_what_is_no_cluster_and_functions_of_this_process_are_refused() -> None:
    with pytest.raises(dd.BadInput, match=r"on is '10\.0\.0\.5:6379'; expected a dd\.Cluster, such as"):
        swept(on="10.0.0.5:6379")
    with pytest.raises(dd.BadInput, match="watch and log are functions of this process"):
        swept(on=dd.Cluster(), watch=[print])


def test_strangers_and_addresses_where_nobody_is_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ray

    ray.shutdown()
    with pytest.raises(dd.BadInput, match=r"no cluster answers at 127\.0\.0\.1:9 .*start the cluster there first"):
        swept(on=dd.Cluster("127.0.0.1:9"), folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # what "auto" finds
    with pytest.raises(dd.BadInput, match=r"no cluster answers at 127\.0\.0\.1:9"):
        swept(on=dd.Cluster("auto"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(dd.BadInput, match=r"will not use Ray at 192\.0\.2\.1:6379.*insecure=True"):
        swept(on=dd.Cluster("192.0.2.1:6379"))


@pytest.mark.parametrize("ours", [True, False])
def test_only_tasks_that_do_not_end_are_ended_by_force_and_only_in_a_ray_that_stays(ours: bool) -> None:
    """To force one that has just ended makes Ray abort this process: its answer completes what is no more pending."""
    forced = []

    class Ray:
        def cancel(self, call: str, force: bool = False) -> None:
            forced.extend([call] * force)

        def wait(self, calls: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
            return [call for call in calls if call != "hangs"], [call for call in calls if call == "hangs"]

    tasks = ray_tasks.RayTasks.__new__(ray_tasks.RayTasks)
    tasks._ray, tasks._ours, tasks._calls = Ray(), ours, {"ended": 0, "hangs": 1, "cancelled": 2}
    tasks._stop()
    assert forced == ([] if ours else ["hangs"])


def test_of_a_cluster_that_turns_us_away_it_is_said_what_it_may_want(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    ray.shutdown()

    def refuse(*_: object, **options: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster.")

    monkeypatch.setattr(ray, "init", refuse)
    for name in ("RAY_AUTH_MODE", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        address = f"127.0.0.1:{somebody.getsockname()[1]}"
        with pytest.raises(
            dd.BadInput, match=f"Ray at {address} could not be .*cluster; if it asks for a token .*RAY_AUTH_TOKEN"
        ):
            swept(on=dd.Cluster(address))
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", 32 * "ab")
        with pytest.raises(dd.BadInput, match=r"cluster; if .* RAY_AUTH_TOKEN here is not that of the cluster"):
            swept(on=dd.Cluster(address))


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(dd.BadInput, match="runs on a cluster need Ray, which is not installed: pip install"):
        swept(on=dd.Cluster(), folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_machine_that_does_not_see_the_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "_SEEN", 0.0)
    (tmp_path / ".cluster").write_text("of an earlier sweep")
    with pytest.raises(spread.NotShared, match=r"does not see .* as this one does.*a network file system, or leave it out"):
        spread._require_shared(tmp_path, "of this one")
    (tmp_path / ".cluster").write_text("of this one")
    spread._require_shared(tmp_path, "of this one")


# --- on a cluster ---


def test_no_bit_depends_on_the_cluster_and_an_error_is_its_runs_own(cluster: Any, tmp_path: Path) -> None:
    def happens(seed: int, draw: int) -> None:
        if seed == 1 and draw == 3:
            raise ValueError("seed 1 is bad")

    here = swept(Eventful(happens), compute=dd.Compute(cores=1))
    on = dd.Cluster(cluster.address)
    told: list[tuple[float, str]] = []
    watch = dd.Reporting(report=lambda share, text: told.append((share, text)), progress=False)
    there = swept(Eventful(happens), on=on, watch=watch)
    assert set(here["pid"]) == {os.getpid()} and os.getpid() not in set(there["pid"])
    assert same_bits(here, there) == []
    assert here.failed == there.failed and len(there.failed) == 4
    assert [type(run.problem) for run in there.runs if run] == 4 * [Eventful]
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    assert any("of 8 runs, " in text for _, text in told)
    kept = swept(on=on, folder=tmp_path)
    assert same_bits(kept, swept()) == [] and kept.failed == {}
    before = content(tmp_path)
    assert ".cluster" not in before
    assert same_bits(swept(folder=tmp_path), kept) == []  # the same call, on this machine: nothing is computed again
    assert set(swept(on=dd.Cluster("127.0.0.1:9"), folder=tmp_path)["pid"]) == set(kept["pid"])  # nor is Ray needed
    assert content(tmp_path) == before


def test_a_folder_that_the_machines_do_not_see_ends_the_sweep(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "write", lambda path, data: None)  # what this machine wrote is not to be seen there
    with pytest.raises(dd.BadInput, match=r"does not see .* as this one does: it has no \.cluster there"):
        swept(on=dd.Cluster(cluster.address), folder=tmp_path / "runs")


def test_what_no_machine_has_is_waited_for_only_so_long(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    why = r"it claims 2 CPU, and no machine of the cluster has that \(the most is 1\)"
    with pytest.raises(dd.RunFailed, match=rf"no run could begin for 1 s: {why}. Claim less"):
        swept(on=dd.Cluster(cluster.address, cpus=2, patience=1.0))
    with pytest.raises(dd.RunFailed, match=r"no run could begin for 4 s: it claims 1 large, and no machine"):
        swept(on=dd.Cluster(cluster.address, resources={"large": 1}, patience=4.0))
    assert "it claims 1 large, and no machine of the cluster has that (the most is 0); waiting 4 s." in caplog.text


def test_what_cannot_be_sent_or_read_there_says_so(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    import types

    lock = threading.Lock()
    with pytest.raises(dd.BadInput, match=r"the runs cannot be sent to the cluster: .*lock"):
        swept(Eventful(lambda seed, draw: lock.release()), on=dd.Cluster(cluster.address))
    module = types.ModuleType("only_here")
    exec("def happens(seed, draw): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(
        dd.BadInput, match=r"a machine of the cluster cannot compute a run: .*only_here.*Every machine needs"
    ):
        swept(Eventful(module.happens), on=dd.Cluster(cluster.address))


def test_a_process_that_dies_costs_its_run_alone(cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = os.getpid()

    def happens(seed: int, draw: int) -> None:
        mark = tmp_path / "died"
        if os.getpid() != driver and draw == 5 and (seed == 1 or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    grid = {"algorithm": [dd.DuDe(0.05)], "lr": [0.02, 0.05], "seed": [0, 1]}
    table = swept(Eventful(happens), grid=grid, on=dd.Cluster(cluster.address))
    here = swept(grid=grid)
    assert "a run of the sweep begins again elsewhere, or goes on from its checkpoint: its process died" in caplog.text
    assert set(table.failed) == {1, 3} and all("for the 3. time" in why for why in table.failed.values())
    alive = [k for k in range(4) if k not in table.failed]
    assert [differences(table.runs[k], here.runs[k]) for k in alive] == 2 * [["metric pid"]]


def test_a_machine_that_is_lost_costs_what_is_under_way_there(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = cluster.add_node(**NODE, num_cpus=1, resources={"extra": 1})
    gone, runs = tmp_path / "gone", tmp_path / "runs"

    def happens(seed: int, draw: int) -> None:
        time.sleep(0.0 if gone.exists() else 0.2)

    def lose(share: float, text: str) -> None:
        ready = not gone.exists() and len({path.parent.parent for path in runs.glob("*/checkpoints/*")}) == 3
        if ready:
            cluster.remove_node(extra, allow_graceful=False)
            gone.touch()

    watch = dd.Reporting(report=lose, progress=False)
    table = swept(Eventful(happens), on=dd.Cluster(cluster.address), folder=runs, watch=watch)
    assert gone.exists() and table.failed == {}
    assert caplog.text.count("begins again elsewhere, or goes on from its checkpoint: its machine was lost") == 1
    assert same_bits(table, swept()) == []
    resumed = [run.trace for run in table.runs if run is not None and len(set(run.metrics["pid"])) == 2]
    assert len(resumed) <= 1  # the one that was lost goes on where it was saved, if an evaluation was


SCRIPT = """
import os, sys, time
import dualdelay as dd

class Mine(dd.Quadratic):
    def gradient(self, x, worker, draw):
        time.sleep(0.0 if os.path.exists(os.path.join(HERE, "go on")) else 0.2)
        return super().gradient(x, worker, draw)

HERE = os.getcwd()
on = None if sys.argv[1] == "here" else dd.Cluster(sys.argv[1])
table = dd.compare(
    [dd.DuDe(lr=0.05), dd.DuDe(lr=0.02)], Mine([[0.0], [1.0], [4.0]], noise=0.3), dd.FixedSpeeds([1.0, 2.0, 3.5]),
    seeds=[0, 1], updates=30, checkpoint_every=2, folder=sys.argv[2], on=on,
)
print([run.x.tolist() for run in table.runs], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL])  # SIGINT: test_processes.py
def test_the_driver_of_a_cluster_stopped_by_a_signal_goes_on_with_the_same_call(
    number: signal.Signals, cluster: Any, tmp_path: Path
) -> None:
    def script(address: str, folder: str) -> subprocess.Popen[str]:
        command = [sys.executable, "mine.py", address, folder]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    (tmp_path / "mine.py").write_text(SCRIPT)
    process, runs = script(cluster.address, "runs"), tmp_path / "runs"
    when(lambda: len({path.parent.parent for path in runs.glob("*/checkpoints/*")}) == 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=90)
    assert number == signal.SIGKILL or "the runs were saved in runs; the same call goes on where they are" in errors
    assert not list(runs.glob("*/result.json"))
    (tmp_path / "go on").touch()
    first = {path.name: path.stat().st_ino for path in runs.iterdir() if path.is_dir()}
    again, alone = (script(*where).communicate(timeout=90) for where in ((cluster.address, "runs"), ("here", "whole")))
    assert again[0] == alone[0] != "", again[1]
    assert first.items() <= {path.name: path.stat().st_ino for path in runs.iterdir()}.items()  # those went on
    assert (runs / "comparison.parquet").exists() and not (runs / ".cluster").exists()


@pytest.mark.slow
def test_ray_is_started_here_if_no_address_is_given() -> None:
    import ray

    ray.shutdown()
    for module in (sys.modules[__name__], sys.modules["own"]):
        cloudpickle.register_pickle_by_value(module)
    grid = {"algorithm": [dd.DuDe(0.05)], "seed": [0, 1]}
    batch = dd.Compute(batch=True)  # runs that share a schedule are one task; those of two seeds do not
    assert same_bits(swept(grid=grid, on=dd.Cluster(), compute=batch), swept(grid=grid)) == []
    assert not ray.is_initialized()


def test_runs_that_share_a_schedule_are_one_task_where_gradients_are_taken_together() -> None:
    def units(compute: dd.Compute, **server: Any) -> list[list[int]]:
        points, _ = spread_points()
        options = spread.Options(30, None, dd.Saving(), dd.Evaluation(), compute, dd.Server(**server))
        return spread.Spread(points, options, spread.Ends(points, None), range(8), lambda *_: None)._units("cpu")

    def spread_points() -> Any:
        from dualdelay.runs.sweep import grid_points

        return grid_points(GRID, Eventful(), PACE, None, 0)

    assert units(dd.Compute()) == [[k] for k in range(8)]
    assert sorted(units(dd.Compute(batch=True))) == [[0, 2], [1, 3], [4, 6], [5, 7]]  # other steps alone
    assert units(dd.Compute(batch=True), optimizer="Adam") == [[k] for k in range(8)]


def test_the_board_reads_out_what_it_was_told_once() -> None:
    board = ray_tasks._Board()
    board.tell(1, 0.0)
    board.tell(1, 0.5)
    assert [board.read(), board.read()] == [{1: 0.5}, {}]
    told: list[Any] = []
    tell = SimpleNamespace(tell=SimpleNamespace(remote=lambda *what: told.append(what)))
    assert ray_tasks._make(lambda number, share: [share(0.5), b"done"][1], 3, tell) == b"done"
    assert told == [(3, 0.0)]  # not again in the same second
