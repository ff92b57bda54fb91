"""Local training and outer momentum

Methods of the DiLoCo family: workers take many local steps from the model and send how far they have moved, and the server
steps along that with a momentum of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import dualdelay as dd
from helpers import archive, drift, heterogeneous, overriding, rounding, same, stepping
from tables import CASES, LR

A = dd.algorithms
DiLoCo, DN, MLA, HeLoCo = A.AsyncDiLoCo, A.DelayedNesterov, A.MomentumLookAhead, A.HeLoCo
cases = pytest.mark.parametrize("case", CASES)
PLAIN = {"steps": 1, "inner_lr": 0.25, "momentum": 0.0, "weight": 1.0}


def models_of(methods, case, updates=40):
    return [archive(method, *CASES[case], updates=updates)[1] for method in methods]


def fed(method, *deltas, n=4):
    """The state of a server after these x - y, from workers in turn."""
    s = method.init(torch.zeros(1, dtype=torch.float64), n, dd.Draws(0, ""))
    for k, delta in enumerate(deltas):
        value = torch.tensor([delta], dtype=torch.float64)
        method.step(s, dd.Arrival(dd.Job(k % n, k // n, s.version), value, 1.0, 1.0, 0.0))
    return s


# Without local steps or momentum --------------------------------------------------------------------------------------

BARE = {
    "diloco": DiLoCo(LR, **PLAIN),
    "mla": MLA(LR, **PLAIN),
    "delayed nesterov": DN(LR, every=1, **PLAIN),
    "heloco": HeLoCo(LR, aligned=-1.0, **PLAIN),
}


@cases
@pytest.mark.parametrize("name", BARE)
def test_one_plain_local_step_without_momentum_is_vanilla(name, case):
    """With one local step of plain SGD and no momentum a method of the DiLoCo family is vanilla ASGD with the product of
    outer and inner step, bit for bit where the inner one is a power of two.

    Catches a pseudo-gradient that is divided or weighted by mistake, and a second model that workers are sent.
    """
    assert same(*models_of((BARE[name], dd.VanillaASGD(LR / 4)), case))


def test_by_default_an_arrival_of_diloco_counts_by_the_root_of_the_number_of_workers():
    """Asynchronous DiLoCo weights x - y by 1 / sqrt(n), HeLoCo too, the look-ahead and Delayed Nesterov do not.

    Catches a weight of 1 / n, and one that follows the size of the fleet where workers have left.
    """
    for kind, scale in ((DiLoCo, 0.5), (HeLoCo, 0.5), (MLA, 1.0), (DN, 0.25)):  # the last is 1 / N
        assert float(fed(kind(0.5, momentum=0.0), 8.0).x) == -4.0 * scale
    s = DiLoCo(0.5, momentum=0.0).init(torch.zeros(1), 5, dd.Draws(0, ""))
    DiLoCo(0.5).leave(s, 4)
    DiLoCo(0.5, momentum=0.0).step(s, dd.Arrival(dd.Job(0, 0, 0), torch.tensor([8.0]), 1.0, 1.0, 0.0))
    assert float(s.x) == -2.0  # four are left


@cases
def test_a_momentum_that_moves_at_every_arrival_is_not_delayed(case):
    """Delayed Nesterov with N = 1 is asynchronous DiLoCo with weight 1, whatever c, bit for bit.

    Catches a momentum that is used before it has moved.
    """
    options = {"steps": 2, "inner_lr": 0.25, "momentum": 0.5, "weight": 1.0}
    plain, *others = models_of((DiLoCo(LR, **options), *(DN(LR, every=1, spread=c, **options) for c in (0.0, 0.5))), case)
    assert all(same(plain, models) for models in others)


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_a_window_of_delayed_nesterov_is_one_step_on_the_mean(windows):
    """Delayed Nesterov with c = 0: after every N arrivals model and momentum are those of as many steps of Nesterov's, each
    along the mean of N arrivals.

    Catches a momentum that decays in between, or lacks the last arrival.
    """
    # so few bits that nothing rounds
    deltas = [8.0, -24.0, 40.0, 16.0, 0.0, 56.0, -8.0, 32.0, 64.0, 8.0, 8.0, -16.0][: 4 * windows]
    s = fed(DN(0.25, momentum=0.5), *deltas)
    mean = [sum(deltas[k : k + 4]) / 4 for k in range(0, len(deltas), 4)]
    one = fed(DiLoCo(0.25, momentum=0.5, weight=1.0), *mean)
    assert torch.equal(s.x, one.x) and torch.equal(s.momentum, one.momentum)
    partly = fed(DN(0.25, momentum=0.5), *deltas, 8.0)
    assert float(partly.x) == float(s.x) - 0.25 * 8 / 4 and torch.equal(partly.momentum, s.momentum)


def test_the_momentum_of_a_window_is_used_once_however_it_is_spread():
    """Over a window Delayed Nesterov uses its momentum once, whatever c: c of the old one at each of the first N - 1
    arrivals and 1 - (N - 1) c of the new one at the last.

    Catches weights that do not add up to one.
    """
    for c in (0.0, 0.125, 0.25):
        first = fed(DN(0.25, momentum=0.5, spread=c), *[16.0] * 4)
        s = fed(DN(0.25, momentum=0.5, spread=c), *[16.0] * 4, *[0.0] * 4)
        assert (float(first.momentum), float(s.momentum)) == (16.0, 8.0)
        assert float(first.x - s.x) == 0.25 * 0.5 * (3 * c * 16.0 + (1 - 3 * c) * 8.0)


@pytest.mark.numeric
def test_how_far_one_arrival_moves_the_model_in_all():
    """In all, one x - y moves the model by lr / (1 - beta) times itself under Nesterov's momentum, and by lr (1 + beta)
    under the look-ahead, whose momentum is a mean.

    Catches a momentum that lacks its factor 1 - beta, or has one too many.
    """
    zeros = [0.0] * 400  # 0.9^400 is 5e-19
    assert float(fed(DiLoCo(0.5, weight=1.0), 8.0, *zeros).x) == pytest.approx(-0.5 * 8 / 0.1, rel=rounding(800))
    assert float(fed(MLA(0.5), 8.0, *zeros).x) == pytest.approx(-0.5 * 8 * 1.9, rel=rounding(800))


# HeLoCo ---------------------------------------------------------------------------------------------------------------


@cases
def test_heloco_that_keeps_everything_is_the_look_ahead(case):
    """HeLoCo that keeps every tensor as it is, and whose workers begin at the server's model, is momentum look-ahead, bit
    for bit.

    Catches a correction of tensors that are to be kept, and tensors that change places.
    """
    options = {"steps": 2, "inner_lr": 0.25, "momentum": 0.5, "weight": 1.0}
    methods = HeLoCo(LR, aligned=-1.0, ahead_at_workers=False, **options), MLA(LR, **options)
    assert same(*models_of(methods, case))
    assert not same(*models_of((replace(methods[0], ahead_at_workers=True), methods[1]), case))


def corrected(delta, m, c_ok, k_s, beta_max, k_d, kappa, fade):
    """One tensor by the lines of the paper, in numpy, and what was done."""
    length, reference = np.linalg.norm(delta), np.linalg.norm(m)
    if length < 1e-8 or reference < 1e-8:
        return delta, "kept"
    c = delta @ m / (length * reference)
    conf = length / (length + kappa * reference + 1e-8)
    if c >= c_ok:
        return delta, "kept"
    if c < 0:
        beta = min(k_s * -c * conf, beta_max)
        return delta - beta * c * length * m / reference, "shrunk"
    lam = min(k_d * ((c_ok - c) / (c_ok + 0.2) if fade else 1 - c) * conf, 1.0)
    u = (1 - lam) * delta / length + lam * m / reference
    return length * u / np.linalg.norm(u), "turned"


@pytest.mark.numeric
@pytest.mark.parametrize("whole", [False, True], ids=["tensors", "whole"])
@pytest.mark.parametrize("fade", [False, True], ids=["jump", "fade"])
def test_heloco_corrects_every_tensor_by_its_angle(whole, fade):
    """HeLoCo treats every tensor of a network by its own cosine with the momentum: it is kept, what is against the momentum
    shrinks, or it is turned and keeps its length.

    Catches a cosine over the whole model, a branch that is taken at the wrong angle, and a weight that is used too early.
    """
    # in float64, so that a cosine near a limit is on the same side of it
    generator, layout = torch.Generator().manual_seed(0), [[0, [4, 8]], [32, [4]], [36, [3, 4]], [48, [3]]]
    options = {"shrink": 0.9, "most_shrunk": 0.25, "turn": 2.0, "caution": 0.5, "aligned": 0.6}
    method = HeLoCo(0.5, momentum=0.75, weight=0.5, fade=fade, whole=whole, **options)
    s = method.init(torch.zeros(51, dtype=torch.float64), 3, dd.Draws(0, ""))
    s.layout = layout
    x, m, done = np.zeros(51), np.zeros(51), []
    for k in range(200):
        delta = (torch.randn(51, generator=generator, dtype=torch.float64) + (k % 3)) * 3.0 ** (k % 5 - 2)
        method.step(s, dd.Arrival(dd.Job(k % 3, k // 3, k), delta, 1.0, 1.0, 0.0))
        G, ends = np.zeros(51), [0, 51] if whole else [0, 32, 36, 48, 51]
        for a, b in pairwise(ends):
            G[a:b], what = corrected(delta.numpy()[a:b], m[a:b], 0.6, 0.9, 0.25, 2.0, 0.5, fade)
            done.append(what)
        G *= 0.5
        m = 0.75 * m + 0.25 * G
        x = x - 0.5 * (G + 0.75 * m)
        close = rounding(64 * (k + 1)) * 64
        assert np.abs(s.momentum.numpy() - m).max() <= close and np.abs(s.x.numpy() - x).max() <= close
        ahead = method.model(s, 0).numpy()
        assert np.abs(ahead - (x - 0.5 * 0.75 * m)).max() <= close
    assert all(done.count(what) > 10 for what in ("kept", "shrunk", "turned"))


@pytest.mark.numeric
def test_heloco_in_the_plane_by_hand():
    """What HeLoCo makes of three vectors beside a momentum along the first axis.

    Catches a sign, and a length that changes in a turn.
    """
    # the first arrival makes the momentum (1 - 1/2) (8, 0) = (4, 0); without caution all is sure
    method = HeLoCo(1.0, momentum=0.5, weight=1.0, caution=0.0, aligned=0.5)

    def after(*second):
        s = method.init(torch.zeros(2, dtype=torch.float64), 2, dd.Draws(0, ""))
        for k, value in enumerate(((8.0, 0.0), second)):
            before = s.x
            method.step(s, dd.Arrival(dd.Job(0, k, k), torch.tensor(value, dtype=torch.float64), 1.0, 1.0, 0.0))
        moved = before - s.x  # G + m / 2 with m = (2, 0) + G / 2
        return ((moved - torch.tensor([1.0, 0.0])) / 1.25).tolist()

    # along: kept. Against: c = -1, half of it is taken away. At a right angle: c = 0, lambda = 1: turned along the momentum
    close = {"rel": 1e-8, "abs": 1e-7}  # the 1e-8 by which nothing is quite sure
    assert after(3.0, 4.0) == pytest.approx([3.0, 4.0], **close)
    assert after(-6.0, 0.0) == pytest.approx([-3.0, 0.0], **close)
    assert after(0.0, 5.0) == pytest.approx([5.0, 0.0], **close)
    # (-3, 4): c = -3/5, beta = 0.3 of the opposing part (-3, 0)
    assert after(-3.0, 4.0) == pytest.approx([-2.1, 4.0], **close)


# Local steps by speed -------------------------------------------------------------------------------------------------


def test_slow_workers_take_fewer_local_steps():
    """With dynamic local steps a worker takes max(1, floor(H v / v_max)) of them, by the speeds that were measured, and H
    in its first job.

    Catches a share of the slowest worker's speed, and a job of no steps at all.
    """
    speeds = dd.FixedSpeeds([1.0, 2.0, 3.5, 40.0])
    run = dd.simulate(DN(0.01, steps=8, dynamic=True), heterogeneous(4), speeds, time=800.0)
    steps = {i: run.trace.steps[run.trace.worker == i].tolist() for i in range(4)}
    assert [steps[i][0] for i in range(4)] == [8] * 4
    assert [set(steps[i][1:]) for i in range(4)] == [{8}, {4}, {2}, {1}]
    seconds = {i: set(run.trace.seconds[run.trace.worker == i][1:].tolist()) for i in range(4)}
    assert seconds == {0: {8.0}, 1: {8.0}, 2: {7.0}, 3: {40.0}}


def test_local_steps_follow_speeds_that_change():
    """Dynamic local steps follow the last measurement of each worker, and the fastest among those present.

    Catches a speed that is measured once, and the speed of a worker that has left.
    """
    # worker 0 takes a second, from its third job on four; worker 1 takes two
    speeds = dd.speeds.RecordedSpeeds([[1.0, 1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0], [2.0] * 8])
    run = dd.simulate(DiLoCo(0.01, steps=8, dynamic=True), heterogeneous(2), speeds, updates=9)
    own = [run.trace.steps[run.trace.worker == i].tolist() for i in range(2)]
    # 0: 8 s, 16 s, then 8 steps of 4 s to 48 s; 1: 16 s, then 4 steps, to 24, 32, 40, 48 s; at 48 worker 0 comes first,
    # with half of the other's speed, and then the other is the fastest
    assert own[0][:3] == [8, 8, 8] and own[1][:5] == [8, 4, 4, 4, 4]
    run = dd.simulate(DiLoCo(0.01, steps=8, dynamic=True), heterogeneous(2), speeds, updates=14)
    own = [run.trace.steps[run.trace.worker == i].tolist() for i in range(2)]
    assert own[0][3:5] == [4, 4] and set(own[1][5:]) == {8}
    fleet = dd.SimulatedFleet(dd.FixedSpeeds([1.0, 2.0]), changes=[dd.speeds.leave(0, 30.0)])
    run = dd.simulate(DiLoCo(0.01, steps=8, dynamic=True), heterogeneous(2), fleet, updates=12)
    later = run.trace.steps[(run.trace.worker == 1) & (run.trace.time > 41.0)]
    assert len(later) > 2 and set(later.tolist()) == {8}


# The inner optimiser's state ------------------------------------------------------------------------------------------


def adamw_moves(problem, worker, draw, x, optimizer, steps):
    """x - y after some steps of torch's AdamW on its one parameter."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.data = x.clone()
    for k in range(steps):
        parameter.grad = problem.gradient(parameter.data, worker, draw * steps + k)[0]
        optimizer.step()
    return x - parameter.data


