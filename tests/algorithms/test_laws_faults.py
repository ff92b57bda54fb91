"""Faulty gradients

What a worker sends may be no gradient: not finite, or of a wrong shape. The server rejects it, uses nothing of it, and the
worker does the job again on another minibatch at the same model.
"""

from __future__ import annotations

import math

import pytest
import torch

import dualdelay as dd
from helpers import NO_TIES, apart, archive, audit, drift, heterogeneous, overriding, polls, rounding, same
from tables import ALGORITHMS, LR

SPOILED = {
    "nan": lambda gradient: torch.where(torch.arange(len(gradient)) == 1, math.nan, gradient),
    "infinities": lambda gradient: torch.tensor([math.inf, -math.inf], dtype=torch.float64),
    "one number": lambda gradient: gradient[:1],
    "a column": lambda gradient: gradient[:, None],
}
SPEEDS = dd.FixedSpeeds(NO_TIES)  # so that being late changes nothing but the time


class Faulty(dd.Quadratic):
    """Heterogeneous workers; the jobs for which ``is_bad(worker, draw)`` give something that is no gradient."""

    def __init__(self, is_bad, fault="nan"):
        super().__init__(heterogeneous(4, 2).settings["centers"], [1.0, 2.0, 0.5, 1.0], noise=0.5)
        self._is_bad, self._spoil = is_bad, SPOILED[fault]

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        return self._spoil(gradient) if self._is_bad(worker, draw) else gradient, loss


class Renumbered(Faulty):
    """The same workers without faults, whose worker 1 takes job k as job ``retry``, the number of its second attempt.

    A job has ``span`` gradients.
    """

    def __init__(self, k, retry, span):
        super().__init__(lambda worker, draw: False)
        self._k, self._retry, self._span = k, retry, span

    def gradient(self, x, worker, draw):
        if worker == 1:  # jobs that were given out after the second attempt have a number more
            job, step = divmod(draw, self._span)
            draw = (self._retry if job == self._k else job + (job >= self._retry)) * self._span + step
        return super().gradient(x, worker, draw)


FAULTS = [(row, "nan", place) for row in ALGORITHMS for place in (0, 3)]
FAULTS += [
    (row, fault, 3) for row in ("vanilla", "dude", "dude workers", "dude int8") for fault in SPOILED if fault != "nan"
]


# exact gradients have no minibatch that could be spoiled, and a job that was polled is not polled again
@pytest.mark.parametrize(
    ("row", "fault", "place"),
    [case for case in FAULTS if not ALGORITHMS[case[0]].exact and not polls(ALGORITHMS[case[0]])],
)
def test_a_faulty_gradient_only_makes_its_worker_late(row, fault, place):
    """A gradient that is not finite or has a wrong shape only makes its worker late: the run is bit for bit one without
    the fault in which that job, on the minibatch of the second attempt, took twice its time.

    Catches a gradient that is partly absorbed before it is checked, and a second attempt at another model.
    """
    method = ALGORITHMS[row]
    span = method.most_steps
    calm = dd.simulate(method, Faulty(lambda worker, draw: False), SPEEDS, updates=60).trace
    k = calm.draw[calm.worker == 1].tolist()[: place + 1][-1]  # a job of worker 1 that arrives
    run, models = archive(method, Faulty(lambda worker, draw: (worker, draw // span) == (1, k), fault), SPEEDS, updates=60)
    rejected = [event for event in run.trace.events if event["kind"] == "rejected"]
    assert [(event["worker"], event["draw"]) for event in rejected] == [(1, k)] and run.rejected == 1
    assert (1, k) not in zip(run.trace.worker, run.trace.draw, strict=True)
    # the second attempt is numbered after the jobs that wait behind it; it may itself have been cancelled
    after = next(row for row in range(rejected[0]["row"], len(run.trace)) if run.trace.worker[row] == 1)
    retry = int(run.trace.draw[after]) if run.trace.version[after] == rejected[0]["version"] else k + 1

    def step(self, s, a):  # a worker's measured seconds are those of the second attempt alone
        return type(method).step(self, s, a._replace(seconds=NO_TIES[1] * a.steps) if a.job[:2] == (1, k) else a)

    late = dd.speeds.RecordedSpeeds([[s] if i != 1 else [s] * k + [2 * s] + [s] * 300 for i, s in enumerate(NO_TIES)])
    expected, others = archive(overriding(method, step=step), Renumbered(k, retry, span), late, updates=60)
    assert same(models, others)
    assert run.trace.time == pytest.approx(expected.trace.time, rel=rounding(len(run.trace)), abs=0)
    assert run.trace.worker.tolist() == expected.trace.worker.tolist()


@pytest.mark.numeric
def test_a_rejected_difference_is_not_kept_by_its_worker():
    """With memory at the workers a rejected difference is not added to what its worker keeps, so the sum stays right.

    Catches a worker that keeps what the server did not accept.
    """
    # were it kept, the next difference would be x - nan and the sum would miss it for good
    faulty = Faulty(lambda worker, draw: draw in (0, 2, 3))
    (_, server), (run, workers) = (
        archive(dd.DuDe(0.05, memory=memory), faulty, SPEEDS, updates=60) for memory in ("server", "workers")
    )
    assert apart(server, workers) <= drift(60, 0.05, 12) * 32  # no weight and no gradient is larger
    assert run.rejected == 12 and run.audit <= audit(run)


def test_ten_faulty_gradients_in_a_row_end_the_run():
    """Ten faulty gradients of one worker in a row end the run, nine do not; by choice the first one does.

    Catches a run that tries for ever, and a count that is not reset by a sound gradient.
    """

    def run(is_bad, **options):
        return dd.simulate(dd.VanillaASGD(LR), Faulty(is_bad), SPEEDS, time=40.0, server=dd.Server(**options))

    # 29 jobs by time 40, of which numbers 9 and 19 are sound
    assert run(lambda worker, draw: worker == 1 and draw % 10 != 9).rejected == 27
    with pytest.raises(dd.RunFailed, match=r"worker 1 .* not finite .*number 10 in a row"):
        run(lambda worker, draw: worker == 1 and draw > 0)
    with pytest.raises(dd.RunFailed, match=r"job number 1 "):
        run(lambda worker, draw: worker == 1 and draw > 0, on_nonfinite="stop")
