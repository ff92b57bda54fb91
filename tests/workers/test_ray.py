"""What only processes show of workers that work: what Ray carries, where data are built, threads, and why none starts.

What the server decides is tested on virtual time: test_train.py, test_faults.py, test_coordinator.py.
"""

import socket
import sys
import time
import types
from dataclasses import dataclass, field
from functools import partial

import pytest
import ray
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.engine.half import Half
from dualdelay.workers.messages import EvaluationRequest
from dualdelay.workers.ray_fleet import RayTransport, _SharedModel
from helpers import ROUNDED, check_replay, kinds
from real import Measured, Real, Site, Wide, kill, small_net
from transports import LossyRayFleet
from virtual import RandomWeather

pytestmark = pytest.mark.usefixtures("ray_here")

PAIR = [[0.0, 1.0], [6.0, -2.0]]


def test_a_recorded_run_replays_to_the_same_bits_whatever_becomes_of_its_messages(tmp_path):
    """Compressed, lost, repeated and late; and a worker that is killed at the very end leaves no audit."""
    problem, weather = Real(PAIR), RandomWeather(1, lost=0.1, repeated=0.1, late=0.1, longest=0.1)
    fleet = LossyRayFleet(weather=weather, threads=2, cpus=0.5, faults=dd.FaultPolicy(resend=0.2))

    def strike(state, arrival):
        if state.version == 60:
            kill(fleet, 1)
            time.sleep(0.5)  # the server is not to have asked before the process is gone

    method = dd.DuDe(lr=0.1, memory="workers", compress="int8")
    run = dd.train(method, problem, fleet, updates=60, watch=[strike], folder=tmp_path / "run")
    assert run.version == 60 and run.ended == "updates" and kinds(run) == []
    assert min(weather.counts.values()) > 3 and min(fleet.control.counts["sent again"], fleet.control.counts["dropped"]) > 0
    for worker in range(2):
        draws = run.trace.draw[run.trace.worker == worker].tolist()
        assert draws == list(range(len(draws)))
    assert set(run.trace.bytes.tolist()) == {2 + 8}  # of two float64 a byte each, and the step
    assert set(run.trace.loss.tolist()) == {2.0} and (run.trace.seconds > 0).all()  # this problem's loss counts threads
    assert run.audit is None and run.notes == ("there is no audit: workers [1] did not say at the end what they keep",)
    check_replay(run, tmp_path / "run", problem)


class OthersAreFar(dict):
    """Workers that share memory with the server, of whom those that are named here seem to be elsewhere."""

    def __init__(self, *far):
        super().__init__()
        self.far = far

    def __setitem__(self, worker, reader):
        if worker not in self.far:
            super().__setitem__(worker, reader)


@dataclass(frozen=True)
class MixedFleet(LossyRayFleet):
    far: tuple[int, ...] = field(default=(), kw_only=True)
    places: list = field(default_factory=list, kw_only=True)  # of each model the key of its segment, or None

    def connect(self, problem, half, output, about):
        lossy = super().connect(problem, half, output, about)
        lossy._inner._near = OthersAreFar(*self.far)

        def put(x):
            model = lossy._inner.put(x)
            self.places.append(model.names.key if isinstance(model, _SharedModel) else None)
            return model

        lossy.put = put
        return lossy


@pytest.mark.parametrize(
    "far",
    [
        pytest.param((1,), id="one far"),
        pytest.param((), id="both near", marks=pytest.mark.slow),
        pytest.param((0, 1), id="both far", marks=pytest.mark.slow),
    ],
)
def test_large_vectors_are_shared_on_one_machine_and_stored_for_others_with_the_same_bits(far, tmp_path):
    """Whatever is lost, repeated or late: a vector stays for as long as somebody may need it, and no longer."""
    problem, weather = Wide(), RandomWeather(2, lost=0.1, repeated=0.1, late=0.1, longest=0.1)
    fleet = MixedFleet(weather=weather, cpus=0.5, faults=dd.FaultPolicy(resend=0.3), far=far)
    run = dd.train(dd.DuDe(lr=2.0**-6), problem, fleet, updates=40, folder=tmp_path / "run", checkpoint_every=15)
    assert run.version == 40 and run.audit < 1e-6 and min(weather.counts.values()) > 0
    assert len(fleet.places) >= 40
    if len(far) < 2:
        assert None not in fleet.places and len(set(fleet.places)) <= 5  # segments are written to again
    else:
        assert set(fleet.places) == {None}
    check_replay(run, tmp_path / "run", problem)


@dataclass(frozen=True)
class SeenFleet(dd.RayFleet):
    transports: list = field(default_factory=list, kw_only=True)

    def connect(self, problem, half, output, about):
        self.transports.append(super().connect(problem, half, output, about))
        return self.transports[-1]


