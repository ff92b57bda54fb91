"""What a method orders, send, again, cancel and wake, and what its fleet makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import dualdelay as dd
from helpers import heterogeneous


@dataclass(frozen=True)
class Small(dd.Algorithm):
    """Every arrival is an update; the methods below change one thing each."""

    def init(self, x, n, rng):
        return dd.State(x, n)

    def step(self, s, a):
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]


def simulate(kind, seconds=(1.0, 3.0), **options):
    return dd.simulate(kind(0.1), heterogeneous(len(seconds), noise=1.0), dd.FixedSpeeds(seconds), **options)


def arrivals(run, worker):
    """Time, draw and version of each of a worker's arrivals."""
    own = run.trace.worker == worker
    return list(zip(run.trace.time[own], run.trace.draw[own], run.trace.version[own], strict=True))


class Twice(Small):
    """Worker 1 takes two draws at each model it gets; worker 0 moves the server on meanwhile."""

    def step(self, s, a):
        orders = super().step(s, a)
        return [dd.again(1)] if a.worker == 1 and a.job.draw % 2 == 0 else orders


def test_again_is_the_next_draw_at_the_model_that_the_worker_has():
    # worker 1 gets its second model at 6, when worker 0 has arrived five times and it has twice: version 7
    run = simulate(Twice, time=12.0)
    assert arrivals(run, 1) == [(3, 0, 0), (6, 1, 0), (9, 2, 7), (12, 3, 7)] and run.version == 16


class Impatient(Small):
    """When worker 0 arrives, worker 1 drops all it has and starts at the new model."""

    def first(self, s):
        return [dd.send(0), dd.send(1), dd.send(1)]

    def step(self, s, a):
        super().step(s, a)
        return [dd.cancel(1), dd.send(1)] if a.worker == 0 else []


def test_cancel_drops_the_job_and_the_queue_and_frees_the_worker():
    # draws 0 and 1 are used up and never arrive; draw 2 starts at once, at time 1
    run = simulate(Impatient, updates=2)
    assert arrivals(run, 0) == [(1, 0, 0)] and arrivals(run, 1) == [(4, 2, 1)]
    with pytest.raises(dd.RunFailed, match="nothing is in flight"):
        simulate(Impatient, updates=3)


class Periodic(Small):
    """Every 2.5 seconds there is an update and a job for worker 0, whatever arrived (as in FedFix)."""

    def first(self, s):
        return [*super().first(s), dd.wake(2.5)]

    def step(self, s, a):
        return []

    def on_wake(self, s, time):
        s.descend(s.x, self.lr)
        return [dd.send(0), dd.wake(time + 2.5)]


def test_wake_calls_on_wake_at_that_time():
    run = simulate(Periodic, time=6.0)
    # the orders of a wake go out at its time: worker 0's next job takes from 2.5 to 3.5
    assert arrivals(run, 0) == [(1, 0, 0), (3.5, 1, 1), (6, 2, 2)] and arrivals(run, 1) == [(3, 0, 0)]
    wakes = [(event["kind"], event["time"], event["row"], event["after"]) for event in run.trace.events]
    assert wakes == [("wake", 2.5, 1, 1), ("wake", 5.0, 3, 2)] and run.version == 2


def test_an_update_made_by_a_wake_has_the_time_of_the_wake():
    run = simulate(Periodic, updates=1, evaluation=dd.Evaluation(every=1))
    assert run.time == 2.5 and run.metrics.version.tolist() == [0, 1] and run.metrics.time.tolist() == [0.0, 2.5]


def test_a_gradient_used_by_a_wake_has_the_delay_of_that_update():
    # arrivals at 1 | 3 and 3.5 | 6, taken at 0 | 0 and 1 | 2, are in updates 1 | 2 | 3
    delays = simulate(Periodic, time=8.0).delays
    assert (delays.arrival_max, delays.arrival_avg) == (2, (1 + 2 + 1 + 1) / 4)


class LastFirst(Small):
    def first(self, s):
        return [dd.send(s.n - 1)]

    def step(self, s, a):
        super().step(s, a)
        return [dd.send((a.worker - 1) % s.n)]


def test_a_method_may_choose_which_workers_start():
    trace = simulate(LastFirst, (1.0, 2.0, 4.0), updates=4).trace
    assert trace.worker.tolist() == [2, 1, 0, 2] and trace.time.tolist() == [4.0, 6.0, 7.0, 11.0]


REFUSED = [
    (dd.again(0), r"again\(0\) was ordered, but worker 0 was never sent a model; send first"),
    (dd.send(2), r"send\(2\) was ordered; expected a worker, one of 0\.\.1"),
    (dd.cancel(-1), r"cancel\(-1\) was ordered; expected a worker"),
    (dd.send(0.0), r"send\(0\.0\) was ordered; expected a worker"),
    (dd.wake(float("inf")), r"wake\(inf\) was ordered; expected a time, a finite number"),
    (dd.wake("soon"), r"wake\('soon'\) was ordered; expected a time"),
    (("send", 0), r"\('send', 0\) is no order; expected dd\.send, dd\.again, dd\.poll, dd\.cancel or dd\.wake"),
]


@pytest.mark.parametrize(("order", "words"), REFUSED)
def test_an_order_that_cannot_be_carried_out_is_refused(order, words):
    class Wrong(Small):
        def first(self, s):
            return [order]

    with pytest.raises(dd.BadInput, match=words):
        simulate(Wrong, updates=1)


def test_again_is_fine_after_a_send_in_the_same_list():
    class Both(Small):
        def first(self, s):
            return [dd.send(0), dd.again(0)]

    assert arrivals(simulate(Both, updates=2), 0) == [(1, 0, 0), (2, 1, 0)]
