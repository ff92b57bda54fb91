"""Workers with something of their own

SCAFFOLD, MimiC, DeFedAvg and ASO-Fed take several local steps in a job; SCAFFOLD's and ASO-Fed's workers keep vectors, and
AD-PSGD's have a model each. Methods are written a second time in `tests/local_work.py`, from their pseudo-code.
"""

from __future__ import annotations

import inspect
from dataclasses import fields

import numpy as np
import pytest
import torch

import dualdelay as dd
import local_work
from dualdelay.runs.names import label
from helpers import apart, archive, drift, heterogeneous, overriding, rounding, same, stepping
from pseudo_code import noise
from tables import ALGORITHMS, CASES, LR

A = dd.algorithms
STEP = 0.07
METHODS = [
    A.SCAFFOLD(STEP, steps=3),
    A.SCAFFOLD(STEP, steps=3, sampled=2),
    A.SCAFFOLD(STEP, steps=1, sampled=1, global_lr=0.75),
    A.MimiC(STEP),
    A.MimiC(STEP, steps=3, sampled=2),
    A.MimiC(STEP, steps=2, sampled=1),
    A.DeFedAvg(STEP),
    A.DeFedAvg(STEP, steps=1, sampled=1),
    A.DeFedAvg(STEP, steps=3, sampled=3),
    A.ASOFed(STEP),
    A.ASOFed(STEP, steps=2, beta=0.75, proximal=0.5),
    A.ASOFed(STEP, steps=3, compare_with="sent"),
    A.ASOFed(STEP, steps=2, dynamic=False),
    A.ADSAGA(STEP),
]
FLEETS = {  # the seconds of each worker's steps, job by job, curvatures a_i, centers b_i
    "ties": (((0.5,), (1.0,), (2.5,), (4.0,)), (1.0, 2.0, 0.5, 1.5), (0.0, 6.0, 12.0, -4.0)),
    "no ties": (((0.83,), (1.37,), (3.01,)), (1.0, 0.5, 2.0), (3.0, -2.0, 11.0)),
    "changing": (((0.5, 4.0, 1.25), (1.0, 0.75), (2.5, 0.5, 1.5, 8.0)), (1.0, 2.0, 0.5), (0.0, 6.0, -12.0)),
}
UPDATES = 60
SIZE = 64.0  # no weight and no gradient is larger
Q3 = dd.Quadratic([[0.0], [6.0], [12.0]]), dd.FixedSpeeds([1.0, 2.0, 4.0])
UNEVEN = dd.Quadratic([[0.0], [4.0]], [1.0, 3.0]), dd.FixedSpeeds([1.0, 2.0])  # the solution is 12 / 4 = 3
LAST = dd.Evaluation(every=10**6)  # the end alone


class Noisy(dd.Quadratic):
    """Gradients with the noise of the pseudo-code."""

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        return gradient + noise(worker, draw), loss


def close(updates, steps=1):
    return drift(updates, STEP, operations=32 * steps) * SIZE


@pytest.mark.numeric
@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("method", METHODS, ids=label)
def test_methods_with_local_work_make_the_models_of_their_pseudo_code(method, fleet):
    """SCAFFOLD, MimiC, DeFedAvg, ASO-Fed and ADSAGA make the models of their pseudo-code, version by version to
    rounding, from arrivals of the same workers at the same times.

    Catches 1/s in place of 1/n in a control variate, a raw mean in place of a corrected one, a history that takes in a
    gradient too early, and local steps on another minibatch.
    """
    seconds, a, b = FLEETS[fleet]
    reference = getattr(local_work, method.name)
    known = inspect.signature(reference).parameters
    options = {f.name: getattr(method, f.name) for f in fields(method) if f.name in known}
    updates = UPDATES
    if "drawn" in known:  # which workers are drawn is read from a run so long that all jobs of the first versions arrive
        updates, options["drawn"] = 6 * UPDATES, {}
    run, models = archive(method, Noisy([[c] for c in b], a), dd.speeds.RecordedSpeeds(seconds), updates=updates)
    arrivals = list(zip(run.trace.time.tolist(), run.trace.worker.tolist(), run.trace.version.tolist(), strict=True))
    for _, worker, version in arrivals if "drawn" in known else ():
        options["drawn"].setdefault(version, []).append(worker)
    for some in options.get("drawn", {}).values():
        some.sort()
    world = local_work.Local(seconds, a, b, method.most_steps)
    reference(world, UPDATES, **options)
    assert [float(x) for x in models[: UPDATES + 1]] == pytest.approx(
        world.models, rel=0, abs=close(UPDATES, method.most_steps)
    )
    assert arrivals[: len(world.arrivals)] == world.arrivals
    assert (run.trace.steps == method.most_steps).all()
    assert np.abs(np.diff(world.models)).max() > 1e-3


