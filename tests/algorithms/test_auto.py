"""AutoDuDe: what it chooses, recomputed from the trace and from gradients, and what its choices do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.runs.names import label, parse
from helpers import archive, drift, operations, rounding, same
from tables import CASES

FLEETS = {
    **{
        f"ten, std {std:g}, seed {seed}": dd.TruncatedNormalSpeeds(10, std, seed)
        for std in (1.0, 5.0)
        for seed in (0, 1, 6)
    },
    **{
        f"thirty, std {std:g}": dd.TruncatedNormalSpeeds(30, std, 4) for std in (1.0, 5.0)
    },  # one is hundreds of times faster
    "four, random times": dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1),
    "twelve, equal": dd.FixedSpeeds([1.0] * 12),
    "one 130 times slower": dd.FixedSpeeds([1.0] * 9 + [130.0]),
    "one 50 times faster": dd.FixedSpeeds([1.0] * 9 + [0.02]),
    "two, one 60 times slower": dd.FixedSpeeds([1.0, 60.0]),
}
UNSETTLED = {"four, random times"}  # which differ more than the band is wide
LAST = dd.Evaluation(every=10**6)  # the end alone
LOW, HIGH = 4.0, 11.2  # between these median delays the waiting stays as it is
LR = dd.AutoDuDe().lr


def heterogeneous(n):
    return dd.Quadratic([[float(3 * worker), float(worker % 3)] for worker in range(n)])


def server(n, lr=LR, start=0.0):
    """A method and its state before anything has arrived."""
    method = dd.AutoDuDe(lr)
    return method, method.init(torch.tensor([start], dtype=torch.float64), n, dd.Draws(0, ""))


def arrival(worker, value, version=0, draw=0):
    return dd.Arrival(dd.Job(worker, draw, version), torch.tensor([value], dtype=torch.float64), 0.0, 1.0, 0.0)


# How many workers are waited for --------------------------------------------------------------------------------------


def updates_of(run, n):
    """Of every update its gradients, the median delay and how many workers are waited for after it, from the trace alone;
    and that it was made as soon as so many had reported, and half of them at the start.
    """
    taken_at, counted, reported, wait_for, round_start, version, updates = {}, set(), set(), max(1, round(n / 8)), 0, 0, []
    rounds, patience, fewer = 0, 1, False
    for worker, at, after in zip(run.trace.worker.tolist(), run.trace.version.tolist(), run.trace.after, strict=True):
        taken_at[worker] = at
        reported.add(worker)
        heard = counted | reported
        due = len(reported) >= min(wait_for, len(heard)) and len(heard) >= n / 2
        assert (after == version + 1) == due
        if due:
            version, counted = version + 1, heard
            tau = sorted(version - taken_at[worker] for worker in counted)[(len(counted) - 1) // 2]
            if sum(taken_at[worker] >= round_start for worker in counted) >= len(counted) / 2:
                round_start, rounds = version, rounds + 1
                if tau < LOW and wait_for > 1 and rounds >= patience:
                    wait_for, rounds, fewer = wait_for - 1, 0, True
                elif tau > HIGH and wait_for < (len(counted) + 1) // 2:
                    patience *= 2 if fewer else 1
                    wait_for, rounds, fewer = wait_for + 1, 0, False
            updates.append((len(reported), tau, wait_for))
            reported = set()
    assert wait_for == run.state.wait_for and version == run.version > 10
    return updates


@pytest.mark.parametrize(
    "fleet", [pytest.param(name, marks=[pytest.mark.slow] * (name == "one 130 times slower")) for name in FLEETS]
)
def test_the_trace_says_how_many_workers_are_waited_for(fleet):
    """An update is made when as many workers have reported as the median delays at the ends of the rounds so far say; and
    where speeds are fixed it comes to rest, with median delays near eight, with nobody waited for, or with as many as one
    fewer would be too few of, which is tried more and more rarely.
    """
    speeds = FLEETS[fleet]
    n, slowest = speeds.n, max(speeds.seconds(worker, 0) for worker in range(speeds.n))
    run = dd.simulate(dd.AutoDuDe(), heterogeneous(n), speeds, time=20 * slowest, evaluation=LAST)
    updates = updates_of(run, n)
    late = updates[-len(updates) // 3 :]
    if fleet not in UNSETTLED:
        usual = np.median([wait_for for _, _, wait_for in late])
        assert np.mean([wait_for == usual for _, _, wait_for in late]) > 0.9
        assert LOW <= np.mean([tau for _, tau, _ in late]) <= HIGH or usual == 1 or run.state.patience > 1
        assert max(reports for reports, _, _ in late) <= (n + 1) // 2  # nobody waits for more than half


def test_one_slow_worker_does_not_make_others_wait():
    """With a worker that is 130 times slower than nine equal ones no update waits for all, and from the time at which it
    first reports to the end the waiting does not change: the median delay does not see it.
    """
    run = dd.simulate(
        dd.AutoDuDe(), heterogeneous(10), FLEETS["one 130 times slower"], time=10 * 130.0 + 1, evaluation=LAST
    )
    updates = updates_of(run, 10)
    first = int(run.trace.after[run.trace.worker == 9][0])
    assert (run.trace.worker == 9).sum() == 10
    assert len({wait_for for _, _, wait_for in updates[first:]}) == 1 and max(reports for reports, _, _ in updates) < 10


def test_two_workers_never_wait_for_one_another():
    """Where one of two goes silent the other goes on; the run would end if it were waited for."""
    speeds = dd.speeds.RecordedSpeeds([[1.0], [60.0, 60.0, 1e9]])
    run = dd.simulate(dd.AutoDuDe(), heterogeneous(2), speeds, updates=2000, evaluation=LAST)
    assert run.version == 2000 and run.state.wait_for == 1


@pytest.mark.parametrize("times", [[1.0] * 4 + [100.0], [1.0] * 3 + [100.0] * 3, [1.0, 100.0]], ids=["one", "half", "two"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_far_slower_workers_do_not_ruin_a_network(times, seed):
    """A gradient that counts on for hundreds of updates drives weights that no other worker's data hold: the step goes by
    the mean age, so that the loss goes down all the same. With the median alone it ends far above where it began.
    """
    drawn = torch.Generator().manual_seed(0)
    rule = torch.randn(6, 3, generator=drawn)
    inputs = [torch.randn(40, 6, generator=drawn) + 0.5 * worker for worker in range(len(times))]
    shards = [(own, (own @ rule).argmax(1)) for own in inputs]
    problem = dd.Network(
        lambda: torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 3)),
        torch.nn.functional.cross_entropy,
        shards,
        8,
    )
    run = dd.simulate(dd.AutoDuDe(), problem, dd.FixedSpeeds(times), time=350.0, seed=seed)
    assert run.metrics.objective[-10:].max() < 0.5 * run.metrics.objective[0]


@pytest.mark.parametrize("size", [1e-30, 1e19])
def test_gradients_whose_squares_float32_does_not_hold(size):
    """Squares and their sum are kept in float64: losses of any size give the run of losses of size one, to rounding."""
    weights = torch.tensor([0.5, -0.25], dtype=torch.float32)
    ends = []
    for scale in (1.0, size):
        method = dd.AutoDuDe()
        s = method.init(weights, 2, dd.Draws(0, ""))
        for t in range(8):
            value = torch.tensor([1.0 + 0.1 * t, -2.0]) * scale
            method.step(s, dd.Arrival(dd.Job(t % 2, t // 2, max(0, t - 2)), value, 0.0, 1.0, float(t)))
        ends.append(s.z)
    assert torch.isfinite(ends[1]).all() and torch.allclose(ends[0], ends[1], rtol=1e-5)
    assert float((ends[1] - weights).abs().min()) > 0.1


@pytest.mark.parametrize("n", [3, 4, 10, 11])
def test_the_start_waits_for_half_of_the_workers_at_most(n):
    """Workers that never report hold nobody up, as long as they are not more than half; more than half of them do."""
    silent = n // 2
    speeds = dd.speeds.AwaySpeeds(dd.FixedSpeeds([1.0] * n), [(worker, 0.0, None) for worker in range(n - silent, n)])
    run = dd.simulate(dd.AutoDuDe(), heterogeneous(n), speeds, updates=60, evaluation=LAST)
    assert run.version == 60 and run.state.uncounted == set(range(n - silent, n))
    assert run.trace.time[run.trace.after == 1][0] == 1.0  # at once
    problem = heterogeneous(n - silent)  # those that never report do not count
    error = (run.x - problem.optimum()).norm() / problem.optimum().norm()
    assert error < (run.x - heterogeneous(n).optimum()).norm() / problem.optimum().norm()
    more = dd.speeds.AwaySpeeds(dd.FixedSpeeds([1.0] * n), [(worker, 0.0, None) for worker in range((n - 1) // 2, n)])
    with pytest.raises(dd.RunFailed, match=r"AutoDuDe waits for workers? .*after 0 updates"):
        dd.simulate(dd.AutoDuDe(), heterogeneous(n), more, updates=60, evaluation=LAST)


def test_fewer_or_more_workers_are_waited_for_when_speeds_change():
    """When four of twelve equal workers become ten times faster and most others slower, more are waited for, until the
    median delay is near eight again; and so it is some time after all are equal again.
    """
    equal, uneven = [1.0] * 12, [0.1, 0.1, 0.1, 0.1, *(1.0 + 0.25 * k for k in range(8))]
    speeds = dd.speeds.ChangingSpeeds(dd.FixedSpeeds(equal), [60.0, 240.0], [equal, uneven, equal])
    before, between, after = (
        updates_of(dd.simulate(dd.AutoDuDe(), heterogeneous(12), speeds, time=t, evaluation=LAST), 12)
        for t in (60.0, 240.0, 420.0)
    )
    assert before[-1][2] < between[-1][2] and LOW <= between[-1][1] <= HIGH and LOW <= after[-1][1] <= HIGH


# Every step -----------------------------------------------------------------------------------------------------------


class Steps:
    """What the method has to do, in float64 and from gradients that are taken anew at the models that jobs name."""

    def __init__(self, problem, lr):
        self.problem, self.lr, self.n = problem, lr, problem.workers
        self.places = [slice(first, first + math.prod(shape)) for _, first, shape in problem.layout()]
        self.start = problem.start(0).double()
        self.sizes = self.each([self.size(shape, self.start[place]) for (_, _, shape), place in self.tensors()])
        self.sent, self.means, self.fresh, self.taken_at, self.squares = [problem.start(0)], {}, {}, {}, []
        self.path, self.reach, self.largest, self.checked = 0.0, 1.0, 0.0, 0

    def tensors(self):
        return zip(self.problem.layout(), self.places, strict=True)

    def each(self, values):
        """A number for each tensor -> one for each weight."""
        lengths = torch.tensor([place.stop - place.start for place in self.places])
        return torch.tensor([float(value) for value in values], dtype=torch.float64).repeat_interleave(lengths)

    def size(self, shape, values):
        """The root mean square at the start; where all are zero that of torch's uniform start, +-1 / sqrt(inputs), for a
        vector that of the middle matrix.
        """
        if (values != 0).any():
            return values.square().mean().sqrt()
        matrices = sorted(math.prod(other[1:]) for _, _, other in self.problem.layout() if len(other) > 1)
        # sizes fall as inputs grow, so the upper middle of the sizes is the lower middle of the inputs
        inputs = math.prod(shape[1:]) if len(shape) > 1 else matrices[(len(matrices) - 1) // 2] if matrices else shape[0]
        return math.sqrt(1 / (3 * inputs))

    def direction(self, t):
        """The mean of the running means and of what is new; and the median delay."""
        for worker, gradient in self.fresh.items():
            keep = math.exp(-(t - self.taken_at[worker]) / 8) if worker in self.means else 0.0
            self.means[worker] = keep * self.means.get(worker, 0.0) + (1 - keep) * gradient
        new = sum(gradient - self.means[worker] for worker, gradient in self.fresh.items()) / len(self.fresh)
        ages = sorted(t - at for at in self.taken_at.values())
        tau = ages[(len(ages) - 1) // 2]
        tau = max(tau, float(np.mean(ages)) ** 2 / tau)
        self.largest = max(self.largest, *(float(gradient.abs().max()) for gradient in self.fresh.values()))
        return sum(self.means.values()) / len(self.means) + new, tau

    def __call__(self, s, a):
        """Compare one step, if there was one."""
        self.fresh[a.worker] = self.problem.gradient(self.sent[a.version], a.worker, a.job.draw)[0].double()
        self.taken_at[a.worker], t = a.version, len(self.sent)
        if s.version < t:
            return
        direction, tau = self.direction(t)
        square = sum(gradient.square() for gradient in self.fresh.values()) / len(self.fresh)
        self.squares.append([float(square[place].mean()) for place in self.places])
        ages = 0.999 ** torch.arange(t - 1, -1, -1, dtype=torch.float64)
        scale = self.each(((ages @ torch.tensor(self.squares, dtype=torch.float64)) / ages.sum()).sqrt())
        u = direction / scale
        self.path += (1 + 2 * tau) * float(u.square().mean())
        weights = torch.tensor([float(math.comb(k + 10, 10)) for k in range(t - 1)], dtype=torch.float64)  # z_1, z_2, ...
        if t > 1:
            x = (weights @ torch.stack(self.sent[1:]).double()) / weights.sum()
            away = float(((x - self.start) / self.sizes).square().mean().sqrt())
            self.reach = max(self.reach, min(away, self.reach * 2 ** (1 / tau)))
        step = self.lr * min(self.reach / math.sqrt(self.path), 0.07)
        expected = self.sent[-1].double() - step * self.sizes * u
        self.compare(s.z, expected, step * self.sizes * u, step * self.sizes / scale * self.largest, t)
        self.sent.append(s.z.clone())
        weights = torch.tensor([float(math.comb(k + 10, 10)) for k in range(t)], dtype=torch.float64)
        mean = (weights @ torch.stack(self.sent[1:]).double()) / weights.sum()
        biggest = torch.stack(self.sent).abs().max()
        # of what a mean rounds, each further update leaves 1 - 11 / (t + 10): what t / 12 updates have rounded is in it
        assert float((s.x.double() - mean).abs().max()) <= rounding(4 + 2 * t / 12, s.x.dtype) * float(biggest)
        self.fresh, self.checked = {}, t

    def compare(self, found, expected, move, unit, t):
        """A step rounds at the size of the weights; the move is a product of a dozen factors, of which the path is a sum of
        t terms and each of these, like the scale, a sum over weights; and the direction has what a mean over about eight
        updates has lost in each of them, in all workers' means, as a share of a gradient.
        """
        dtype, terms = found.dtype, math.log2(len(found)) + 32
        close = rounding(2, dtype) * found.double().abs() + rounding(terms + t, dtype) * move.abs()
        assert bool(((found.double() - expected).abs() <= close + rounding(4 * (8 + self.n), dtype) * unit).all())


class Shaped(dd.Quadratic):
    """A quadratic whose weights are a matrix of zeros, a matrix, a vector of zeros and a vector."""

    shapes = ((2, 5), (3, 2), (3,), (2,))
    zero = (True, False, True, False)

    def layout(self):
        ends = np.cumsum([math.prod(shape) for shape in self.shapes]).tolist()
        firsts = [0, *ends[:-1]]
        return [(f"t{k}", first, shape) for k, (first, shape) in enumerate(zip(firsts, self.shapes, strict=True))]


def shaped(units=(0, 0, 0, 0), slopes=0.0, zeros=True, **options):
    """Four workers on the weights above; of each tensor the unit is 2^k times as small, so that all its weights are 2^k
    times as many and its slopes 2^-k; all losses, and so all slopes, are 2^slopes times as large.
    """
    rng = np.random.default_rng(5)
    d = sum(map(math.prod, Shaped.shapes))
    lengths = [math.prod(shape) for shape in Shaped.shapes]
    unit = np.repeat(2.0 ** np.array(units), lengths)
    start = np.where(np.repeat(Shaped.zero, lengths) & zeros, 0.0, rng.normal(size=d))
    centers, curvatures = rng.normal(size=(4, d)), rng.uniform(0.5, 2.0, (4, d))
    matrices = [np.diag(row / unit**2 * 2.0**slopes) for row in curvatures]
    return Shaped((centers * unit).tolist(), matrices, start=(start * unit).tolist(), **options)


STEPS = {
    **CASES,
    "four tensors": (shaped(noise=0.25), dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1)),
    "ten on the digits": (
        dd.Digits(workers=10, alpha=0.3, hidden=8, batch_size=8),  # float32
        dd.TruncatedNormalSpeeds(10, std=1.0, seed=6),
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("lr", [0.25, LR])
@pytest.mark.parametrize("case", STEPS)
def test_every_step_is_that_of_the_rule(case, lr):
    """Every model that workers are sent is the one before, less a step that is recomputed from the gradients that the jobs
    name; and the model of the run is their mean with weights t (t + 1) ... (t + 9).
    """
    problem, speeds = STEPS[case]
    check = Steps(problem, lr)
    run = dd.simulate(dd.AutoDuDe(lr), problem, speeds, updates=120, watch=[check], evaluation=LAST)
    assert run.version == check.checked == 120 and len(set(run.trace.version)) > 60
    assert torch.equal(check.problem.start(0), check.sent[0])
    if case == "four tensors" and lr > 1:
        assert check.reach > 1.0  # it went farther than the weights were long, so that it measured its steps by that


@pytest.mark.numeric
def test_tensors_that_start_at_zero_are_measured_by_torch_s_start():
    """The first step moves every tensor by 0.098, 0.07 lr, of its size, where gradients agree: that of a matrix of zeros is
    1 / sqrt(3 inputs), that of a vector of zeros is the middle matrix's, that of any other its root mean square.
    """
    problem = shaped()
    run = dd.simulate(dd.AutoDuDe(), problem, dd.FixedSpeeds([1.0] * 4), updates=1, evaluation=LAST)
    roots = [float(part.square().mean().sqrt()) for part in run.state.pieces(run.x - run.state.start)]
    starts = [float(part.square().mean().sqrt()) for part in run.state.pieces(problem.start(0))]
    # the matrices' usual sizes are 1 / sqrt(15) and 1 / sqrt(6): of two the larger is the middle
    sizes = [1 / math.sqrt(15), starts[1], 1 / math.sqrt(6), starts[3]]
    # two of four are half, and of their heterogeneous gradients the mean is shorter than the root mean square
    gradients = torch.stack([problem.gradient(problem.start(0), worker, 0)[0] for worker in range(2)])
    shares = [
        float(mean.square().mean().sqrt() / square.mean().sqrt())
        for mean, square in zip(
            run.state.pieces(gradients.mean(0)), run.state.pieces(gradients.square().mean(0)), strict=True
        )
    ]
    expected = [0.07 * LR * size * share for size, share in zip(sizes, shares, strict=True)]
    # two dozen operations, some on numbers of the size of the weights, of which the step is a hundredth or more
    assert roots == pytest.approx(expected, rel=rounding(24 * 100), abs=0)


# What does not matter -------------------------------------------------------------------------------------------------

RANDOM = dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1)


@pytest.mark.parametrize("k", [-20, -1, 1, 20])
def test_the_size_of_the_loss_does_not_matter(k):
    """If all losses are 2^k times as large, not one bit of any model changes."""
    (run, models), (other, others) = (archive(dd.AutoDuDe(), shaped(slopes=s), RANDOM, updates=100) for s in (0, k))
    assert same(models, others) and torch.equal(run.state.z, other.state.z)


@pytest.mark.numeric
def test_losses_a_thousand_times_as_large_change_the_last_digits_alone():
    """If all losses are 1000 times as large, the models differ by rounding."""
    speeds, models = dd.TruncatedNormalSpeeds(4, std=1.0, seed=2), []
    for times in (1.0, 1000.0):
        centers = [[float(3 * worker), float(worker % 3)] for worker in range(4)]
        problem = dd.Quadratic(centers, [times] * 4, start=[1.0, -1.0])
        models.append(torch.stack(archive(dd.AutoDuDe(), problem, speeds, updates=100)[1]))
    # a weight moves by its size over the root mean square of the gradients, which are about the centers: lr / sqrt(t) of
    # what a gradient rounds in each step, less than 1 of it; no weight is larger than 9
    assert float((models[0] - models[1]).abs().max()) <= drift(100, 1.0, operations(problem) + 32) * 9


@pytest.mark.parametrize("units", [(3, 3, 3, 3), (-10, 5, 2, -1)], ids=["one for all", "for each tensor"])
def test_the_units_of_weights_do_not_matter(units):
    """If each tensor is measured in a unit of its own, 2^-k, with its slopes divided accordingly, then all models are those
    of the old units, bit for bit; of tensors that are not zero at the start.
    """
    (run, models), (_, others) = (
        archive(dd.AutoDuDe(), shaped(units=each, zeros=False), RANDOM, updates=100) for each in ((0, 0, 0, 0), units)
    )
    unit = torch.cat([torch.full_like(part, 2.0**k) for part, k in zip(run.state.pieces(run.x), units, strict=True)])
    assert same([x * unit for x in models], others)


# What comes of it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "speeds",
    [dd.FixedSpeeds([1.0, 2.0, 4.0]), dd.speeds.ExponentialSpeeds([9.0, 1.0, 0.1], seed=1)],
    ids=["fixed", "random, one ninety times as fast"],
)
def test_the_limit_is_the_solution_of_all_workers(speeds):
    """It comes to the minimum of the mean loss, whatever the speeds. Where its models have come to rest before update t,
    their mean has (t / T)^11 of its distance left at update T: a 2048th at twice as many updates, of which a hundredth is
    asked for because they are still coming to rest.
    """
    problem = dd.Quadratic([[0.0, 1.0], [2.0, -1.0], [4.0, 0.0]], [1.0, [[2.0, 0.5], [0.5, 1.0]], 0.5])
    optimum, errors = problem.optimum(), {}

    def keep(s, a):
        errors[s.version] = float((s.x - optimum).norm() / optimum.norm())

    dd.simulate(dd.AutoDuDe(), problem, speeds, updates=3000, watch=[keep], evaluation=LAST)
    assert errors[1500] < 0.01 and errors[3000] < 0.01 * errors[1500]


@pytest.mark.parametrize("seed", [0, 6])  # in the second one worker gives most gradients
def test_with_no_argument_it_learns_the_digits(seed):
    """With its default settings it learns digits that are split by class, on heterogeneous workers."""
    speeds = dd.TruncatedNormalSpeeds(10, std=5.0, seed=seed)
    run = dd.simulate(dd.AutoDuDe(), dd.Digits(workers=10, alpha=0.1), speeds, time=300.0)
    assert run.metrics.accuracy[-1] > 0.85 and run.metrics.objective[-1] < 0.5


def test_what_workers_are_sent_is_the_model_that_moves_and_what_a_run_gives_is_the_mean():
    """Workers compute at z, a run is evaluated at x, and the first of both is the same."""
    method, s = server(3, start=1.0)
    method.step(s, arrival(0, 1.0))
    method.step(s, arrival(1, 4.0))
    assert s.version == 1 and float(s.z) == float(s.x) != 1.0
    method.step(s, arrival(2, 4.0))
    assert s.version == 2 and float(s.z) < float(s.x) < 1.0 and float(method.model(s, 0)) == float(s.z)
    run = dd.simulate(dd.AutoDuDe(), heterogeneous(3), dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=20)
    assert run.metrics.objective[-1] == heterogeneous(3).evaluate(run.x)["objective"] and not torch.equal(
        run.x, run.state.z
    )


# Workers that leave and return ----------------------------------------------------------------------------------------


@pytest.mark.numeric
def test_the_first_gradient_of_a_worker_that_returns_counts_whole():
    """A worker that has left is not waited for, and the first gradient after its return is its running mean."""
    (method, s), close = server(2), rounding(32)
    assert method.step(s, arrival(0, 1.0)) == [dd.send(0)] and s.version == 1 and float(s.total) == 1.0
    assert method.leave(s, 1) == []
    method.step(s, arrival(0, 3.0, version=1, draw=1))
    mean = 1.0 + 2.0 * (1 - math.exp(-1 / 8))
    assert float(s.total) == pytest.approx(mean, rel=close, abs=0) and s.counted == 1
    assert method.join(s, 1) == [dd.send(1)]
    before = float(s.z)
    assert method.step(s, arrival(1, 5.0, version=2)) == [dd.send(1)] and s.counted == s.n == 2
    assert float(s.total) == pytest.approx(mean + 5.0, rel=close, abs=0)
    # along the mean of both means, nothing being new; the delays are 3 - 1 and 3 - 2, the scale is that of 1, 9 and 25
    scale = math.sqrt(sum(0.999 ** (3 - t) * g**2 for t, g in ((1, 1.0), (2, 3.0), (3, 5.0))) / (1 + 0.999 + 0.999**2))
    step = 0.07 * LR / math.sqrt(3) * (mean + 5.0) / 2 / scale  # of the size that one weight of zero has
    assert before - float(s.z) == pytest.approx(step, rel=close, abs=close)


def test_the_gradient_of_a_worker_that_leaves_while_it_waits_is_dropped():
    """A worker that has reported and leaves before the update is not part of the update."""
    method, s = server(5)
    s.wait_for = 3
    assert method.step(s, arrival(0, 1.0)) == method.step(s, arrival(1, 100.0)) == []
    assert method.leave(s, 1) == [] and s.version == 0
    assert method.step(s, arrival(2, 4.0)) == [dd.send(0), dd.send(2)]  # half of the four that are left
    assert float(s.total) == 5.0 and s.uncounted == {1, 3, 4}


def test_when_the_worker_that_is_waited_for_leaves_the_update_is_made():
    """Where all have to report and the last one leaves, those that have reported are an update; of one that has none to
    make, nothing comes.
    """
    method, s = server(3)
    s.wait_for = 3
    assert method.step(s, arrival(0, 1.0)) == [] and method.step(s, arrival(1, 2.0)) == [dd.send(0), dd.send(1)]
    s.wait_for = 3  # worker 2 has not reported: nobody waits for it
    assert method.step(s, arrival(2, 3.0)) == []  # now all count, and all are waited for
    assert method.step(s, arrival(0, 3.0, version=1, draw=1)) == [] and s.version == 1
    assert method.leave(s, 1) == [dd.send(2), dd.send(0)] and s.version == 2 and s.uncounted == {1}
    assert method.leave(s, 0) == [] and s.version == 2


# With an optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("case", ["noisy", "digits"])
def test_with_an_optimizer_it_steps_by_that_along_the_direction(case, momentum):
    """With torch's SGD every model is the one before less lr times the direction, which momentum adds up; there is no other
    model, and no mean of models.
    """
    (problem, speeds), lr = CASES[case], 0.05
    hand, velocity = Steps(problem, lr), 0.0

    def check(s, a):
        nonlocal velocity
        hand.fresh[a.worker] = problem.gradient(hand.sent[a.version], a.worker, a.job.draw)[0].double()
        hand.taken_at[a.worker] = a.version
        if s.version == len(hand.sent):
            velocity = momentum * velocity + hand.direction(s.version)[0]
            expected = hand.sent[-1].double() - lr * velocity
            size = max(hand.largest, float(expected.abs().max()))
            # the weights' own last digits, and what the means have lost, which momentum adds up twofold at most
            close = rounding(2 + 2 * lr * 4 * (8 + problem.workers), s.x.dtype) * size
            assert float((s.x.double() - expected).abs().max()) <= close
            assert dd.AutoDuDe(lr).model(s, 0) is s.x
            hand.sent.append(s.x.clone())
            hand.fresh = {}

    options = {"updates": 40, "watch": [check], "server": dd.Server(optimizer=f"SGD[momentum={momentum}]")}
    run = dd.simulate(dd.AutoDuDe(lr), problem, speeds, evaluation=LAST, **options)
    assert run.version == len(hand.sent) - 1 == 40


# Its setting ----------------------------------------------------------------------------------------------------------


def test_it_has_one_setting():
    """How many workers are waited for cannot be set, and its name alone stands for its defaults."""
    for name in ("wait_for", "delay", "power", "longest", "nearest"):
        with pytest.raises(dd.BadInput, match=name):
            parse("algorithm", f"auto[{name}=3]")
    assert parse("algorithm", "auto") == dd.AutoDuDe() == dd.AutoDuDe(1.4) and label(dd.AutoDuDe()) == "auto"
    assert parse("algorithm", "auto[lr=0.5]") == dd.AutoDuDe(0.5)
