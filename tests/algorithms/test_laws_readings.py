"""Two readings of one method

Where a paper's text and its authors' code differ, or a paper leaves a choice, a setting of the method decides: FADAS's step
for late buffers, whether Rennala and Malenia stop the jobs of a round that is over, and FedAsync's proximal term.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import dualdelay as dd
from dualdelay.runs.names import label
from helpers import apart, archive, drift, rounding, same
from tables import CASES, LR

FADAS, FedAsync = dd.algorithms.FADAS, dd.algorithms.FedAsync
Malenia, Rennala = dd.algorithms.MaleniaSGD, dd.algorithms.RennalaSGD
SIZE = 64.0  # no weight and no gradient is larger

# FADAS ----------------------------------------------------------------------------------------------------------------


def staleness(run):
    """The largest number of updates that a buffer's gradients missed, for each update."""
    before = np.concatenate([[0], run.trace.after[:-1]])
    return [int((before - run.trace.version)[before == v].max()) for v in range(run.version)]


@pytest.mark.numeric
@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_late_step_of_fadas_is_divided_by_its_delay(late):
    """FADAS with a limit on delays makes the steps of FADAS without one, those of later buffers divided by their largest
    delay.

    Catches a delay that is off by one, and a limit that is meant for the delays of single gradients.
    """
    # without memory and with an eps beside which the root vanishes a step is the mean of the buffer, whatever came before
    options = {"buffer": 2, "betas": (0.0, 0.0), "eps": 2.0**80}
    problem, speeds = dd.Quadratic([[64.0]] * 3), dd.FixedSpeeds([0.83, 1.37, 9.01])
    run, models = archive(FADAS(LR * 2.0**80, late=late, **options), problem, speeds, updates=30)
    shrunk = 0
    for k, (x, y) in enumerate(pairwise(map(float, models))):
        before = np.concatenate([[0], run.trace.after[:-1]]) == k
        mean = np.mean([float(models[u]) - 64.0 for u in run.trace.version[before]])
        delay = staleness(run)[k]
        expected = LR * mean / (delay if delay > late else 1)
        shrunk += delay > late
        assert x - y == pytest.approx(expected, rel=rounding(64), abs=rounding(4) * SIZE)
    assert shrunk > 0


def test_the_papers_rule_is_inert_at_small_steps_and_the_codes_is_not():
    """FADAS that clips late steps at 1 / delay is FADAS without a limit as long as lr is below 1 / delay, bit for bit;
    dividing by the delay changes every late step.

    Catches one rule that is taken for the other.
    """
    runs = {
        rule: archive(FADAS(LR, buffer=2, late=1, rule=rule), *CASES["noisy"], updates=60) for rule in ("clip", "divide")
    }
    _, plain = archive(FADAS(LR, buffer=2), *CASES["noisy"], updates=60)
    assert 1 < max(staleness(runs["clip"][0])) < 1 / LR
    assert same(runs["clip"][1], plain) and not same(runs["divide"][1], plain)
    _, clipped = archive(FADAS(0.75, buffer=2, late=1, rule="clip"), *CASES["noisy"], updates=60)
    assert not same(clipped, archive(FADAS(0.75, buffer=2), *CASES["noisy"], updates=60)[1])  # 1 / 2 is less


@pytest.mark.numeric
def test_corrected_means_begin_with_steps_of_full_length():
    """With corrected means FADAS's first step moves every number by lr, as Adam's does; without, by lr (1 - beta_1) /
    sqrt(1 - beta_2).

    Catches a correction that counts updates from zero.
    """
    for correct, length in ((True, LR), (False, LR * 0.1 / 0.1)):
        method = FADAS(LR, buffer=2, betas=(0.9, 0.99), eps=1e-30, correct_means=correct)
        _, models = archive(method, *CASES["noisy"], updates=1)
        assert (models[1] - models[0]).abs().tolist() == pytest.approx([length] * 2, rel=rounding(64))
    method = FADAS(LR, buffer=2, betas=(0.5, 0.99), eps=1e-30)
    _, models = archive(method, *CASES["noisy"], updates=1)
    assert (models[1] - models[0]).abs().tolist() == pytest.approx([LR * 0.5 / 0.1] * 2, rel=rounding(64))


# Rounds that are over -------------------------------------------------------------------------------------------------

ROUNDS = [kind(1 / 8, gradients=g, cancel=c) for kind, g in ((Rennala, 5), (Malenia, 6)) for c in (True, False)]