def adamw():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))], lr=0.0625, weight_decay=0.125)


@pytest.mark.numeric
@pytest.mark.parametrize("state", ["reset", "keep"])
@pytest.mark.parametrize("lost", [None, 9, 14])
def test_the_inner_optimisers_state_is_kept_or_begins_anew(state, lost):
    """The state of an inner AdamW begins anew in each job or goes on from the worker's last one, as the user says; a worker
    that has lost it begins anew once, and goes on from there.

    Catches a state that is shared by workers, and one that is reset or kept in spite of the setting.
    """
    problem = heterogeneous(3, 2, noise=0.5)
    method = DiLoCo(0.25, steps=3, inner_lr=0.0625, inner="AdamW[weight_decay=0.125]", inner_state=state)
    optimizers = [adamw() for _ in range(3)]
    models, seen = [problem.start(0)], []

    def step(self, s, a):
        if state == "reset":
            optimizers[a.worker] = adamw()
        expected = adamw_moves(problem, a.worker, a.job.draw, models[a.version], optimizers[a.worker], 3)
        seen.append(float((a.value - expected).abs().max()))
        orders = DiLoCo.step(self, s, a)
        models.append(s.x)
        return orders

    watched = overriding(method, step=step)
    for event, loop in enumerate(stepping(watched, problem, dd.FixedSpeeds([1.0, 1.7, 0.6]), 30), 1):
        if event == lost:
            for worker in range(3):
                loop.fleet.forget(worker)
                memory = method.recover(loop.state, worker, {})
                assert memory is None
                loop.fleet.restore(worker, memory)
                optimizers[worker] = adamw()
        assert (len(loop.memories()) > 0) == (state == "keep" and event != lost)
    assert len(seen) == 30 and max(seen) <= drift(90, 0.0625, 32) * 8


def test_a_kept_state_changes_the_run():
    """An inner AdamW whose state is kept makes another run than one whose state is reset.

    Catches a setting without effect.
    """
    runs = [
        archive(DiLoCo(0.25, steps=3, inner="AdamW", inner_state=state), heterogeneous(3), CASES["q3"][1], updates=9)[1]
        for state in ("reset", "keep")
    ]
    assert same(runs[0][:3], runs[1][:3]) and not same(*runs)  # the first jobs of two workers are the same


def test_a_spread_beyond_one_is_refused():
    """Delayed Nesterov refuses a c above 1 / N, with which it would go back along its momentum at the end of a window.

    Catches a setting that turns the momentum round.
    """
    with pytest.raises(dd.BadInput, match=r"spread is 0\.5; expected 1 / 3 at most"):
        dd.simulate(DN(LR, spread=0.5), *CASES["q3"], updates=3)
    assert math.isfinite(float(dd.simulate(DN(LR, spread=1 / 3), *CASES["q3"], updates=3).x))
