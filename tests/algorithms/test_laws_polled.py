"""Polled workers

Under QuAFL and FAVANO workers go on by themselves, and the server asks some of them, drawn uniformly, for what they
have done so far: at the multiples of a period, whether that is much or nothing.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch

import dualdelay as dd
import local_work
from dualdelay.runs.names import label
from helpers import archive, drift, heterogeneous, polls, rounding, stepping
from pseudo_code import noise
from tables import ALGORITHMS

QuAFL, FAVANO = dd.algorithms.QuAFL, dd.algorithms.FAVANO
STEP = 0.07
FLEETS = {  # the seconds of each worker's steps, job by job, curvatures a_i, centers b_i
    "ties": (((0.5,), (1.0,), (2.5,), (4.0,)), (1.0, 2.0, 0.5, 1.5), (0.0, 6.0, 12.0, -4.0)),
    "no ties": (((0.83,), (1.37,), (3.01,)), (1.0, 0.5, 2.0), (3.0, -2.0, 11.0)),
    "changing": (((0.5, 4.0, 1.25), (1.0, 0.75), (2.5, 0.5, 1.5, 8.0)), (1.0, 2.0, 0.5), (0.0, 6.0, -12.0)),
}
METHODS = [
    QuAFL(STEP),
    QuAFL(STEP, steps=3, sampled=1, period=0.75),
    QuAFL(STEP, steps=4, sampled=3, period=2.0),
    FAVANO(STEP),
    FAVANO(STEP, steps=3, sampled=1, period=0.75),
    FAVANO(STEP, steps=4, sampled=3, period=2.0),
    FAVANO(STEP, divide_by="expected"),
    FAVANO(STEP, steps=3, sampled=1, period=0.75, divide_by="expected"),
    FAVANO(STEP, divide_by="expected", expected=[2.5, 1.5, 0.75]),
]
# THREE workers at 0, 6 and 12 whose steps take 1, 2 and 4 seconds: by second 4 they have done 4, 2 and 1
THREE, CENTERS = (1.0, 2.0, 4.0), (0.0, 6.0, 12.0)


class Noisy(dd.Quadratic):
    """Gradients with the noise of the pseudo-code."""

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        return gradient + noise(worker, draw), loss


def contacts(trace):
    """Who answered, contact by contact."""
    return [
        [i for _, i in some] for _, some in groupby(zip(trace.time, trace.worker.tolist(), strict=True), lambda p: p[0])
    ]


@pytest.mark.numeric
@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("method", METHODS, ids=label)
def test_polled_methods_make_the_models_of_their_pseudo_code(method, fleet):
    """QuAFL and FAVANO make the models of their pseudo-code to rounding, contact by contact, with the same numbers of
    steps, if the same workers are drawn; those of a contact differ from one another, and none counts more than K steps.

    Catches X from after the update in place of before, 1/s in place of 1/(s + 1), a worker's model that is forgotten, and
    steps that are begun and not done.
    """
    seconds, a, b = FLEETS[fleet]
    if len(getattr(method, "expected", None) or seconds) != len(seconds):
        return
    run, models = archive(method, Noisy([[c] for c in b], a), dd.speeds.RecordedSpeeds(seconds), updates=80)
    drawn = contacts(run.trace)
    world = local_work.Local(seconds, a, b, method.steps)
    options = {name: getattr(method, name) for name in ("divide_by", "expected") if hasattr(method, name)}
    done = getattr(local_work, method.name)(world, STEP, drawn, seconds, method.period, method.sampled, **options)
    # FAVANO multiplies a way by 1 / P(E > 0), which is 20 at most here
    close = drift(80, STEP, operations=16 * method.steps * 20) * 64
    assert [float(x) for x in models] == pytest.approx(world.models, rel=0, abs=close)
    assert run.trace.steps.tolist() == done and max(done) > 1
    assert sorted(set(run.trace.time)) == pytest.approx([method.period * k for k in range(1, 81)])
    assert all(len(set(S)) == len(S) == method.sampled for S in drawn)
    assert np.abs(np.diff(world.models)).max() > 1e-2


def test_every_worker_is_drawn_as_often():
    """Every worker is contacted as often, whatever its speed.

    Catches draws that favour workers which have done something.
    """
    run = dd.simulate(QuAFL(0.001), dd.Quadratic([[b] for b in CENTERS]), dd.FixedSpeeds(THREE), updates=1500)
    # 1500 times two of three: 1000 each, with a standard deviation of sqrt(1500 * 2/9) = 18
    assert all(abs(count - 1000) < 4 * 18 for count in np.bincount(run.trace.worker))


# QuAFL ----------------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("n", [1, 2, 5])
def test_quafl_with_everybody_and_one_step_is_its_averaged_synchronous_form(n):
    """QuAFL that contacts everybody, each after one step, is synchronous: the server's model and all n local ones are
    mixed in every round, and their mean makes steps of SGD along the mean of the gradients at the local models.

    Catches a step that lacks the factor (s + 1) / s, and mixing that does not preserve the mean.
    """
    lr, problem = 0.05, heterogeneous(n, 2, noise=0.5)
    method = QuAFL(lr, steps=1, sampled=n, period=4.0)
    _, models = archive(method, problem, dd.FixedSpeeds([1.0 + k / 2 for k in range(n)]), updates=30)
    X, local = problem.start(0), [problem.start(0)] * n
    means = [X]
    expected = [X]
    for t in range(30):
        gradients = torch.stack([problem.gradient(local[i], i, t)[0] for i in range(n)])
        Y = [local[i] - lr * (n + 1) / n * gradients[i] for i in range(n)]
        means.append(means[-1] - lr * gradients.mean(0))
        X, local = (X + sum(Y)) / (n + 1), [(X + n * y) / (n + 1) for y in Y]
        expected.append(X)
        close = drift(t + 1, lr, 16 * (n + 1)) * 32
        assert torch.allclose((X + sum(local)) / (n + 1), means[-1], rtol=0, atol=close)
    assert torch.allclose(torch.stack(models), torch.stack(expected), rtol=0, atol=close)


def test_a_worker_that_is_polled_before_its_first_step_answers_with_none():
    """A worker that is polled before its first step answers with the model it began with, no gradient and no loss, and goes
    on with its steps numbered anew.

    Catches a worker that is waited for, a step that is taken for free, and a model that is moved by an answer without work.
    """
    # steps of 1.5 seconds, polled at 1, 2, 3, ...: what has begun is lost, and nothing ever moves; worker 0 does one step
    problem = dd.Quadratic([[0.0], [6.0]], start=[3.0])
    run = dd.simulate(QuAFL(0.1, sampled=1), problem, dd.FixedSpeeds([1.5, 1.5]), updates=40)
    own = {i: run.trace.time[run.trace.worker == i] for i in (0, 1)}
    for i, times in own.items():
        # between two contacts of a worker lie d seconds: floor(d / 1.5) steps, 5 at most
        assert run.trace.steps[run.trace.worker == i].tolist() == [min(5, int(d / 1.5)) for d in np.diff(times, prepend=0)]
    none = run.trace.steps == 0
    assert none.any() and not none.all() and (np.isnan(run.trace.loss) == none).all()
    still = dd.simulate(QuAFL(0.1, sampled=2), problem, dd.FixedSpeeds([1.5, 1.5]), updates=10)
    assert float(still.x) == 3.0 and still.trace.steps.sum() == 0 and still.trace.time.tolist()[::2] == list(range(1, 11))


@pytest.mark.parametrize("row", [row for row, method in ALGORITHMS.items() if polls(method)])
def test_an_answer_is_one_model_and_so_is_a_job(row):
    """A polled worker sends one model, and is sent one for each job: 8 bytes for each float64 number, never several models;
    the gradients that were taken are those that the trace counts.

    Catches messages that carry the server's model or other workers' models along, and steps that are not counted.
    """
    problem, taken = heterogeneous(4, 5), [0]

    class Counting(dd.Quadratic):
        def gradient(self, x, worker, draw):
            taken[0] += 1
            return super().gradient(x, worker, draw)

    counting = Counting(problem.settings["centers"])
    trace = dd.simulate(ALGORITHMS[row], counting, dd.FixedSpeeds([0.7, 1.1, 3.0, 9.0]), updates=40).trace
    assert set(trace.bytes) == {8 * 5} and set(trace.down) == {8 * 5}
    assert trace.steps.sum() == taken[0] and len(trace) == 40 * 2


@pytest.mark.parametrize("kind", [QuAFL, FAVANO])
def test_a_worker_that_leaves_while_it_is_asked_is_not_waited_for(kind):
    """A worker that leaves between the server's question and its answer is not waited for: the update is made of the
    others' answers when it leaves, and from then on the workers present alone are drawn.

    Catches a server that waits for ever, and a draw of an absent worker.
    """
    # questions and answers take a quarter of a second each: asked at 2, answers at 2.5, but worker 2 leaves at 2.25
    fleet = dd.SimulatedFleet(
        dd.FixedSpeeds([0.5, 0.5, 0.5]), link=dd.speeds.Link(latency=0.25), changes=[dd.speeds.leave(2, 2.25)]
    )
    run, _ = archive(kind(0.1, sampled=3, period=2.0), dd.Quadratic([[b] for b in CENTERS]), fleet, updates=20)
    assert run.trace.time.tolist()[:4] == [2.5, 2.5, 4.5, 4.5] and 2 not in run.trace.worker
    assert run.trace.after.tolist()[:4] == [0, 1, 1, 2] and run.state.answers == {}
    gone = dd.SimulatedFleet(  # the others' answers take no time at all, and the last one never comes
        dd.speeds.RecordedSpeeds([[0.5]] * 3), link=dd.speeds.Link(latency=0.25), changes=[dd.speeds.leave(1, 2.625)]
    )
    slow = dd.simulate(kind(0.1, sampled=2, period=2.0), dd.Quadratic([[b] for b in CENTERS]), gone, updates=20)
    late = slow.trace.time > 2.625
    assert set(slow.trace.worker[late]) == {0, 2} and slow.version == 20


@pytest.mark.parametrize("kind", [QuAFL, FAVANO])
def test_contacts_rest_while_nobody_is_present(kind):
    """While no worker is present there are no contacts, and they go on when one is back.

    Catches contacts without end in an empty fleet, and a clock that is never wound up again.
    """
    away = [(worker, 5.5, 100.25) for worker in range(3)]
    fleet = dd.SimulatedFleet(dd.FixedSpeeds(THREE), changes=dd.speeds.announced(away))
    run = dd.simulate(kind(0.1), dd.Quadratic([[b] for b in CENTERS]), fleet, updates=20)
    wakes = [event["time"] for event in run.trace.events if event["kind"] == "wake"]
    assert wakes[:7] == [1, 2, 3, 4, 5, 6, 100.25] and wakes[7:] == [100.25 + k for k in range(1, len(wakes) - 6)]
    assert run.version == 20 and len(wakes) == 21


def test_a_worker_that_has_lost_its_model_goes_on_from_the_servers():
    """A worker of QuAFL that has lost its model goes on from what the server sent it, and one of FAVANO that has lost its
    counts begins to count anew.

    Catches a worker that reports a model of nothing, or counts what it has forgotten.
    """
    problem, speeds = dd.Quadratic([[b] for b in CENTERS]), dd.FixedSpeeds(THREE)
    for method in (QuAFL(0.1, sampled=3, period=4.0), FAVANO(0.1, sampled=3, period=4.0)):
        *_, loop = stepping(method, problem, speeds, 12)
        kept = loop.memories()[1]
        loop.fleet.forget(1)
        memory = method.recover(loop.state, 1, {})
        assert memory is None and 1 not in loop.memories()
        sent = loop.fleet._jobs[1][max(loop.fleet._jobs[1])].model.x
        for _ in range(4):
            loop.advance()
        y = sent
        for _ in range(2):  # by the next contact
            y = y - 0.1 * (4 / 3 if type(method) is QuAFL else 1.0) * (y - 6.0)
        after = loop.memories()[1]
        if type(method) is QuAFL:
            assert torch.equal(after["y"], y) and not torch.equal(after["y"], kept["y"])
        else:
            assert after == {"reports": 1, "worked": 1, "steps": 2} and kept["reports"] == 3


# FAVANO ---------------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("divide_by", ["realised", "expected"])
@pytest.mark.parametrize("steps", [1, 3])
def test_favano_of_equal_workers_is_the_unweighted_mean(divide_by, steps):
    """If all workers do the same number of steps in every period, FAVANO weighs none more than another: the server's
    model is the mean of itself and the models of those drawn, each at the mean of its steps' ends, which for one step
    is its model.

    Catches a weight that depends on who is drawn how often.
    """
    n, lr, problem = 4, 0.05, heterogeneous(4, 2, noise=0.5)
    method = FAVANO(lr, steps=steps, sampled=2, period=3.0, divide_by=divide_by)
    run, models = archive(method, problem, dd.FixedSpeeds([1.0] * n), updates=25)
    X, start, draw = problem.start(0), [problem.start(0)] * n, [0] * n
    for S, got in zip(contacts(run.trace), models[1:], strict=True):
        ways = []
        for i in S:
            y = start[i]
            for k in range(steps):
                y = y - lr * problem.gradient(y, i, draw[i] * steps + k)[0]
            ways.append(start[i] + (y - start[i]) / steps)
            draw[i] += 1
        X = (X + ways[0] + ways[1]) / 3
        for i in S:
            start[i] = X
        assert torch.allclose(got, X, rtol=0, atol=drift(25, lr, 16 * steps) * 32)


LIMITS = {  # everybody contacted every 4 seconds: after 4, 2 and 1 steps of lr
    "realised": FAVANO(1 / 16, steps=4, sampled=3, period=4.0),
    "expected": FAVANO(1 / 16, steps=4, sampled=3, period=4.0, divide_by="expected"),
    "given": FAVANO(1 / 16, steps=4, sampled=3, period=4.0, divide_by="expected", expected=[4.0, 2.0, 1.0]),
}


def at_rest(method):
    fleet = dd.Quadratic([[b] for b in CENTERS]), dd.FixedSpeeds(THREE)
    return float(dd.simulate(method, *fleet, updates=650, evaluation=dd.Evaluation(every=10**6)).x)


@pytest.mark.numeric
def test_favano_removes_the_bias_of_quafl():
    """If everybody is contacted after 4, 2 and 1 steps, FAVANO ends where the mean steps cancel, near the solution, and
    QuAFL where the sums of steps do, near that of workers weighted by their speeds.

    Catches a way that is divided by another worker's steps, or not at all.
    """
    b, lr, E = np.array(CENTERS), 1 / 16, np.array([4, 2, 1])
    # X = (X + sum of (X + (1 - r_i) (b_i - X) / E_i)) / 4 with r_i = (1 - lr)^E_i: the mean steps cancel
    weights = (1 - (1 - lr) ** E) / E
    limit, close = weights @ b / weights.sum(), rounding(64) * 12 / (weights.sum() / 4)
    # in 650 updates the distance shrinks by e^-30
    assert all(at_rest(method) == pytest.approx(limit, abs=close) for method in LIMITS.values())
    # QuAFL: Y_i = b_i + r_i (X_i - b_i), X_i = (X + 3 Y_i) / 4 and 3 X = sum of Y_i, with steps of 4/3 lr;
    # so X_i (4 - 3 r_i) = X + 3 (1 - r_i) b_i, and Y_i = (1 - r_i) b_i + r_i X_i is linear in X
    r = (1 - 4 / 3 * lr) ** E
    slope, height = r / (4 - 3 * r), (1 - r) * b * (1 + 3 * r / (4 - 3 * r))
    biased = height.sum() / (3 - slope.sum())
    assert at_rest(QuAFL(lr, steps=4, sampled=3, period=4.0)) == pytest.approx(biased, abs=close)
    assert abs(limit - 6) < 0.25 < 1.5 < abs(biased - 6)


@pytest.mark.numeric
def test_favano_is_less_biased_than_quafl_where_workers_often_have_done_nothing():
    """Where two of three workers are drawn in every second, so that the slow ones have often done nothing, both variants of
    FAVANO go round a point that is nearer to the solution than QuAFL's, which is far on the side of the fast worker.

    Catches a report without steps that is left out of the probability or of the expectation.
    """
    fleet = dd.Quadratic([[b] for b in CENTERS]), dd.FixedSpeeds([0.25, 0.5, 1.5])

    def mean(method):
        return float(torch.stack(archive(method, *fleet, updates=700)[1][100:]).mean())

    favano = [mean(FAVANO(0.05, steps=4, divide_by=divide_by)) for divide_by in ("realised", "expected")]
    quafl = mean(QuAFL(0.05, steps=4))
    assert quafl < 4 and all(abs(limit - 6) < 0.5 for limit in favano)
