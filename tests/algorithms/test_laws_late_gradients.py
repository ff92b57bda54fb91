"""Late gradients

Methods that keep a late gradient and do something about its age: DC-ASGD corrects it by how far the model has moved, OrMo
files it in its momentum where it would have been in time, and Ringmaster LMO takes steps of one length along a momentum of
those that are not too old.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import dualdelay as dd
from helpers import apart, archive, heterogeneous, rounding, same
from tables import CASES, LR

DCASGD, LMO, OrMo = dd.algorithms.DCASGD, dd.algorithms.RingmasterLMO, dd.algorithms.OrMo
cases = pytest.mark.parametrize("case", CASES)
SIZE = 64.0  # no weight and no gradient is larger


def arrival(worker, version, *value, draw=0):
    return dd.Arrival(dd.Job(worker, draw, version), torch.tensor(value, dtype=torch.float64), 1.0, 1.0, 0.0)


# DC-ASGD --------------------------------------------------------------------------------------------------------------


@cases
@pytest.mark.parametrize("adaptive", [False, True], ids=["constant", "adaptive"])
def test_without_compensation_dc_asgd_is_vanilla(case, adaptive):
    """DC-ASGD with lambda = 0 is vanilla ASGD, bit for bit.

    Catches a gradient that is changed in another way than by lambda.
    """
    methods = DCASGD(0.01, strength=0.0, adaptive=adaptive), dd.VanillaASGD(0.01)
    assert same(*(archive(method, *CASES[case], updates=50)[1] for method in methods))


@pytest.mark.parametrize("adaptive", [False, True], ids=["constant", "adaptive"])
def test_a_fresh_gradient_is_not_compensated(adaptive):
    """Under DC-ASGD a gradient that was taken at the current model is used as it is, whatever lambda.

    Catches a correction by the model before the last update, which is not that of the worker.
    """
    # speeds for which worker 0 reports three times between two reports of worker 1: its second and third are fresh
    runs = [
        archive(method, dd.Quadratic([[4.0], [8.0]]), dd.FixedSpeeds([1.0, 3.5]), updates=4)
        for method in (DCASGD(1 / 2, strength=1 / 64, adaptive=adaptive), dd.VanillaASGD(1 / 2))
    ]
    (run, models), (_, vanilla) = runs
    assert run.trace.worker.tolist() == [0, 0, 0, 1] and same(models[:4], vanilla[:4]) and not same(models, vanilla)


def test_the_compensation_by_hand():
    """A gradient g that is late is used as g + lambda g g (x - x_then), with the model that its own worker was sent.

    Catches a wrong sign, and the model of another worker or of another version.
    """
    # 1: worker 0, g = -4, x = 2. 1.5: worker 1, g = -8 at 0, x - 0 = 2, so -8 + 64 * 2 / 64 = -6, x = 5. 2: worker 0,
    # g = -2 at 2, x - 2 = 3, so -2 + 4 * 3 / 64 = -29/16, x = 5 + 29/32
    problem, speeds = dd.Quadratic([[4.0], [8.0]]), dd.FixedSpeeds([1.0, 1.5])
    _, models = archive(DCASGD(1 / 2, strength=1 / 64), problem, speeds, updates=3)
    assert [float(x) for x in models] == [0.0, 2.0, 5.0, 5 + 29 / 32]


def test_the_adaptive_compensation_by_hand():
    """Adaptive DC-ASGD divides lambda by the root of a mean of squares that has the arriving gradient in it already; it is
    one mean for all, or each worker's own.

    Catches a mean that is used before it is moved, and means that are mixed up.
    """
    # as above with decay 3/4 and eps 1: g = -4, mean 4, fresh. Then g = -8: mean 3 + 16 = 19, or 16 of its own
    problem, speeds = dd.Quadratic([[4.0], [8.0]]), dd.FixedSpeeds([1.0, 1.5])
    for own, mean in ((False, 19.0), (True, 16.0)):
        method = DCASGD(1 / 2, strength=0.5, adaptive=True, decay=0.75, eps=1.0, own_means=own)
        _, models = archive(method, problem, speeds, updates=2)
        expected = 2 + (8 - 0.5 / math.sqrt(mean + 1) * 64 * 2) / 2
        assert float(models[2]) == pytest.approx(expected, rel=rounding(16), abs=0)


# OrMo -----------------------------------------------------------------------------------------------------------------


@cases
def test_ormo_without_momentum_is_vanilla(case):
    """OrMo with a momentum of zero is vanilla ASGD, bit for bit.

    Catches a late gradient that is weighted in another way than by the momentum.
    """
    assert same(*(archive(method, *CASES[case], updates=50)[1] for method in (OrMo(0.01, 0.0), dd.VanillaASGD(0.01))))


def test_ormo_with_one_worker_is_heavy_ball():
    """OrMo with one worker is SGD with momentum: u <- beta u + g, x <- x - lr u.

    Catches a decay that comes an update too early or too late.
    """
    # so few bits that eight updates round nothing
    _, models = archive(OrMo(1 / 8, momentum=0.5), dd.Quadratic([[40.0]]), dd.FixedSpeeds([1.0]), updates=8)
    x = u = 0.0
    for model in models:
        assert float(model) == x
        u = u / 2 + (x - 40.0)
        x -= u / 8


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_ormo_does_not_depend_on_the_order_of_arrivals(order):
    """Under OrMo the model and the momentum after some arrivals depend on which gradients of which groups have arrived, not
    on their order.

    Catches a late gradient whose weight is that of its arrival, as under momentum in the order of arrivals.
    """

    # five workers: those of group 0 come in any order, and two of group 1 before, between or after them; nothing rounds
    def after(sequence):
        method = OrMo(1 / 4, momentum=0.5)
        s = method.init(torch.zeros(1, dtype=torch.float64), 5, dd.Draws(0, ""))
        s.groups = [0, 0, 0, 1, 1]  # of the models that the workers have
        s.group, s.room, s.opens = 1, 1, True  # group 1 opens with the first of these arrivals, and group 2 with the third
        s.momentum = torch.tensor([8.0], dtype=torch.float64)
        for worker in sequence:
            method.step(s, arrival(worker, 0, 2.0 ** (worker + 3)))
        return float(s.x), float(s.momentum), s.group, s.room

    expected = after([0, 1, 2, 3, 4])
    for early in range(4):
        sequence = [*order[:early], 4, *order[early:]]
        assert after([*sequence, 3]) == after([3, *sequence]) == expected


@pytest.mark.numeric
@pytest.mark.parametrize("case", ["q3", "noisy", "logistic"])
def test_ormo_is_a_sum_over_groups(case):
    """Under OrMo the momentum is the sum of beta^(G - group) g over all gradients, and the model is the initial one less lr
    times the sum of (1 - beta^(G - group + 1)) / (1 - beta) g, where version u is of group ceil(u / n) and G is the newest.

    Catches a group that opens too early or too late, and a catch-up that lacks a term.
    """
    beta, (problem, speeds) = 0.75, CASES[case]
    n, seen = problem.workers, []

    def check(s, a):
        seen.append((math.ceil(a.version / n), a.value))
        G = math.ceil((len(seen) - 1) / n)
        u = sum(beta ** (G - group) * g for group, g in seen)
        x = problem.start(0) - LR * sum((1 - beta ** (G - group + 1)) / (1 - beta) * g for group, g in seen)
        close = rounding(8 * len(seen)) * SIZE / (1 - beta)
        assert float((s.momentum - u).abs().max()) <= close and float((s.x - x).abs().max()) <= close

    run = dd.simulate(OrMo(LR, momentum=beta), problem, speeds, updates=60, watch=[check])
    assert len(seen) == 60 and max(60 - run.trace.version) > n  # some are late


# Ringmaster LMO -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["q3", "noisy", "logistic", "digits"])
def test_a_sign_lmo_without_memory_is_asynchronous_signsgd(case):
    """Ringmaster LMO with a threshold that no delay reaches, alpha = 1 and the ball of the largest entry is asynchronous
    signSGD: x <- x - lr sign(g) at every arrival, bit for bit.

    Catches a momentum that is not forgotten, and a step that has another length.
    """
    problem, speeds = CASES[case]
    x = problem.start(0)

    def check(s, a):
        nonlocal x
        x = x - LR * a.value.sign()
        assert torch.equal(s.x, x)

    run = dd.simulate(LMO(LR, alpha=1.0, lmo="sign", threshold=10**9), problem, speeds, updates=40, watch=[check])
    assert run.version == 40 and max(run.trace.after - run.trace.version) > 1


@cases
def test_a_vector_that_follows_its_momentum_is_ringmaster(case):
    """Ringmaster LMO with alpha = 1 moves what is no matrix as Ringmaster ASGD does, bit for bit.

    Catches a threshold or a momentum that differs, and numbers of a network that are put into another place.
    """
    methods = LMO(0.01, alpha=1.0, threshold=4), dd.algorithms.RingmasterASGD(0.01, threshold=4)
    models, expected = (archive(method, *CASES[case], updates=50)[1] for method in methods)
    if case != "digits":
        assert same(models, expected)
        return
    layout = CASES[case][0].layout()
    vectors = [(first, first + math.prod(shape)) for _, first, shape in layout if len(shape) < 2]
    assert len(vectors) == 2 and all(torch.equal(models[1][a:b], expected[1][a:b]) for a, b in vectors)
    assert not torch.equal(models[1], expected[1])


@pytest.mark.numeric
def test_the_spectral_step_of_a_network():
    """The spectral step moves every matrix U S V' of a network along U W V' with all of W near one, times
    sqrt(max(1, rows / columns)), and a vector along its momentum.

    Catches a matrix that is read in another shape, and a tensor that is moved by another's step.
    """
    problem, speeds = CASES["digits"]
    method, moved = LMO(LR, alpha=0.5, threshold=9), 0
    before, m = problem.start(0), torch.zeros_like(problem.start(0))

    def check(s, a):
        nonlocal before, m, moved
        m = 0.5 * a.value + 0.5 * m
        step = (before - s.x) / LR
        before = s.x
        for _, first, shape in problem.layout():
            own, part = (v[first : first + math.prod(shape)].view(shape).double() for v in (step, m))
            if len(shape) < 2:
                assert float((own - part).abs().max()) <= rounding(4, torch.float32) / LR
                continue
            U, S, V = torch.linalg.svd(part, full_matrices=False)
            W = U.T @ own @ V.T / math.sqrt(max(1.0, shape[0] / shape[1]))
            large = 0.01 * S[0] < S  # the iteration takes longer to bring the smallest ones to one
            off = W - torch.diag(torch.diag(W))
            assert float(off.abs().max()) <= 0.01 and bool(((W.diag() - 1).abs() < 0.25)[large].all())
            moved += 1

    dd.simulate(method, problem, speeds, updates=10, watch=[check])
    assert moved == 20


def test_the_euclidean_step_has_length_one():
    """The Euclidean step moves the whole model by lr along its momentum.

    Catches a norm that is taken number by number.
    """
    _, models = archive(LMO(LR, lmo="euclidean"), *CASES["noisy"], updates=30)
    lengths = [float((a - b).norm()) for a, b in itertools.pairwise(models)]
    assert lengths == pytest.approx([LR] * 30, rel=1e-6)


@pytest.mark.numeric
def test_the_layout_reaches_methods_that_look_at_tensors():
    """A run tells a method that looks at the weights tensor by tensor where each tensor is; tied parameters are one.

    Catches a layout that is lost when a run is resumed or replayed.
    """
    run = dd.simulate(LMO(LR), CASES["digits"][0], CASES["digits"][1], updates=3)
    assert run.state.layout == [[0, [4, 64]], [256, [4]], [260, [10, 4]], [300, [10]]]
    flat = torch.arange(620.0).view(2, 310)
    run.state.weights = flat  # of two runs that advance together
    parts = run.state.shaped(flat)
    assert [tuple(part.shape) for part in parts] == [(2, 4, 64), (2, 4), (2, 10, 4), (2, 10)]
    assert torch.equal(run.state.flattened(parts), flat) and float(parts[2][1, 3, 2]) == 310 + 260 + 3 * 4 + 2


@pytest.mark.numeric
def test_the_agnostic_steps_shrink():
    """With steps that follow the number of updates Ringmaster LMO comes nearer and nearer to the solution.

    Catches an alpha, a threshold or a step that does not follow the updates.
    """
    problem = heterogeneous(1, 2)
    method = LMO(4.0, lmo="sign", agnostic=True)
    _, models = archive(method, problem, dd.FixedSpeeds([1.0]), updates=2000)
    lengths = [float((b - a).abs().max()) for a, b in itertools.pairwise(models)]
    assert lengths == pytest.approx([4.0 / (k + 1) ** 0.75 for k in range(2000)], rel=1e-9)
    assert apart(models[-50:], [torch.tensor(problem.settings["centers"][0], dtype=torch.float64)] * 50) < 60 * lengths[-1]
