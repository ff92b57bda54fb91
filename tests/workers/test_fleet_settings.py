"""Wrong settings of real workers are refused before a process is started."""

import pytest
import torch

import dualdelay as dd
from dualdelay.engine.fleet import NOTHING
from dualdelay.engine.half import Half
from dualdelay.simulation.clocks import VirtualClock
from dualdelay.simulation.local_fleet import LocalFleet
from own import NO_NUMBERS, Fresh, refused

TRIO = dd.Quadratic([[0.0], [6.0], [12.0]])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (dd.RayFleet, {"threads": 0}, "threads is 0"),
        (dd.RayFleet, {"server_threads": 0}, "server_threads is 0"),
        (dd.RayFleet, {"cpus": -1.0}, "cpus is -1.0; expected zero or more processors"),
        (dd.RayFleet, {"gpus": float("nan")}, "gpus is nan; expected zero or more"),
        (dd.RayFleet, {"faults": {"restarts": 10}}, r"faults is \{'restarts': 10\}; expected a dd.FaultPolicy"),
        (dd.RayFleet, {"resources": [["site"]]}, r"resources\[0\] is \['site'\]; expected how much of what by name"),
        (dd.FaultPolicy, {"restarts": -1}, "restarts is -1"),
        (dd.FaultPolicy, {"retries": 1.5}, "retries is 1.5"),
        (dd.FaultPolicy, {"minimum": 0}, "minimum is 0"),
        (dd.FaultPolicy, {"deadline": 0.0}, "deadline is 0.0"),
        (dd.FaultPolicy, {"patience": -1.0}, "patience is -1.0"),
        (dd.FaultPolicy, {"resend": 0.0}, "resend is 0.0"),
        (dd.FaultPolicy, {"gone": "stay"}, "gone is 'stay'"),
        (dd.FaultPolicy, {"alarm": 0}, "alarm is 0"),
    ],
)
def test_an_impossible_setting_is_refused(kind, settings, message):
    with pytest.raises(dd.BadInput, match=message):
        kind(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resources": [{"site": 1.0}]}, "resources are given for 1 workers; expected 3"),
        ({"absent": [3]}, r"absent has \[3\]; expected workers in 0\.\.2"),
        ({"faults": dd.FaultPolicy(minimum=3), "absent": [0]}, "minimum is 3, but 2 workers are there at the start"),
    ],
)
def test_a_fleet_that_does_not_fit_its_problem_is_refused(settings, message):
    with pytest.raises(dd.BadInput, match=message):
        dd.train(dd.DuDe(lr=0.1), TRIO, dd.RayFleet(**settings), updates=1)


def test_a_method_that_would_wait_for_an_absent_worker_is_refused():
    with pytest.raises(dd.BadInput, match="worker 1 left, and Fresh has no rule for that"):
        dd.train(Fresh(lr=0.1), TRIO, dd.RayFleet(absent=[1]), updates=1)


def test_weights_that_cannot_travel_are_refused():
    problem = dd.Network(
        lambda: torch.nn.Linear(2, 1).to(torch.bfloat16),
        lambda outputs, targets: (outputs - targets).square().mean(),
        [(torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.bfloat16))],
    )
    with pytest.raises(dd.BadInput, match=r"torch\.bfloat16, which numpy and so Ray cannot carry"):
        dd.train(dd.DuDe(lr=0.1), problem, updates=1)


def test_a_folder_that_exists_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(dd.BadInput, match="exists; a run has a folder of its own"):
        dd.train(dd.DuDe(lr=0.1), TRIO, updates=1, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_simulation_is_not_resumed_with_real_workers(tmp_path):
    dd.simulate(dd.DuDe(lr=0.1), TRIO, dd.FixedSpeeds([1.0, 2.0, 3.0]), updates=4, folder=tmp_path / "run")
    with pytest.raises(dd.BadInput, match="was started with simulated workers"):
        dd.resume(tmp_path / "run", updates=8, fleet=dd.RayFleet())


def test_something_else_than_a_fleet_is_refused():
    with pytest.raises(dd.BadInput, match=r"fleet is FixedSpeeds.*; expected a dd\.WorkerFleet, such as dd\.RayFleet\(\)"):
        dd.train(dd.DuDe(lr=0.1), TRIO, dd.FixedSpeeds([1.0, 2.0, 3.0]), updates=1)


def test_a_simulated_fleet_does_not_evaluate():
    fleet = LocalFleet(TRIO, VirtualClock(dd.FixedSpeeds([1.0, 2.0, 3.0])), Half(dd.DuDe(lr=0.1)))
    assert not fleet.evaluates and not fleet.wait_for_evaluations() and not fleet.has_evaluation
    asks = (
        lambda: fleet.evaluate(0.0, 0, NOTHING, None, None),
        lambda: fleet.evaluate_all(0.0, 0, NOTHING),
        fleet.take_evaluation,
    )
    for ask in asks:
        with pytest.raises(AssertionError, match="do not evaluate"):
            ask()


LARGE = 10**20  # more than 64 bits
REFUSED = [
    *({name: LARGE} for name in ("threads", "server_threads", "room", "restarts", "retries", "minimum", "alarm")),
    *({name: value} for name in ("cpus", "deadline") for value in NO_NUMBERS if (name, value) != ("deadline", None)),
    *({"cpus": float("inf")}, {"resend": 1e300}, {"address": 5}, {"absent": 1}, {"absent": ["a"]}, {"control": 3}),
    *({"resources": value} for value in (5, ["gpu"], [{"gpu": "one"}], [{1: 2}], [{"gpu": -1}])),
]


@pytest.mark.parametrize("settings", REFUSED, ids=lambda settings: " ".join(settings))
def test_a_setting_that_neither_ray_nor_torch_could_take_is_refused_by_name(settings):
    kind = dd.FaultPolicy if settings.keys() <= dd.FaultPolicy.__dataclass_fields__.keys() else dd.RayFleet
    refused(lambda: kind(**settings), *settings, "expected")


def test_a_fault_policy_is_a_policy():
    refused(lambda: dd.RayFleet(faults=3), "faults", "expected")
