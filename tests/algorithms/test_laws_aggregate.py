from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.problems import exact
from helpers import AGGREGATING, apart, archive, audit, drift, few, heterogeneous, rounding, same, times
from tables import ALGORITHMS, CASES

pytestmark = pytest.mark.numeric

FOLLOWING = [row for row in AGGREGATING if row not in ("auto", "ca2fl", "aced", "sag", "saga")]  # the mean of the latest


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", ALGORITHMS)
def test_jobs_name_their_gradients_and_steps_follow_the_mean_of_the_latest(row, case):
    # I-3: were a model shared with the server instead of lent for good, its gradient would be that of a newer version.
    # I-1: n g = sum_i G_i and w^T = w^0 - (eta/n) sum_t sum_i G_i, with each G_i recomputed from its job's name.
    algorithm, (problem, speeds) = ALGORITHMS[row], CASES[case]
    problem = exact(problem) if algorithm.exact else problem
    differences, packed = getattr(algorithm, "memory", "") == "workers", getattr(algorithm, "compress", None) is not None
    start, steps, sent, size, arrivals = problem.start(0), 0.0, {}, 0.0, 0
    models, lent = [start.clone()], [start]
    kind, n = start.dtype, problem.workers
    single = kind == torch.float32

    def near(a, b, close):
        return float((a.double() - b.double()).abs().max()) <= close * size

    def check(s, a):
        nonlocal steps, size, arrivals
        if row == "fedfix" and s.version == len(models):  # made by a wake
            models.append(s.x.clone())
            lent.append(s.x)
        gradient, loss = problem.gradient(models[a.job.version], a.job.worker, a.job.draw)
        size, arrivals = max(size, float(s.x.abs().max()), float(gradient.abs().max())), arrivals + 1
        sent[a.worker] = a.value.double() + (sent.get(a.worker, 0.0) if differences else 0.0)
        # a difference is rounded once, and what is lost of it is in the next
        same_as = near(sent[a.worker], gradient, rounding(2, kind)) if differences else torch.equal(a.value, gradient)
        assert packed or same_as
        assert a.loss == loss
        if row in AGGREGATING and row not in ("aced", "auto"):  # which leaves old ones out, and keeps running means
            gap = float((s.total - sum(sent.values())).abs().max())
            # two additions for each arrival; a few float32 numbers add up in float64 without rounding
            assert gap == 0.0 if single else gap <= rounding(2 * arrivals + n) * n * size
        if s.version == len(models):
            models.append(s.x.clone())
            lent.append(s.x)
            steps = steps + sum(sent.values()) * (algorithm.lr / problem.workers)
            assert row not in FOLLOWING or near(s.x, start.double() - steps, drift(25, algorithm.lr, 2 * n, kind))

    run = dd.simulate(algorithm, problem, speeds, updates=25, watch=[check], evaluation=dd.Evaluation(every=25))
    assert same(lent, models)
    assert row not in AGGREGATING or (run.audit == 0.0 if single else run.audit <= audit(run))


@few
@given(times, st.integers(1, 7), st.sampled_from(["wait", "busy", "zeros"]))
def test_the_sum_is_right_whatever_the_speeds_and_wherever_the_memory(seconds, wait_for, start):
    n, all_models, size = len(seconds), [], 16.0  # no weight and no gradient is larger
    problem = heterogeneous(n, 2, noise=1.0)
    for memory in ("server", "workers"):
        latest, models, jobs = {}, [problem.start(0)], []

        def check(s, a, latest=latest, models=models, jobs=jobs):
            jobs.append(a.job)
            latest[a.worker], _ = problem.gradient(models[a.job.version], a.job.worker, a.job.draw)
            if s.version == len(models):
                models.append(s.x)
            assert float((s.total - sum(latest.values())).abs().max()) <= rounding(2 * len(jobs) + n) * n * size

        algorithm = dd.DuDe(0.01, min(wait_for, n), memory, start)
        dd.simulate(algorithm, problem, dd.FixedSpeeds(seconds), updates=30, watch=[check])
        all_models.append(models)
    assert apart(*all_models) <= drift(30, 0.01, 2 * n) * size