def test_workers_here_are_asked_by_lines_and_by_ray_once_these_fail_with_the_same_bits(tmp_path, caplog):
    """Models travel as small differences; a line has no room for a while, is cut, fails at its worker, carries no more.

    With the one that is cut a request to evaluate is lost.
    """
    fleet, seen = SeenFleet(cpus=0.1, faults=dd.FaultPolicy(resend=0.3, deadline=60)), []

    def strike(state, arrival):
        lines = fleet.transports[0]._lines
        seen.append(sorted(lines))
        if state.version == 5:
            send = lines[0]._send
            lines[0]._send = lambda packet: (setattr(lines[0], "_send", send), send_no_more())
        elif state.version == 10:
            fleet.transports[0]._say = partial(losing, fleet.transports[0]._say)
        elif state.version == 15:
            lines[1].ask("nonsense")
        elif state.version == 20:
            packed = lines[2]._packed
            lines[2]._packed = lambda message: None if message[0] is not None else packed(message)

    def losing(say, request, model, held):
        line = fleet.transports[0]._lines.get(0)
        if line is None or request.worker != 0 or not isinstance(request, EvaluationRequest):
            return say(request, model, held)
        seen.append("lost")
        line._send = lambda packet: None
        said = say(request, model, held)
        line._line.shutdown(socket.SHUT_RDWR)
        return said

    def send_no_more():
        seen.append("full")
        raise BlockingIOError

    run = dd.train(
        dd.DuDe(lr=2.0**-6),
        Measured(workers=3),
        fleet,
        updates=60,
        server=dd.Server(downlink="int8"),
        evaluation=dd.Evaluation(every=10),
        watch=[strike],
        folder=tmp_path / "run",
    )
    assert run.version == 60 and kinds(run) == [] and set(run.metrics.answered.tolist()) == {3.0}
    assert seen.count("full") == seen.count("lost") == 1
    assert [lines for lines in seen if isinstance(lines, list)][::59] == [[0, 1, 2], []]
    [said] = [text for record in caplog.records if "calls of Ray's" in (text := record.getMessage())]
    assert said.startswith("worker 1 is asked by calls of Ray's from now on, for its line failed: AttributeError: 'str'")
    check_replay(run, tmp_path / "run", Measured(workers=3))


@pytest.mark.parametrize("shards", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_code_that_a_process_does_not_find_is_named(shards, monkeypatch):
    module = types.ModuleType("only_here")
    exec("import dualdelay as dd, real\nclass A(dd.DuDe): pass\nclass P(real.Wide): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    method, problem = (module.A(lr=0.1), Wide()) if shards else (dd.DuDe(lr=0.1), module.P())
    who = "a shard of the server" if shards else r"worker \d \(it"
    with pytest.raises(
        dd.RunFailed, match=f"{who} could not start: ModuleNotFoundError: No module named 'only_here'; it looks"
    ):
        dd.train(method, problem, dd.RayFleet(cpus=0.1, shards=shards), updates=5)


def test_data_are_built_in_the_worker_alone_and_evaluated_there(tmp_path):
    site = Site(tmp_path)
    problem = dd.Network(small_net, cross_entropy, site, workers=2, batch_size=16)
    fleet, evaluation = dd.RayFleet(), dd.Evaluation(every=20)
    run = dd.train(dd.DuDe(lr=0.1), problem, fleet, updates=60, evaluation=evaluation, folder=tmp_path / "run")
    built = sorted(path.name for path in tmp_path.glob("shard-*"))
    assert built == sorted(f"shard-{worker}-{pid}" for worker, (_, pid) in fleet.control.places.items())
    metrics, workers = run.metrics, run.workers
    assert {0, 60} <= set(metrics.version.tolist()) <= {0, 20, 40, 60}  # one that is still under way lets the next pass
    assert set(metrics.share.tolist()) == {1.0} and set(metrics.answered.tolist()) == {2.0}
    exact = dd.Network(small_net, cross_entropy, [site(worker) for worker in range(2)], batch_size=16).evaluate(run.x)
    assert metrics.objective[-1] == pytest.approx(exact["objective"], rel=ROUNDED)
    assert metrics.gradient_norm[-1] == pytest.approx(exact["gradient_norm"], rel=ROUNDED)
    assert workers.worker.tolist()[-2:] == [0, 1] and workers.loss[-2:].mean() == metrics.objective[-1]
    check_replay(run, tmp_path / "run", problem)


def test_a_problem_that_cannot_be_sent_says_so():
    class Locked(Real):
        def __reduce__(self):
            raise TypeError("it holds a lock.")

    with pytest.raises(dd.BadInput, match=r"(?s)the problem cannot be sent to its workers: .*it holds a lock"):
        dd.train(dd.DuDe(lr=0.1), Locked(PAIR), updates=1)


def test_what_keeps_a_process_from_starting_is_known(monkeypatch):
    fleet = dd.RayFleet(cpus=65, resources=[{"CPU": 1}, {}, {"CPU": 2, "gold": 2}])
    transport = RayTransport(fleet, dd.Quadratic([[0.0]] * 3), Half(dd.DuDe(lr=0.1)))
    try:
        assert transport.why_not_started(0) == ""
        assert transport.why_not_started(1) == ": it claims 65 CPU, and no machine of the cluster has that (the most is 64)"
        monkeypatch.setattr(ray, "available_resources", dict)
        assert transport.why_not_started(0) == ": all CPU of the cluster are taken"
        machines = [{"Alive": True, "Resources": resources} for resources in ({"CPU": 9.0}, {"CPU": 1.0, "gold": 2.0})]
        monkeypatch.setattr(ray, "nodes", lambda: [*machines, {"Alive": False, "Resources": {"CPU": 9.0, "gold": 9.0}}])
        assert "and no single machine of the cluster has all of that" in transport.why_not_started(2)
    finally:
        transport.close(ended=True)