@pytest.mark.numeric
@pytest.mark.parametrize(
    "method",
    [
        A.SCAFFOLD(1 / 8, steps=1),
        A.MimiC(1 / 8),
        A.DeFedAvg(1 / 8, steps=1, sampled=1),
        A.ADSAGA(1 / 8),
        A.ADPSGD(1 / 8),
        A.ADPSGD(1 / 8, graph="ring"),
        dd.SyncSGD(1 / 8, wait_for=1),
    ],
    ids=label,
)
def test_one_worker_with_one_step_is_plain_sgd(method):
    """With one worker and one step SCAFFOLD, MimiC, DeFedAvg, ADSAGA, AD-PSGD and K-sync SGD are plain SGD.

    Catches a correction that does not cancel where there is nobody to be corrected by.
    """
    noisy, speeds = heterogeneous(1, 2, noise=1.0), dd.FixedSpeeds([0.75])
    run, models = archive(method, noisy, speeds, updates=30)
    x = noisy.start(0)
    expected = [x, *(x := x - noisy.gradient(x, 0, draw)[0] / 8 for draw in range(30))]
    assert apart(models, expected) <= drift(30, 1 / 8, 24) * 32
    assert run.time == 22.5


# SCAFFOLD -------------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("sampled", [None, 2])
def test_scaffold_with_zero_control_variates_is_local_sgd(sampled):
    """The first round of SCAFFOLD, in which all control variates are zero, is one of FedAvg: the workers' local steps,
    averaged; and so is every round if the workers forget theirs and the server does not learn of any.

    Catches a correction that is used before it is known, and local steps on other minibatches.
    """
    problem, speeds = CASES["noisy"]
    method = A.SCAFFOLD(0.05, steps=3, sampled=sampled)
    run, models = archive(method, problem, speeds, updates=1)
    ways = []
    for i in sorted(run.trace.worker.tolist()):
        y = problem.start(0)
        for k in range(3):
            y = y - 0.05 * problem.gradient(y, i, k)[0]
        ways.append(y)
    assert len(ways) == (sampled or 4)
    assert torch.allclose(models[1], torch.stack(ways).mean(0), rtol=0, atol=drift(3, 0.05, 32) * 16)

    def forgetful(self, memory, model, job):
        message, _ = A.SCAFFOLD.work(self, None, {**model, "c": torch.zeros_like(model["x"])}, job)
        return message, None

    if sampled is None:
        _, models = archive(overriding(method, work=forgetful), problem, speeds, updates=20)
        local = dd.LocalSteps(problem, 3, 0.05)
        _, fedavg = archive(dd.SyncSGD(0.05), local, speeds, updates=20)
        assert apart(models, fedavg) <= drift(60, 0.05, 64) * 16


@pytest.mark.numeric
@pytest.mark.parametrize("row", ["scaffold", "scaffold sampled"])
def test_the_control_variate_of_the_server_is_the_mean_of_the_workers(row):
    """Under SCAFFOLD c is the mean of the c_i of all workers present at all times, zero for those not heard, also if
    only some take part in a round, and if workers leave and join.

    Catches a mean over the workers of the round, and a correction that stays when its worker leaves.
    """
    method, worst = ALGORITHMS[row], 0.0
    for loop in stepping(method, *CASES["noisy"], 90):
        kept = [memory["c"] for memory in loop.memories().values()]
        c = method.model(loop.state, 0)["c"]
        worst = max(worst, float((c - sum(kept) / 4).abs().max()))
    assert worst <= rounding(90 * 4) * 16 and float(c.norm()) > 0.1
    changes = dd.speeds.announced([(3, 0.0, 2.5), (1, 4.0, 17.0), (0, 29.0, None)])
    fleet = dd.SimulatedFleet(CASES["noisy"][1], changes=changes)
    run = dd.simulate(method, CASES["noisy"][0], fleet, updates=60)
    assert run.state.present == [1, 2, 3] and run.version == 60


