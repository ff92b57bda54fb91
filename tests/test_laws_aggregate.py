from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from helpers import AGGREGATING, archive, centers, few, same, times
from hypothesis import given
from hypothesis import strategies as st
from tables import ALGORITHMS, CASES

import dualdelay as dd

rows = pytest.mark.parametrize("row", ALGORITHMS)
cases = pytest.mark.parametrize("case", CASES)


@cases
@rows
def test_a_job_names_its_gradient(row, case):
    # I-3: were a model shared with the server instead of lent for good, gradients would be those of a newer version
    algorithm, (problem, speeds) = ALGORITHMS[row], CASES[case]
    models, lent, sums = {0: problem.start(0)}, {}, {}

    def check(s, a):
        gradient, loss = problem.gradient(models[a.job.version], a.job.worker, a.job.draw)
        if getattr(algorithm, "memory", "server") == "server":
            assert torch.equal(a.value, gradient)
        else:
            sums[a.worker] = sums.get(a.worker, 0.0) + a.value.double()
            assert torch.allclose(sums[a.worker], gradient.double(), rtol=0, atol=1e-12 if case != "digits" else 1e-7)
        assert a.loss == loss
        lent[s.version] = s.x
        models[s.version] = s.x.clone()

    dd.simulate(algorithm, problem, speeds, updates=40, watch=[check], evaluate_every=40)
    assert all(torch.equal(lent[version], models[version]) for version in lent)


@cases
@pytest.mark.parametrize("row", AGGREGATING)
def test_the_step_follows_the_mean_of_the_latest_gradients(row, case):
    # I-1: w^t = w^{t-1} - (eta/n) sum_i G_i with G_i from its name, so the server's sum is checked and not believed
    algorithm, (problem, speeds) = ALGORITHMS[row], CASES[case]
    x, latest = problem.start(0), {}
    models = [x]
    exact = x.dtype == torch.float32  # float64 sums of a few float32 numbers do not round
    steps = torch.zeros_like(x, dtype=torch.float64)

    def check(s, a):
        nonlocal steps
        latest[a.worker] = problem.gradient(models[a.job.version], a.job.worker, a.job.draw)[0].double()
        total = sum(latest.values())
        gap = float((s.total - total).abs().max())
        assert gap == 0.0 if exact and algorithm_keeps_a_table(algorithm) else gap < (1e-6 if exact else 1e-12)
        if s.version == len(models):
            steps = steps + total * (algorithm.lr / problem.workers)
            models.append(s.x)
            assert torch.allclose(s.x.double(), x.double() - steps, rtol=0, atol=1e-5 if exact else 1e-12)

    run = dd.simulate(algorithm, problem, speeds, updates=60, watch=[check], evaluate_every=60)
    assert run.error == 0.0 if exact else run.error < 1e-14


def algorithm_keeps_a_table(algorithm):
    return getattr(algorithm, "memory", "server") == "server"


@few
@given(times, st.integers(1, 7), st.sampled_from(["server", "workers"]), st.sampled_from(["wait", "busy", "zeros"]))
def test_the_sum_is_right_after_every_arrival_whatever_the_speeds(seconds, wait_for, memory, start):
    n = len(seconds)
    problem = dd.Quadratic(centers(n), noise=1.0)
    algorithm = dd.DuDe(0.01, wait_for=min(wait_for, n), memory=memory, start=start)
    latest, models = {}, {0: problem.start(0)}

    def check(s, a):
        latest[a.worker], _ = problem.gradient(models[a.job.version], a.job.worker, a.job.draw)
        models[s.version] = s.x
        assert torch.allclose(s.total, sum(latest.values()), rtol=0, atol=1e-11)

    dd.simulate(algorithm, problem, dd.FixedSpeeds(seconds), updates=30, watch=[check])


