from __future__ import annotations

from dataclasses import dataclass

import pytest
from tables import CASES

import dualdelay as dd


@dataclass(frozen=True)
class Small(dd.Algorithm):
    """A method with one rule: every arrival is an update."""

    def init(self, x, n, rng):
        return dd.State(weights=x, n=n)

    def step(self, s, a):
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]


def simulate(kind, seconds=(1.0, 3.0), **options):
    problem = dd.Quadratic([[float(i)] for i in range(len(seconds))], noise=1.0)
    return dd.simulate(kind(0.1), problem, dd.FixedSpeeds(seconds), **options)


def names(run, worker):
    mine = run.trace.worker == worker
    return list(zip(run.trace.draw[mine].tolist(), run.trace.version[mine].tolist(), strict=True))


class Twice(Small):
    """Worker 1 takes two draws at each model it gets; worker 0 moves the server on meanwhile."""

    def step(self, s, a):
        orders = super().step(s, a)
        return [dd.again(1)] if a.worker == 1 and a.job.draw % 2 == 0 else orders


def test_again_is_the_next_draw_at_the_model_the_worker_holds():
    run = simulate(Twice, time=12.0)
    # worker 1 arrives at 3, 6, 9, 12, each time before worker 0's job sent later; its second model is that of time 6,
    # when worker 0 has arrived five times and worker 1 twice
    assert names(run, 1) == [(0, 0), (1, 0), (2, 7), (3, 7)]
    assert run.version == 16


class AgainFirst(Small):
    def first(self, s):
        return [dd.again(0)]


def test_again_needs_a_model():
    with pytest.raises(dd.BadInput, match="never sent a model"):
        simulate(AgainFirst, updates=1)


class Impatient(Small):
    """When worker 0 has arrived for the first time, worker 1 drops all it has and starts at the new model."""

    def first(self, s):
        return [dd.send(0), dd.send(1), dd.send(1)]

    def step(self, s, a):
        super().step(s, a)
        return [dd.cancel(1), dd.send(1)] if a.worker == 0 else []


def test_cancel_drops_the_job_and_the_queue_and_frees_the_worker():
    run = simulate(Impatient, updates=2)
    # draws 0 and 1 are used up; draw 2 starts at once at time 1
    assert names(run, 0) == [(0, 0)] and names(run, 1) == [(2, 1)]
    assert run.trace.time.tolist() == [1.0, 4.0]
    with pytest.raises(dd.RunFailed, match="nothing is in flight"):
        simulate(Impatient, updates=3)


class OnTime(Small):
    """Arrivals are gathered, and every 2.5 seconds there is an update and a job for worker 0 (as in FedFix)."""

    def first(self, s):
        return [*super().first(s), dd.wake(2.5)]

    def step(self, s, a):
        if a.job is not None:
            return []
        s.descend(s.x, self.lr)
        return [dd.send(0), dd.wake(a.time + 2.5)]


def test_wake_calls_step_at_that_time():
    seen = []

    class Told(OnTime):
        def step(self, s, a):
            seen.append((a.time, a.job and tuple(a.job)))
            return super().step(s, a)

    run = simulate(Told, time=6.0)
    # the orders of a wake go out at its time: worker 0's next job takes from 2.5 to 3.5
    assert seen == [(1, (0, 0, 0)), (2.5, None), (3, (1, 0, 0)), (3.5, (0, 1, 1)), (5, None), (6, (0, 2, 2))]
    wakes = [(event["kind"], event["time"], event["row"], event["after"]) for event in run.trace.events]
    assert wakes == [("wake", 2.5, 1, 1), ("wake", 5.0, 3, 2)]
    assert run.trace.worker.tolist() == [0, 1, 0, 0] and run.version == 2


def test_a_wake_for_a_time_that_has_passed_comes_at_once():
    class Late(Small):
        def step(self, s, a):
            if a.job is None:
                s.descend(s.x, self.lr)
            return [dd.wake(0.5)]

    run = simulate(Late, (1.0,), updates=1)
    assert [event["time"] for event in run.trace.events] == [1.0]


def test_an_update_made_by_a_wake_is_dated_as_such():
    run = simulate(OnTime, updates=1, evaluate_every=1)
    assert run.time == 2.5
    assert run.metrics.version.tolist() == [0, 1] and run.metrics.time.tolist() == [0.0, 2.5]


def test_a_gradient_used_by_a_wake_has_the_delay_of_that_update():
    # arrivals at 1 | 3 and 3.5 | 6, taken at 0 | 0 and 1 | 2, are in updates 1 | 2 | 3
    delays = simulate(OnTime, time=8.0).delays
    assert (delays.arrival_max, delays.arrival_avg) == (2, (1 + 2 + 1 + 1) / 4)


class LastFirst(Small):
    def first(self, s):
        return [dd.send(s.n - 1)]

    def step(self, s, a):
        super().step(s, a)
        return [dd.send((a.worker - 1) % s.n)]


def test_a_method_may_choose_who_starts():
    run = simulate(LastFirst, (1.0, 2.0, 4.0), updates=4)
    assert run.trace.worker.tolist() == [2, 1, 0, 2] and run.trace.time.tolist() == [4.0, 6.0, 7.0, 11.0]


class Queue(Small):
    def first(self, s):
        return [dd.send(0)] * 3

    def step(self, s, a):
        super().step(s, a)
        return []


@pytest.mark.parametrize(("link", "moments"), [(dd.Link(), [1.0, 2.0, 3.0]), (dd.Link(0.5), [2.0, 3.0, 4.0])])
def test_seconds_count_the_work_and_not_the_queue(link, moments):
    # with travel the queue hides all but the first half second and the last: the models wait at the worker
    seen = []
    simulate(Queue, (1.0,), updates=3, link=link, watch=[lambda s, a: seen.append((a.time, a.seconds, a.job.version))])
    assert seen == [(moment, 1.0, 0) for moment in moments]


def test_orders_are_carried_out_in_their_order():
    class Both(Small):
        def first(self, s):
            return [dd.send(1), dd.send(0)]

    # equal times: who was sent first arrives first
    assert simulate(Both, (1.0, 1.0), updates=2).trace.worker.tolist() == [1, 0]


def test_what_arrives_belongs_to_nobody_else():
    values = []
    for algorithm in (dd.DuDe(0.1), dd.SyncSGD(0.1), dd.FedBuff(0.1, buffer=2)):
        kept = []
        dd.simulate(
            algorithm, *CASES["noisy"], updates=20, watch=[lambda s, a, kept=kept: kept.append((a.value, a.value.clone()))]
        )
        values += kept
    assert all((value == copy).all() for value, copy in values)