@pytest.mark.numeric
def test_scaffold_removes_the_drift_of_local_steps():
    """With unequal curvatures and five local steps SCAFFOLD comes to rest at the solution, 3, and FedAvg at 2.680532285.

    Catches a correction with a wrong sign or scale: it would move the limit.
    """
    # FedAvg: the shares a_i = 1 - (1 - 0.1 lambda_i)^5 of the ways to b_i cancel
    a = [1 - 0.9**5, 1 - 0.7**5]
    drifted = a[1] * 4 / sum(a)
    assert drifted == pytest.approx(2.680532285, abs=1e-9)
    fedavg = dd.simulate(A.MimiC(0.1, steps=5), *UNEVEN, updates=300, evaluation=LAST)
    assert float(fedavg.x) == pytest.approx(drifted, abs=rounding(64) * 40)
    for method, updates in ((A.SCAFFOLD(0.1), 500), (A.SCAFFOLD(0.1, sampled=1), 1500)):
        run = dd.simulate(method, *UNEVEN, updates=updates, evaluation=LAST)
        assert float(run.x) == pytest.approx(3.0, abs=1e-9)


def test_a_lost_control_variate_is_what_is_missing_from_the_sum():
    """A worker of SCAFFOLD that has lost its c_i gets n c less the others' back, so that the mean stays right.

    Catches a worker that goes on with zero, which moves the limit for good.
    """
    method = A.SCAFFOLD(0.1)
    *_, loop = stepping(method, *UNEVEN, 20)
    assert method.asks_others
    lost = loop.memories()[1]["c"]
    loop.fleet.forget(1)
    back = method.recover(loop.state, 1, loop.memories())["c"]
    assert abs(float(back - lost)) <= rounding(64) * 16 and abs(float(lost)) > 0.5
    loop.fleet.restore(1, {"method": {"c": back}})
    for _ in range(400):
        loop.advance()
    assert float(loop.state.x) == pytest.approx(3.0, abs=1e-6)


# MimiC ----------------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("steps", [1, 3])
def test_mimic_with_everybody_is_fedavg(steps):
    """If all workers take part in every round the corrections of MimiC cancel, and it is FedAvg; with one step that is
    synchronous SGD.

    Catches a correction by the raw mean, or one that does not cancel.
    """
    problem, speeds = CASES["noisy"]
    _, models = archive(A.MimiC(0.05, steps=steps), problem, speeds, updates=30)
    local = problem if steps == 1 else dd.LocalSteps(problem, steps, 0.05)
    _, fedavg = archive(dd.SyncSGD(0.05), local, speeds, updates=30)
    assert apart(models, fedavg) <= drift(30 * steps, 0.05, 64) * 32


@pytest.mark.numeric
def test_mimic_corrects_for_workers_that_are_not_there():
    """With some of the workers in each round the corrected updates of those that were there are the mean update itself, and
    MimiC stays nearer to the solution than FedAvg with the same rounds, which runs after whoever is there.

    Catches a correction of another worker, or one that is forgotten when its worker is not drawn.
    """

    def uncorrected(self, s):
        s.corrections = [torch.zeros_like(s.weights)] * s.workers
        A.MimiC.update(self, s)

    _, models = archive(A.MimiC(0.05, sampled=2), *Q3, updates=2000)
    _, plain = archive(overriding(A.MimiC(0.05, sampled=2), update=uncorrected), *Q3, updates=2000)
    spread, plain_spread = (float((torch.stack(x[500:]) - 6.0).pow(2).mean().sqrt()) for x in (models, plain))
    assert spread < 0.7 * plain_spread, (spread, plain_spread)


@pytest.mark.numeric
def test_mimic_stands_in_for_a_worker_that_left():
    """The corrections of MimiC stand in for a worker that has left: with losses of equal curvature the others stay at the
    solution of all, where they would go to their own without corrections.

    Catches a correction that is erased when a worker leaves, and a mean of raw updates.
    """
    # at rest at 6 the gradients are 6, 0, -6, so that without worker 2 the corrections of the others add up to -6
    fleet = dd.SimulatedFleet(Q3[1], changes=[dd.speeds.leave(2, 1001.0)])
    run = dd.simulate(A.MimiC(1 / 8), Q3[0], fleet, updates=600, evaluation=LAST)
    assert float(run.x) == pytest.approx(6.0, abs=rounding(64) * 12 * 8) and run.state.present == [0, 1]