@pytest.mark.numeric
@pytest.mark.parametrize("method", ROUNDS, ids=label)
def test_a_round_has_the_gradients_of_its_own_model_alone(method):
    """Rennala's and Malenia's updates are made of gradients at the current model alone: jobs under way at the end of a
    round are stopped, or arrive and are not used.

    Catches a late gradient that is used, and one that counts for the end of a round.
    """
    problem, speeds = CASES["noisy"]
    fresh, n = [], problem.workers
    before = problem.start(0)

    def check(s, a):
        nonlocal before, fresh
        version = s.version - (not same([s.x], [before]))  # the one before an update, if this has made one
        if a.version == version:
            fresh.append((a.worker, a.value))
        if s.version > version:
            own = [[g for i, g in fresh if i == worker] for worker in range(n)]
            counts = [len(gradients) for gradients in own]
            assert sum(counts) == 5 if isinstance(method, Rennala) else n * n / sum(1 / c for c in counts) >= 6 - 1e-9
            if isinstance(method, Rennala):
                mean = sum(g for _, g in fresh) / 5
            else:
                mean = sum(sum(gradients) / len(gradients) for gradients in own) / n
            assert float((before - s.x - mean / 8).abs().max()) <= rounding(32) * SIZE
            before, fresh = s.x, []

    run = dd.simulate(method, problem, speeds, updates=20, watch=[check])
    late = (np.concatenate([[0], run.trace.after[:-1]]) > run.trace.version).sum()
    assert (late == 0) == method.cancel
    draws = [run.trace.draw[run.trace.worker == i].tolist() for i in range(n)]
    assert any(own != list(range(len(own))) for own in draws) == method.cancel  # some never arrive


def test_an_unheard_job_makes_its_worker_late_by_hand():
    """If a job under way at the end of a round ends unheard, its worker gets the new model only then.

    Catches a worker that is sent the new model while it still computes, or never.
    """
    # seconds 1 and 1.5, two gradients a round: at 1 worker 0, which goes on, at 1.5 worker 1, and the round is over.
    # Unheard: at 2 worker 0 arrives late and begins; at 3 worker 1, sent before, and worker 0 end the second round; worker
    # 1, which went on at 3, is late at 4.5; worker 0 arrives at 4 and 5, and ends the third alone.
    problem, speeds = dd.Quadratic([[0.0], [8.0]]), dd.FixedSpeeds([1.0, 1.5])
    run, models = archive(Rennala(1 / 2, gradients=2, cancel=False), problem, speeds, updates=3)
    assert run.trace.time.tolist() == [1.0, 1.5, 2.0, 3.0, 3.0, 4.0, 4.5, 5.0]
    assert run.trace.worker.tolist() == [0, 1, 0, 1, 0, 0, 1, 0]
    assert run.trace.version.tolist() == [0, 0, 0, 1, 1, 2, 1, 2]
    # x: 0, then 0 - (0 - 8) / 4 = 2, then 2 - (2 - 6) / 4 = 3, then 3 - (3 + 3) / 4 = 3/2
    assert [float(x) for x in models] == [0.0, 2.0, 3.0, 1.5]
    # Cancelled: both begin anew at 1.5, so that rounds are alike
    run, models = archive(Rennala(1 / 2, gradients=2), problem, speeds, updates=3)
    assert run.trace.time.tolist() == [1.0, 1.5, 2.5, 3.0, 4.0, 4.5]
    assert [float(x) for x in models] == [0.0, 2.0, 3.0, 3.5]


# FedAsync -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case != "local steps"])
def test_with_one_local_step_the_proximal_term_does_nothing(case):
    """FedAsync with one local step is the same whatever the weight of its proximal term, bit for bit: its slope is zero
    where the step begins.

    Catches a proximal term whose slope is taken at the worker's last model or at the server's current one.
    """
    methods = (FedAsync(LR, proximal=rho) for rho in (0.0, 7.5))
    assert same(*(archive(method, *CASES[case], updates=50)[1] for method in methods))


@pytest.mark.parametrize("case", [case for case in CASES if case != "local steps"])
def test_local_steps_of_fedasync_are_those_of_any_problem(case):
    """FedAsync with k local steps and no proximal term is FedAsync on the problem with k local steps of the same size, bit
    for bit and at the same times.

    Catches minibatches that are skipped or used twice, and a job that takes the time of one gradient.
    """
    problem, speeds = CASES[case]
    own, wrapped = (
        archive(FedAsync(LR, steps=steps), given, speeds, updates=50)
        for steps, given in ((3, problem), (1, dd.LocalSteps(problem, 3, LR)))
    )
    assert same(own[1], wrapped[1]) and own[0].trace.time.tolist() == wrapped[0].trace.time.tolist()


@pytest.mark.numeric
@pytest.mark.parametrize("rho", [0.0, 1.0, 3.0])
def test_many_proximal_steps_lead_to_the_proximal_point(rho):
    """So many local steps that they come to rest lead to the minimum of f_i + (rho / 2) ||y - x||^2: from x to
    (a b + rho x) / (a + rho) for f_i = a (y - b)^2 / 2.

    Catches a wrong factor or sign of the proximal term.
    """
    # with alpha = 1 and one worker x <- y; 200 steps of 1/8 with a = 2 shrink the rest by (1 - (2 + rho) / 8)^200
    problem = dd.Quadratic([[12.0]], [2.0], start=[4.0])
    method = FedAsync(1 / 8, alpha=1.0, steps=200, proximal=rho)
    _, models = archive(method, problem, dd.FixedSpeeds([1.0]), updates=3)
    expected = [4.0]
    for _ in range(3):
        expected.append((2 * 12 + rho * expected[-1]) / (2 + rho))
    assert apart(models, [x.new_tensor([y]) for x, y in zip(models, expected, strict=True)]) <= drift(600, 1 / 8, 8) * SIZE
