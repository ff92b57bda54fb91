from __future__ import annotations

from dataclasses import dataclass

import pytest

import dualdelay as dd
from flat import simulate
from helpers import unlike


@dataclass(frozen=True)
class Small(dd.Algorithm):
    """Every arrival is an update; the methods below change one thing each."""

    def init(self, x, n, rng):
        return dd.State(x, n)

    def step(self, s, a):
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]


def run_on(kind, seconds=(1.0, 3.0), **options):
    return simulate(kind(0.1), unlike(len(seconds), noise=1.0), dd.FixedSpeeds(seconds), **options)


def names(run, worker):
    mine = run.trace.worker == worker
    return list(zip(run.trace.time[mine], run.trace.draw[mine], run.trace.version[mine], strict=True))


class Twice(Small):
    """Worker 1 takes two draws at each model it gets; worker 0 moves the server on meanwhile."""

    def step(self, s, a):
        orders = super().step(s, a)
        return [dd.again(1)] if a.worker == 1 and a.job.draw % 2 == 0 else orders


def test_again_is_the_next_draw_at_the_model_the_worker_holds():
    # worker 1 gets its second model at 6, when worker 0 has arrived five times and it has twice: version 7
    run = run_on(Twice, time=12.0)
    assert names(run, 1) == [(3, 0, 0), (6, 1, 0), (9, 2, 7), (12, 3, 7)] and run.version == 16


class AgainFirst(Small):
    def first(self, s):
        return [dd.again(0)]


def test_again_needs_a_model():
    with pytest.raises(dd.BadInput, match="never sent a model"):
        run_on(AgainFirst, updates=1)


class Impatient(Small):
    """When worker 0 arrives, worker 1 drops all it has and starts at the new model."""

    def first(self, s):
        return [dd.send(0), dd.send(1), dd.send(1)]

    def step(self, s, a):
        super().step(s, a)
        return [dd.cancel(1), dd.send(1)] if a.worker == 0 else []


def test_cancel_drops_the_job_and_the_queue_and_frees_the_worker():
    # draws 0 and 1 are used up and never arrive; draw 2 starts at once, at time 1
    run = run_on(Impatient, updates=2)
    assert names(run, 0) == [(1, 0, 0)] and names(run, 1) == [(4, 2, 1)]
    with pytest.raises(dd.RunFailed, match="nothing is in flight"):
        run_on(Impatient, updates=3)


class OnTime(Small):
    """Arrivals are gathered, and every 2.5 seconds there is an update and a job for worker 0 (as in FedFix)."""

    def first(self, s):
        return [*super().first(s), dd.wake(2.5)]

    def step(self, s, a):
        return []

    def on_wake(self, s, time):
        s.descend(s.x, self.lr)
        return [dd.send(0), dd.wake(time + 2.5)]


def test_wake_calls_on_wake_at_that_time():
    run = run_on(OnTime, time=6.0)
    # the orders of a wake go out at its time: worker 0's next job takes from 2.5 to 3.5
    assert names(run, 0) == [(1, 0, 0), (3.5, 1, 1), (6, 2, 2)] and names(run, 1) == [(3, 0, 0)]
    wakes = [(event["kind"], event["time"], event["row"], event["after"]) for event in run.trace.events]
    assert wakes == [("wake", 2.5, 1, 1), ("wake", 5.0, 3, 2)] and run.version == 2


def test_an_update_made_by_a_wake_is_dated_as_such():
    run = run_on(OnTime, updates=1, evaluate_every=1)
    assert run.time == 2.5 and run.metrics.version.tolist() == [0, 1] and run.metrics.time.tolist() == [0.0, 2.5]


def test_a_gradient_used_by_a_wake_has_the_delay_of_that_update():
    # arrivals at 1 | 3 and 3.5 | 6, taken at 0 | 0 and 1 | 2, are in updates 1 | 2 | 3
    delays = run_on(OnTime, time=8.0).delays
    assert (delays.arrival_max, delays.arrival_avg) == (2, (1 + 2 + 1 + 1) / 4)


class LastFirst(Small):
    def first(self, s):
        return [dd.send(s.n - 1)]

    def step(self, s, a):
        super().step(s, a)
        return [dd.send((a.worker - 1) % s.n)]


def test_a_method_may_choose_who_starts():
    trace = run_on(LastFirst, (1.0, 2.0, 4.0), updates=4).trace
    assert trace.worker.tolist() == [2, 1, 0, 2] and trace.time.tolist() == [4.0, 6.0, 7.0, 11.0]


class Queue(Small):
    def first(self, s):
        return [dd.send(0)] * 3

    def step(self, s, a):
        super().step(s, a)
        return []


class Repeat(Small):
    """One model, and one more draw at it after every arrival."""

    def step(self, s, a):
        super().step(s, a)
        return [dd.again(a.worker)]


SLOW = dd.speeds.Link(latency=0.25, bandwidth=32.0)  # 8 bytes each way take 1/4 + 8/32 seconds
TRAVEL = [
    (Small, dd.speeds.Link(), [1.0, 2.0, 3.0]),
    (Small, SLOW, [2.0, 4.0, 6.0]),
    (Repeat, SLOW, [2.0, 3.75, 5.5]),  # the model is there already, so the order to go on has no bytes
    (Queue, dd.speeds.Link(), [1.0, 2.0, 3.0]),
    (Queue, SLOW, [2.0, 3.0, 4.0]),  # the models wait at the worker, so only the first way there and the ways back show
]


@pytest.mark.parametrize(("kind", "link", "moments"), TRAVEL)
def test_messages_travel_and_seconds_count_the_work_alone(kind, link, moments):
    seen = []
    run_on(kind, (1.0,), updates=3, link=link, watch=[lambda s, a: seen.append((a.time, a.seconds))])
    assert seen == [(moment, 1.0) for moment in moments]