# DeFedAvg -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_defedavg_with_one_step_and_one_worker_drawn_is_uniform_asgd(case):
    """DeFedAvg with K = 1 and s = 1 is Uniform ASGD, bit for bit, with the same draws.

    Catches a job that is given out twice or not at all, and draws among idle workers.
    """
    (run, models), (other, expected) = (
        archive(method, *CASES[case], updates=60) for method in (A.DeFedAvg(0.01, steps=1, sampled=1), dd.UniformASGD(0.01))
    )
    assert same(models, expected) and run.trace.time.tolist() == other.trace.time.tolist()


def test_defedavg_gives_every_worker_the_same_share_and_draws_different_ones():
    """After each update of DeFedAvg s different workers get the model, all as often, and there are as many jobs as
    workers but for those whose differences wait for the update.

    Catches draws that favour idle workers, and a worker that is drawn twice for one update.
    """
    drawn = {}
    run = dd.simulate(A.DeFedAvg(0.001, steps=2, sampled=2), *CASES["noisy"], updates=1200, evaluation=LAST)
    for worker, version in zip(run.trace.worker.tolist(), run.trace.version.tolist(), strict=True):
        drawn.setdefault(version, []).append(worker)
    assert all(len(set(some)) == len(some) <= 2 for version, some in drawn.items() if version)
    # 2000 draws of two of four: 500 each, with a standard deviation of sqrt(1000 / 4) = 16
    counts = np.bincount([worker for version in range(1, 1001) for worker in drawn.get(version, [])])
    assert all(abs(count - 500) < 5 * 16 for count in counts)
    for loop in stepping(A.DeFedAvg(0.01, sampled=2), *CASES["noisy"], 60):
        assert len(loop.fleet.in_flight) == 4 - loop.state.count == sum(loop.state.queued)


# ASO-Fed --------------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
def test_the_model_of_aso_fed_is_the_mean_of_the_workers_last_models():
    """Under ASO-Fed the server's model is the mean of the last models of the workers present, also when workers leave
    and join.

    Catches a model of a worker that left, and a difference to another model than its last.
    """
    worst = []

    def check(s, a):
        worst.append(float((s.x - sum(s.models[i] for i in s.present) / s.n).abs().max()))
        assert torch.equal(s.models[a.worker], a.value)

    changes = dd.speeds.announced([(3, 0.0, 2.5), (1, 4.0, 17.0), (0, 29.0, None)])
    fleet = dd.SimulatedFleet(CASES["noisy"][1], changes=changes)
    run = dd.simulate(A.ASOFed(0.1), CASES["noisy"][0], fleet, updates=80, watch=[check])
    assert run.state.n == 3 and max(worst) <= rounding(16 * 80) * 16 and len(worst) > 70


@pytest.mark.numeric
def test_what_aso_fed_compares_with_decides_where_it_ends():
    """With one local step ASO-Fed rests at the solution if a worker's model is compared with its last one, whatever the
    speeds, and goes round the point of workers weighted by their speeds if it is compared with the one sent; with the
    dynamic step slow workers count for more, by the logarithm of their mean delays.

    Catches a difference to the wrong model.
    """
    run = dd.simulate(A.ASOFed(0.1, steps=1, dynamic=False), *Q3, updates=1500, evaluation=LAST)
    assert float(run.x) == pytest.approx(6.0, abs=1e-8)
    _, models = archive(A.ASOFed(0.05, steps=1, dynamic=False, compare_with="sent"), *Q3, updates=2100)
    assert float(torch.stack(models[-700:]).mean()) == pytest.approx(24 / 7, abs=0.1)
    # seven updates in four seconds: mean delays 7/4, 7/2 and 7, whose logarithms are longer steps from 1 on
    r = np.maximum(1, np.log([7 / 4, 7 / 2, 7]))
    dynamic = dd.simulate(A.ASOFed(0.1, steps=1), *Q3, updates=1500, evaluation=LAST)
    assert float(dynamic.x) == pytest.approx(r @ [0, 6, 12] / r.sum(), abs=0.01)


