"""Every message counts once, whatever becomes of it on its way between the server and its workers."""

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.workers.messages import JobRequest, Reply
from dualdelay.workers.testing import LossyRayFleet
from dualdelay.workers.worker import Worker
from helpers import rounding
from real import Real, check, kinds

PAIR = [[0.0, 1.0], [6.0, -2.0]]


class Weather:
    """Loses, repeats and delays messages in both directions, by a seed."""

    def __init__(self, seed, lost=0.0, repeated=0.0, late=0.0, longest=0.3):
        self._random = np.random.default_rng(seed)
        self._shares = np.cumsum([lost, repeated, late])
        self._longest = longest
        self.counts = dict.fromkeys(("lost", "repeated", "late", "requests", "replies"), 0)

    def __call__(self, message):
        self.counts["requests" if isinstance(message, JobRequest) else "replies"] += 1
        what = int(np.searchsorted(self._shares, self._random.random(), side="right"))
        if what < 3:
            self.counts[("lost", "repeated", "late")[what]] += 1
        return ([], [0.0, self._delay()], [self._delay()], [0.0])[what]

    def _delay(self):
        return float(self._random.uniform(0.0, self._longest))


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize("what, memory", [("lost", "workers"), ("repeated", "server"), ("late", "workers")])
def test_lost_repeated_and_late_messages_leave_the_result_as_if_nothing_had_happened(what, memory, tmp_path):
    longest = 0.02 if what == "repeated" else 0.3  # a copy must come while the run lasts, which may be 0.1 seconds
    weather = Weather(1, **{what: 0.15}, longest=longest)
    problem = Real(PAIR)
    fleet = LossyRayFleet(weather=weather, faults=dd.FaultPolicy(resend=0.2))
    run = dd.train(dd.DuDe(lr=0.05, memory=memory), problem, fleet, updates=90, folder=tmp_path / "run")
    assert weather.counts[what] > 12 and kinds(run) == []
    if what == "lost":
        assert fleet.control.counts["sent again"] >= 5
    if what == "repeated":
        assert fleet.control.counts["dropped"] >= 5
    for worker in range(2):
        draws = run.trace.draw[run.trace.worker == worker].tolist()
        assert draws == list(range(len(draws)))  # each job once, in its order
    check(run, tmp_path / "run", problem)


@pytest.mark.usefixtures("ray_here")
def test_with_everything_at_once_the_order_of_one_worker_is_exactly_that_of_sgd(tmp_path):
    """With a single worker there is one possible result, whatever the weather."""
    problem = Real([[3.0, -1.0]])
    weather = Weather(2, lost=0.1, repeated=0.1, late=0.2)
    fleet = LossyRayFleet(weather=weather, faults=dd.FaultPolicy(resend=0.1))
    run = dd.train(dd.DuDe(lr=0.1, memory="workers"), problem, fleet, updates=120)
    calm = dd.simulate(dd.DuDe(lr=0.1, memory="workers"), problem, dd.FixedSpeeds([1.0]), updates=120)
    assert min(weather.counts.values()) > 5
    assert torch.equal(run.x, calm.x)


def request(sequence, draw, accepted=-1):
    return JobRequest(0, 0, sequence, draw, draw, accepted)


def worker(memory="workers"):
    problem = dd.Quadratic([[2.0, 4.0]], noise=1.0)
    return Worker(0, problem, dd.DuDe(lr=0.1, memory=memory).message, 1), problem


def near(a, b):
    """Whether they are the same but for the rounding of a difference; no gradient here is larger than 8."""
    return float(np.abs(a - b).max()) <= rounding(4) * 8


def test_a_repeated_request_gets_the_same_reply_without_computing_again():
    mine, problem = worker()
    x = np.zeros(2)
    first = mine.compute(request(0, 0), x, None)
    again = mine.compute(request(0, 0), np.ones(2), None)  # another model would give another gradient
    assert again is first
    assert np.array_equal(first.value, problem.gradient(torch.zeros(2, dtype=torch.float64), 0, 0)[0].numpy())


def test_a_request_that_was_overtaken_gets_no_reply_and_changes_nothing():
    mine, _ = worker()
    mine.compute(request(0, 0), np.zeros(2), None)
    mine.compute(request(1, 1, accepted=0), np.zeros(2), None)
    held = mine.kept(0)
    assert mine.compute(request(0, 0), np.zeros(2), None) is None
    assert np.array_equal(mine.kept(0), held) and np.array_equal(mine.kept(0), mine.kept(0))


def test_what_is_kept_changes_only_when_the_server_has_accepted_it():
    mine, problem = worker()
    x, zero = np.zeros(2), torch.zeros(2, dtype=torch.float64)
    g = [problem.gradient(zero, 0, draw)[0].numpy() for draw in range(4)]
    first = mine.compute(request(0, 0), x, None)
    assert near(first.value, g[0]) and mine.kept(-1) is None and near(mine.kept(0), g[0])
    second = mine.compute(request(1, 1, accepted=-1), x, None)  # the first was turned down: the whole gradient again
    assert near(second.value, g[1])
    third = mine.compute(request(2, 2, accepted=1), x, None)
    assert near(third.value, g[2] - g[1]) and near(mine.kept(1), g[1])
    fourth = mine.compute(request(3, 3, accepted=1), x, None)  # the third was lost for good
    assert near(fourth.value, g[3] - g[1])
    assert near(mine.kept(3), g[3])


def test_a_new_process_starts_with_what_it_is_given_to_keep():
    mine, problem = worker()
    given = np.array([5.0, 5.0])
    gradient = problem.gradient(torch.zeros(2, dtype=torch.float64), 0, 3)[0].numpy()
    reply = mine.compute(request(7, 3), np.zeros(2), given)
    assert near(reply.value, gradient - given) and near(mine.kept(7), gradient)
    assert isinstance(reply, Reply) and reply.keeps and reply.error == ""


def test_an_exception_becomes_a_traceback_and_the_next_job_is_none_the_worse():
    class Fails(Real):
        def gradient(self, x, worker, draw):
            if draw == 1:
                raise KeyError("nothing here")
            return super().gradient(x, worker, draw)

    mine = Worker(0, Fails([[1.0]]), dd.DuDe(lr=0.1, memory="workers").message, 1)
    x = np.zeros(1)
    mine.compute(request(0, 0), x, None)
    failed = mine.compute(request(1, 1, accepted=0), x, None)
    assert "KeyError: 'nothing here'" in failed.error and not failed.keeps
    assert np.array_equal(mine.kept(0), mine.compute(request(2, 2, accepted=0), x, None).value * 0 + mine.kept(0))
    assert "Traceback" in mine.measure(x, None, 0.0)  # this problem is evaluated as a whole
