"""Several machines, as several raylets on this one: a node appears, another dies, and a cluster that is not there."""

import functools

import pytest
import ray
from ray.cluster_utils import Cluster

import dualdelay as dd
import real
from dualdelay.workers.ray_fleet import staying_here
from helpers import audit, check_replay, kinds

NODE = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 100 << 20}
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}


@pytest.fixture
def cluster():
    """A head where the server runs, and no machine for workers yet; the Ray of the other tests is ended."""
    ray.shutdown()
    ray.cloudpickle.register_pickle_by_value(real)
    with staying_here(True):
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "_system_config": SOON})
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_an_address_where_nobody_is_says_so():
    ray.shutdown()
    with pytest.raises(dd.BadInput, match=r"no cluster answers at 127\.0\.0\.1:9 .*start the cluster there first"):
        dd.train(dd.DuDe(lr=0.1), dd.Quadratic([[0.0]]), dd.RayFleet(address="127.0.0.1:9"), updates=1)


def test_no_cluster_on_this_machine_says_so(monkeypatch):
    """Whatever else runs on the machine of the test: Ray finds none."""
    ray.shutdown()
    monkeypatch.setattr("ray._private.services._cached_find_gcs_addresses", functools.lru_cache(set))
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    with pytest.raises(
        dd.BadInput, match="the address is 'auto', and no Ray runs on this machine; start the cluster first"
    ):
        dd.train(dd.DuDe(lr=0.1), dd.Quadratic([[0.0]]), dd.RayFleet(address="auto"), updates=1)


def test_a_worker_joins_when_its_machine_appears_and_comes_back_elsewhere_when_that_dies(cluster, tmp_path, caplog):
    """The machine dies together with the process of the other worker, so that for a moment no gradient is kept anywhere."""
    cluster.add_node(**NODE, num_cpus=1, resources={"here": 1})
    problem = real.Real([[0.0, 1.0], [6.0, -2.0]], {0: 0.02, 1: 0.02})
    fleet = dd.RayFleet(address=cluster.address, absent=[1], resources=[{"here": 1}, {"there": 1}])
    there, places, after = [], [], set()

    def be_patient_for(seconds):
        object.__setattr__(fleet.faults, "patience", seconds)  # while the run lasts, as no user can

    def add():
        there.append(cluster.add_node(**NODE, num_cpus=1, resources={"there": 1}))

    def direct(state, arrival):
        if (arrival.worker, arrival.job.draw) == (0, 3):
            be_patient_for(1.0)  # worker 0 has had the time that it needs
            fleet.control.join(1)
        elif not there and "has not started in 1 s" in caplog.text:
            be_patient_for(120.0)
            add()
        elif (arrival.worker, arrival.job.draw) == (1, 10):
            places.extend(fleet.control.places[worker] for worker in range(2))
            cluster.remove_node(there[0], allow_graceful=False)
            real.kill(fleet, 0)
            add()
        elif places:
            after.add(arrival.worker)
        return arrival.worker == 1 and arrival.job.draw > 20 and after == {0, 1}

    method = dd.DuDe(lr=0.05, memory="workers")
    run = dd.train(method, problem, fleet, folder=tmp_path / "run", **real.until(direct))
    assert run.ended == "stop" and run.state.n == 2
    mended = ("lost", "restored")
    assert [kind for kind in kinds(run, 0) if kind not in mended] == ["crashed"]
    assert [kind for kind in kinds(run, 1) if kind not in mended] == ["left", "joined", "left", "joined", "crashed"]
    assert "it claims 1 there, and no machine of the cluster has that (the most is 0); it may come later" in caplog.text
    nodes = [places[0][0], there[1].node_id]  # worker 0 has another process on its machine, worker 1 another machine
    assert [fleet.control.places[worker][0] for worker in range(2)] == nodes and fleet.control.places[0] != places[0]
    assert run.audit is not None and run.audit <= audit(run)
    check_replay(run, tmp_path / "run", problem)


def test_the_ranks_of_a_worker_may_be_on_several_machines(cluster, tmp_path):
    """Each machine has room for one of them."""
    for _ in range(2):
        cluster.add_node(**NODE, num_cpus=1)
    problem = dd.problems.Logistic(workers=1, batch_size=7)
    fleet = dd.RayFleet(address=cluster.address, ranks=2)
    run = dd.train(dd.DuDe(lr=0.1), problem, fleet, updates=20, folder=tmp_path / "run")
    assert run.version == 20 and kinds(run) == []
    check_replay(run, tmp_path / "run", problem)