def test_a_worker_of_aso_fed_that_has_lost_its_history_begins_without_one():
    """A worker of ASO-Fed that has lost what it kept goes on as at first: its next step is along the gradient alone.

    Catches a worker that corrects by a history it no longer has.
    """
    method = A.ASOFed(0.1, steps=1)
    *_, loop = stepping(method, *Q3, 21)
    kept = loop.memories()[2]
    loop.fleet.forget(2)
    assert method.recover(loop.state, 2, {}) is None and kept["jobs"] > 1 and abs(float(kept["h"])) > 0.1
    (job,) = [job for job in loop.fleet.in_flight if job.worker == 2]
    sent = loop.fleet._jobs[2][job.draw].model.x
    while 2 not in loop.memories():
        loop.advance()
    after = loop.memories()[2]
    assert torch.equal(after["v"], sent - 12.0) and float(after["h"]) == 0.0 and after["jobs"] == 1
    assert torch.equal(loop.state.models[2], sent - 0.1 * (sent - 12.0))


# ADSAGA ---------------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
def test_adsaga_makes_the_updates_of_saga_from_the_same_table():
    """From the same table and the same gradient ADSAGA makes the update of SAGA; it differs in which gradients arrive.

    Catches a mean that has the new gradient in it, and a correction with weight 1/n.
    """
    problem, speeds = CASES["q3"]
    method, pairs = A.ADSAGA(LR), []
    server, before = None, problem.start(0)

    def compare(s, a):
        nonlocal server, before
        if s.version > 1:
            server.weights = before
            method.step(server, a)
            pairs.append((s.x, server.x))
        elif s.version == 1:
            server = method.init(s.x, 3, dd.Draws(0, "server"))
            for worker in range(3):
                server.replace(worker, s.last(worker))
        before = s.x

    dd.simulate(A.SAGA(LR), problem, speeds, updates=60, watch=[compare])
    assert len(pairs) > 50 and apart(*zip(*pairs, strict=True)) <= drift(1, LR, 16) * 16


@pytest.mark.numeric
def test_adsaga_rests_at_the_solution_whatever_the_speeds():
    """With exact gradients ADSAGA comes to rest at the solution whatever the speeds, though fast workers step more often.

    Catches a bias towards fast workers: at rest every worker's news are zero, and so the mean of the table is.
    """
    run = dd.simulate(A.ADSAGA(2 * LR), *Q3, updates=3000, evaluation=LAST)
    assert float(run.x) == pytest.approx(6.0, abs=1e-9)
    uneven = dd.simulate(A.ADSAGA(2 * LR), *UNEVEN, updates=3000, evaluation=LAST)
    assert float(uneven.x) == pytest.approx(3.0, abs=1e-9)


# AD-PSGD --------------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("graph", ["complete", "ring"])
def test_ad_psgd_makes_the_models_of_its_pseudo_code(graph, fleet):
    """AD-PSGD makes the models of its pseudo-code, all workers' and their mean, if the same neighbours are drawn: those
    of the graph, all of them.

    Catches a gradient that is taken off before the average, or at the model from after it, and a neighbour beyond the ring.
    """
    seconds, a, b = FLEETS[fleet]
    method, partners, own = A.ADPSGD(STEP, graph=graph), [], []

    def step(self, s, a):
        before = list(s.models)
        orders = A.ADPSGD.step(self, s, a)
        (j,) = (j for j in range(s.workers) if s.models[j] is not before[j] and j != a.worker)
        partners.append((a.worker, j))
        own.append([float(x) for x in s.models])
        return orders

    speeds = dd.speeds.RecordedSpeeds(seconds)
    _, models = archive(overriding(method, step=step), Noisy([[c] for c in b], a), speeds, updates=UPDATES)
    world = local_work.Local(seconds, a, b)
    history = local_work.adpsgd(world, UPDATES, STEP, [j for _, j in partners])
    assert [float(x) for x in models] == pytest.approx(world.models, rel=0, abs=close(UPDATES))
    assert np.allclose(own, history, rtol=0, atol=close(UPDATES))
    n = len(a)
    met = {i: {j for worker, j in partners if worker == i} for i in range(n)}
    ring = {i: {(i - 1) % n, (i + 1) % n} for i in range(n)}
    assert all(met[i] <= (ring[i] if graph == "ring" else set(range(n)) - {i}) for i in range(n)) and len(met[0]) > 1