@few
@given(st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4), st.integers(1, 4))
def test_the_memory_changes_no_bit_on_dyadic_data(seconds, wait_for):
    # integers and lr / n = 2^-5: ten updates need fewer than 53 bits, so that nothing rounds
    problem, speeds = dd.Quadratic([[0.0], [8.0], [-16.0], [40.0]]), dd.FixedSpeeds(seconds)
    (_, server), (_, workers) = (
        archive(dd.DuDe(1 / 8, wait_for, memory), problem, speeds, updates=10) for memory in ("server", "workers")
    )
    assert same(server, workers)


def test_a_worker_keeps_what_it_sent():
    algorithm = dd.DuDe(0.1, memory="workers")
    gradient, held = torch.tensor([0.1, 1e8]), torch.tensor([1 / 3, 1.0], dtype=torch.float64)
    before = gradient.clone(), held.clone()
    value, kept = algorithm.message(gradient, held)
    # float32 cannot hold the difference; the old plus what was sent is kept, so that the next message mends it
    assert value.dtype == torch.float32 and torch.equal(kept, held + value.double()) and same((gradient, held), before)
    assert same(algorithm.message(gradient, None), (gradient, gradient.double()))


@dataclass(frozen=True)
class Unreliable(dd.DuDe):
    copies: int = 1  # how often the third report of worker 1 is absorbed

    def step(self, s, a):
        return super().step(s, a._replace(value=a.value * self.copies) if a.job[:2] == (1, 2) else a)


@pytest.mark.parametrize("memory", ["server", "workers"])
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_a_lost_or_doubled_difference_moves_the_limit_and_a_table_heals(copies, memory):
    # I-19: without a table the sum is off by (copies - 1) delta for good: sum_i (w - b_i) = (1 - copies) delta at rest
    values = {}

    def keep(s, a):
        values[a.job[:2]] = float(a.value)

    algorithm = Unreliable(1 / 32, memory=memory, copies=copies)
    run = dd.simulate(algorithm, *CASES["q3"], updates=1500, watch=[keep], evaluation=dd.Evaluation(every=1500))
    off = (1 - copies) * values[1, 2] if memory == "workers" else 0.0
    assert abs(values[1, 2]) > 0.1 and float(run.x) == pytest.approx(6 + off / 3, abs=1e-9)
    assert run.audit > 1e-3 if off else run.audit <= audit(run)


def test_fedbuff_divides_by_the_size_of_its_buffer():
    # not by the sum of the weights (1 + staleness)^-p, with staleness counted from 0
    x, buffer, seen = CASES["noisy"][0].start(0), [], set()

    def check(s, a):
        nonlocal x
        staleness = s.version - (len(buffer) == 2) - a.job.version
        seen.add(staleness)
        buffer.append(a.value * (1 + staleness) ** -0.5)
        if len(buffer) == 3:
            x = x - 0.1 / 3 * sum(buffer)
            buffer.clear()
        assert float((s.x - x).abs().max()) <= drift(30, 0.1, 8) * 16  # no weight and no gradient is larger

    dd.simulate(dd.FedBuff(0.1, buffer=3, staleness=0.5), *CASES["noisy"], updates=30, watch=[check])
    assert 0 in seen and len(seen) > 2


def test_a_method_without_memory_keeps_nothing_per_worker():
    n = 20_000
    problem, speeds = heterogeneous(n), dd.FixedSpeeds([1.0 + i / n for i in range(n)])
    run = dd.simulate(dd.VanillaASGD(2.0**-20), problem, speeds, updates=3000, evaluation=dd.Evaluation(every=3000))
    assert run.trace.worker.tolist() == list(range(3000)) and run.state.n == n
    sizes = [part.numel() for f in fields(run.state) if isinstance(part := getattr(run.state, f.name), torch.Tensor)]
    assert sizes == [1]