@few
@given(times, st.integers(1, 7))
def test_memory_at_the_workers_gives_the_same_iterates(seconds, wait_for):
    n = len(seconds)
    c, speeds = min(wait_for, n), dd.FixedSpeeds(seconds)
    noisy = dd.Quadratic(centers(n), noise=1.0)
    (_, server), (_, workers) = (archive(dd.DuDe(0.01, c, memory), noisy, speeds, updates=30) for memory in MEMORIES)
    assert torch.allclose(torch.stack(server), torch.stack(workers), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seconds", [[1.0, 2.0, 4.0, 1.0], [0.5, 0.5, 4.0, 2.0]])
def test_memory_at_the_workers_gives_the_same_bits_on_dyadic_data(seconds):
    # integers and lr/n = 2^-5: 8 updates need fewer than 53 bits, so that nothing rounds
    problem, speeds = dd.Quadratic([[0.0], [8.0], [-16.0], [40.0]]), dd.FixedSpeeds(seconds)
    (_, server), (_, workers) = (archive(dd.DuDe(1 / 8, memory=m), problem, speeds, updates=8) for m in MEMORIES)
    assert same(server, workers)


MEMORIES = ("server", "workers")


def test_a_worker_sends_differences_and_keeps_what_it_sent():
    algorithm = dd.DuDe(0.1, memory="workers")
    gradient, held = torch.tensor([0.1, 1e8]), torch.tensor([1 / 3, 1.0], dtype=torch.float64)
    before = gradient.clone(), held.clone()
    value, kept = algorithm.message(gradient, held)
    # float32 cannot hold the difference; what is kept is the old plus what was sent, so the next message mends it
    assert value.dtype == torch.float32 and torch.equal(kept, held + value.double())
    assert same((gradient, held), before)
    value, kept = algorithm.message(gradient, None)
    assert torch.equal(value, gradient) and torch.equal(kept, gradient.double())
    assert dd.DuDe(0.1).message(gradient, None)[1] is None


@dataclass(frozen=True)
class Unreliable(dd.DuDe):
    copies: int = 1  # how often the third report of worker 1 is absorbed

    def step(self, s, a):
        faulty = (a.job.worker, a.job.draw) == (1, 2)
        return super().step(s, a._replace(value=a.value * self.copies) if faulty else a)


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_a_lost_or_doubled_difference_moves_the_limit_and_the_audit_sees_it(copies):
    # I-19: the sum is off by (copies - 1) delta for good, so sum_i (w - b_i) = (1 - copies) delta at rest
    problem, speeds = CASES["q3"]
    deltas = []

    def keep(s, a):
        if (a.job.worker, a.job.draw) == (1, 2):
            deltas.append(float(a.value))

    run = dd.simulate(Unreliable(1 / 32, memory="workers", copies=copies), problem, speeds, updates=1500, watch=[keep])
    assert len(deltas) == 1 and abs(deltas[0]) > 0.1
    assert float(run.x) == pytest.approx(6 + (1 - copies) * deltas[0] / 3, abs=1e-9)
    assert (run.error > 1e-3) == (copies != 1)


@pytest.mark.parametrize("copies", [0, 2])
def test_a_table_at_the_server_heals_when_the_worker_reports_again(copies):
    run = dd.simulate(Unreliable(1 / 32, copies=copies), *CASES["q3"], updates=1500)
    assert float(run.x) == pytest.approx(6, abs=1e-9) and run.error < 1e-14


def test_fedbuff_divides_by_the_size_of_its_buffer():
    # not by the sum of the weights (1 + staleness)^-p, with staleness counted from 0
    problem, speeds = CASES["noisy"]
    x, buffer, seen = problem.start(0), [], set()

    def check(s, a):
        nonlocal x
        staleness = s.version - (len(buffer) == 2) - a.job.version
        seen.add(staleness)
        buffer.append(a.value * (1 + staleness) ** -0.5)
        if len(buffer) == 3:
            x = x - 0.1 / 3 * sum(buffer)
            buffer.clear()
        assert torch.allclose(s.x, x, rtol=0, atol=1e-12)

    dd.simulate(dd.FedBuff(0.1, buffer=3, staleness=0.5), problem, speeds, updates=30, watch=[check])
    assert 0 in seen and len(seen) > 2


def test_a_method_without_memory_keeps_nothing_per_worker():
    # a hundred thousand workers in flight; a table of n x d would be the only thing of that size at the server
    n = 100_000
    problem = dd.Quadratic([[float(i % 7)] for i in range(n)])
    speeds = dd.FixedSpeeds([1.0 + i / n for i in range(n)])
    run = dd.simulate(dd.VanillaASGD(2.0**-20), problem, speeds, updates=3000, evaluate_every=3000)
    assert run.trace.worker.tolist() == list(range(3000)) and run.state.n == n
    tensors = [getattr(run.state, f.name) for f in fields(run.state)]
    assert max(t.numel() for t in tensors if isinstance(t, torch.Tensor)) == 1
    assert len(dd.DuDe(0.1).init(problem.start(0), n, dd.Draws(0, "")).table) == n