@pytest.mark.numeric
@pytest.mark.parametrize("row", ["adpsgd", "adpsgd ring"])
def test_the_server_of_ad_psgd_has_the_mean_of_the_workers_models(row):
    """Under AD-PSGD the server's model is the mean of the models of the workers present, also when workers leave and
    join, and averaging leaves it as it is; a job is one model down and one vector up.

    Catches an average that loses something of one of the two, a step that is not divided by n, and a model that stays
    when its worker leaves.
    """
    worst = []

    def check(s, a):
        worst.append(float((s.x - sum(s.models[i] for i in s.present) / s.n).abs().max()))

    changes = dd.speeds.announced([(3, 0.0, 2.5), (1, 4.0, 17.0), (0, 29.0, None)])
    fleet = dd.SimulatedFleet(CASES["noisy"][1], changes=changes)
    run = dd.simulate(ALGORITHMS[row], CASES["noisy"][0], fleet, updates=120, watch=[check])
    assert run.state.n == 3 and max(worst) <= rounding(16 * 120) * 16
    assert set(run.trace.bytes) == set(run.trace.down) == {16}
    spread = max(float((model - run.x).norm()) for model in (run.state.models[i] for i in run.state.present))
    assert 0 < spread < 1  # they stay together, and are not the same


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "vectors"), [("scaffold", 2), ("mimic", 1), ("defedavg", 1), ("asofed", 1), ("adsaga", 1)])
def test_messages_have_as_many_vectors_as_their_methods_say(row, vectors):
    """SCAFFOLD sends two vectors each way, MimiC, DeFedAvg, ASO-Fed and ADSAGA one: 8 bytes for each float64 number.

    Catches a memory that travels along.
    """
    trace = dd.simulate(ALGORITHMS[row], heterogeneous(4, 5), dd.FixedSpeeds([0.7, 1.1, 3.0, 9.0]), updates=20).trace
    assert set(trace.bytes) == set(trace.down) == {8 * 5 * vectors}


# K-sync SGD -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_k_sync_between_synchronous_sgd_and_the_fastest_worker(case):
    """K-sync SGD with K = n is synchronous SGD, and with K = 1 Rennala SGD with one gradient in a round, bit for bit.

    Catches a round that waits for one too many or too few, and a late job that is not cancelled.
    """
    n = CASES[case][0].workers
    for wait_for, other in ((n, dd.SyncSGD(LR)), (1, A.RennalaSGD(LR, gradients=1))):
        (run, models), (like, expected) = (
            archive(method, *CASES[case], updates=30) for method in (dd.SyncSGD(LR, wait_for=wait_for), other)
        )
        assert same(models, expected) and run.trace.time.tolist() == like.trace.time.tolist()


@pytest.mark.numeric
def test_backup_workers_are_left_out_for_good():
    """With fixed speeds K-sync SGD solves the problem of the K fastest workers, at the pace of the K-th.

    Catches a late gradient that is used in the next round.
    """
    run = dd.simulate(dd.SyncSGD(1 / 8, wait_for=2), *Q3, updates=300, evaluation=LAST)
    assert float(run.x) == pytest.approx(3.0, abs=rounding(64) * 12 * 8) and run.time == 600.0
    assert set(run.trace.worker) == {0, 1}


def test_the_names_of_dutta_et_al_are_settings_here():
    """K-batch-async SGD is FedBuff with a buffer of K, whose workers never wait, and K-async SGD is FedBuff with
    ``wait``, in whose buffers all workers differ; K-batch-sync SGD is Rennala SGD with K gradients, all taken at the
    newest model.

    Catches a buffer with two gradients of one worker that waits, and a gradient from before a round.
    """
    for method, K in ((dd.FedBuff(LR, buffer=3, wait=True), 3), (dd.FedBuff(LR, buffer=3), 3), (A.RennalaSGD(LR, 3), 3)):
        trace = dd.simulate(method, *CASES["noisy"], updates=60).trace
        updates = trace.worker[: 60 * K].reshape(60, K)
        distinct = [len(set(some)) == K for some in updates.tolist()]
        fresh = (trace.version[: 60 * K].reshape(60, K) == np.arange(60)[:, None]).all()
        assert all(distinct) == (getattr(method, "wait", False)) and fresh == (type(method) is A.RennalaSGD)
