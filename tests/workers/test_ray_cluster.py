"""Several machines, as several raylets on this one: nodes die, come late, and strangers are kept out."""

import functools
import random
import threading
import time

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import dualdelay as dd
from dualdelay.workers.ray_fleet import staying_here
from flat import simulate, train
from helpers import audit
from real import Real, Until, check, kill, kinds

PAIR = [[0.0, 1.0], [6.0, -2.0]]
NODE = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 100 << 20}
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}


@pytest.fixture
def cluster():
    """A head where the server runs, and no workers yet; whatever Ray the other tests use is put aside."""
    import real

    ray.shutdown()
    ray.cloudpickle.register_pickle_by_value(real)
    with staying_here(True):
        made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "_system_config": SOON})
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def test_an_address_where_nobody_is_says_so():
    ray.shutdown()
    with pytest.raises(dd.BadInput, match=r"no cluster answers at 127\.0\.0\.1:9 .*start the cluster there first"):
        dd.train(dd.DuDe(lr=0.1), dd.Quadratic([[0.0]]), dd.RayFleet(address="127.0.0.1:9"), updates=1)


def test_no_cluster_on_this_machine_says_so(monkeypatch):
    """Whatever else runs on the machine of the test: Ray finds none."""
    ray.shutdown()
    monkeypatch.setattr("ray._private.services._cached_find_gcs_addresses", functools.lru_cache(set))
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    with pytest.raises(dd.BadInput, match="Ray at auto could not be started or joined"):
        dd.train(dd.DuDe(lr=0.1), dd.Quadratic([[0.0]]), dd.RayFleet(address="auto"), updates=1)


def node(cluster, cpus, **resources):
    return cluster.add_node(**NODE, num_cpus=cpus, resources=resources)


def test_a_node_dies_and_its_workers_come_back_elsewhere(cluster, tmp_path):
    nodes = [node(cluster, 1), node(cluster, 2)]
    problem, fleet = Real(PAIR, pause=0.02), dd.RayFleet(address=cluster.address)
    removed = []

    def remove(state, a):
        if a.worker == 0 and a.job.draw == 15 and not removed:
            lost = next(n for n in nodes if n.node_id == fleet.control.places[0][0])
            removed.extend(worker for worker, (where, _) in fleet.control.places.items() if where == lost.node_id)
            cluster.remove_node(lost, allow_graceful=False)
            if lost is nodes[1]:
                node(cluster, 2)
        return bool(removed) and a.worker == 0 and a.job.draw > 30

    algorithm = dd.DuDe(lr=0.05, memory="workers")
    run = train(algorithm, problem, fleet, folder=tmp_path / "run", **Until(remove))
    assert removed and {e["worker"] for e in run.trace.events if e["kind"] == "crashed"} == set(removed)
    assert len({where for where, _ in fleet.control.places.values()}) >= 1 and run.state.n == 2
    check(run, tmp_path / "run", problem)


def test_a_worker_joins_when_the_machine_with_its_data_appears(cluster, tmp_path):
    node(cluster, 1, here=1)
    problem = Real(PAIR, pause=0.01, noise=0.0)
    fleet = dd.RayFleet(
        address=cluster.address, resources=[{"here": 1}, {"there": 1}], faults=dd.FaultPolicy(patience=12.0)
    )
    added = []

    def add(state, a):
        if a.worker == 0 and a.job.draw == 40 and not added:
            added.append(node(cluster, 1, there=1))
        return a.worker == 1 and a.job.draw > 60

    run = train(dd.DuDe(lr=0.1), problem, fleet, folder=tmp_path / "run", **Until(add))
    assert kinds(run, 1) == ["left", "joined"]
    assert "has not started in 12 s" in next(event["text"] for event in run.trace.events if event["worker"] == 1)
    assert torch.allclose(run.x, torch.tensor([3.0, -0.5], dtype=torch.float64), atol=0.05)
    check(run, tmp_path / "run", problem)


def test_training_survives_chaos(cluster, tmp_path):
    """Workers and a node are killed at random moments, by a seed; then audit, replay, and the accuracy of a calm run.

    While a worker is down its last gradient counts on, for as long as the machine takes to start another process, and moves
    the model astray: when everybody is back, it recovers.
    """
    nodes = [node(cluster, 4), node(cluster, 4)]
    dice = random.Random(5)
    problem = dd.Digits(workers=4, alpha=0.5, seed=1)
    fleet = dd.RayFleet(address=cluster.address, faults=dd.FaultPolicy(restarts=100, resend=1.0))
    stop, kills = threading.Event(), []
    since = [0] * 4  # what each worker has sent since the last kill

    def havoc():
        began, node_lost = time.monotonic(), False
        while not stop.wait(dice.uniform(1.0, 3.0)) and time.monotonic() - began < 8:
            if not node_lost and time.monotonic() - began > 4:
                node_lost = True
                cluster.remove_node(nodes[0], allow_graceful=False)
                kills.append("node")
                continue
            worker = dice.randrange(4)
            try:
                kill(fleet, worker)
                kills.append(worker)
            except (KeyError, ProcessLookupError):
                pass  # it is not up at the moment

    thread = threading.Thread(target=havoc)

    def count(state, a):
        if thread.ident is None:
            thread.start()
        since[a.worker] += not thread.is_alive()

    def recovered(model):
        """Everybody is back and has sent so much that no old gradient still counts, and the model is a good one again."""
        return float(min(since) >= 50 and problem._test_data.accuracy(model) > 0.92)

    algorithm = dd.DuDe(lr=0.1, memory="workers")
    stop_when = dd.EarlyStop("recovered", target=1.0, larger_is_better=True)
    options = {"watch": [count], "metrics": {"recovered": recovered}, "stop": stop_when, "evaluate_seconds": 0.5}
    try:
        run = train(algorithm, problem, fleet, folder=tmp_path / "run", time=120.0, **options)
    finally:
        stop.set()
        thread.join()
    assert run.ended == "stop" and min(since) >= 50, since
    assert "node" in kills and len(kills) >= 2, kills
    assert kinds(run).count("crashed") >= 2 and run.state.n == 4 and run.audit <= audit(run)
    again = dd.replay(tmp_path / "run")
    assert torch.equal(again.x, run.x)
    until = {"updates": run.version, "evaluate_every": run.version}
    calm = simulate(algorithm, problem, dd.TruncatedNormalSpeeds(4, 1.0, seed=0), **until)
    assert run.metrics.accuracy[-1] > calm.metrics.accuracy[-1] - 0.1
