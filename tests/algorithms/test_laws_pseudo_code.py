"""Pseudo-code

Methods are written a second time in `tests/pseudo_code.py`, in the lines of their papers' pseudo-code, for one weight and
with plain numbers. Both must make the same models from the same arrivals.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest

import dualdelay as dd
import pseudo_code
from dualdelay.runs.names import label
from helpers import archive, drift
from tables import ALGORITHMS

STEP = 0.07
METHODS = [  # the rows of the table, and more settings of some methods
    *(replace(method, lr=STEP) for method in ALGORITHMS.values()),
    *(dd.FedBuff(STEP, buffer=3, staleness=staleness) for staleness in (0.5, 2.0)),
    *(dd.SyncSGD(STEP, wait_for=k) for k in (1, 3)),
    dd.DuDe(STEP, wait_for=3),
    dd.DuDe(STEP, wait_for=2, start="zeros"),
    dd.algorithms.MaleniaSGD(STEP),
    dd.algorithms.MaleniaSGD(STEP, gradients=9),
    dd.algorithms.CA2FL(STEP, buffer=3),
    dd.algorithms.CA2FL(STEP),
    dd.algorithms.ACED(STEP),
    dd.algorithms.ACED(STEP, max_delay=math.inf),
    dd.algorithms.ACED(STEP, max_delay=1),  # no update where the arriving gradient is too old, since all others are older
    dd.algorithms.SyncBySpeed(STEP, least=3),
    dd.algorithms.RennalaSGD(STEP, gradients=7),
    dd.algorithms.RingmasterASGD(STEP),
    dd.algorithms.RingmasterASGD(STEP, threshold=7),
    dd.algorithms.RingmasterASGD(STEP, threshold=2, stop=True),
    dd.algorithms.DelayAdaptiveASGD(STEP, delay="staleness"),
    dd.algorithms.FedAsync(STEP),
    dd.algorithms.FedAsync(STEP, mixing="polynomial"),
    dd.algorithms.FedAsync(STEP, alpha=0.9, mixing="polynomial", a=1.0),
    dd.algorithms.FedAsync(STEP, mixing="hinge", a=0.5, b=2),
    dd.algorithms.FedFix(STEP),
    dd.algorithms.FedFix(STEP, period=0.75),
    dd.algorithms.FedFix(STEP, period=0.25),  # at some ticks nothing has arrived
    dd.algorithms.FADAS(STEP),
    dd.algorithms.FADAS(STEP, buffer=3, betas=(0.5, 0.75), eps=0.125),
    dd.algorithms.FADAS(STEP, buffer=2, late=2),
    dd.algorithms.FADAS(STEP, buffer=3, late=1, correct_means=True),
    dd.algorithms.FADAS(0.75, buffer=2, late=1, rule="clip"),  # a step so large that one over the delay is smaller
    dd.algorithms.RennalaSGD(STEP, gradients=5, cancel=False),
    dd.algorithms.MaleniaSGD(STEP, gradients=9, cancel=False),
    dd.algorithms.FedAsync(STEP, steps=3),
    dd.algorithms.FedAsync(STEP, steps=3, proximal=2.0, mixing="polynomial"),
    dd.algorithms.AREA(STEP, steps=3),
    dd.algorithms.AREA(0.5, buffer=3),
    dd.algorithms.DCASGD(STEP, strength=0.01),
    dd.algorithms.DCASGD(STEP / 4),
    dd.algorithms.DCASGD(STEP, adaptive=True, decay=0.5, strength=0.3, eps=0.125),
    dd.algorithms.DCASGD(STEP, adaptive=True, own_means=True, strength=0.3),
    dd.algorithms.OrMo(STEP, momentum=0.25),
    dd.algorithms.AsyncDiLoCo(STEP, steps=3, inner_lr=0.1, dynamic=True, staleness=0.5),
    dd.algorithms.AsyncDiLoCo(STEP, steps=3, inner_lr=0.1, inner="SGD[momentum=0.5]", weight=0.25),
    dd.algorithms.DelayedNesterov(0.5, steps=4, inner_lr=0.1),
    dd.algorithms.DelayedNesterov(STEP, steps=4, inner_lr=0.1, every=3, spread=1 / 3, dynamic=True, weight=None),
    dd.algorithms.MomentumLookAhead(0.5, steps=3, inner_lr=0.1, weight=None),
    dd.algorithms.HeLoCo(STEP, steps=3, inner_lr=0.1, weight=1.0, caution=0.25, most_shrunk=0.3),
    dd.algorithms.HeLoCo(0.5, steps=3, inner_lr=0.1, ahead_at_workers=False),
    dd.algorithms.RingmasterLMO(STEP, rest="sign"),
    dd.algorithms.RingmasterLMO(STEP, lmo="euclidean", alpha=0.25),
    dd.algorithms.RingmasterLMO(1.0, lmo="sign", agnostic=True),
    *(dd.algorithms.GeneralizedASGD(STEP, probabilities=p) for p in ([0.5, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4])),
]
WRITTEN_TWICE = {label(method): method for method in METHODS if hasattr(pseudo_code, method.name)}

FLEETS = {  # the seconds of each worker's jobs in turn, curvatures a_i, centers b_i
    "ties": (((0.5,), (1.0,), (2.5,), (4.0,)), (1.0, 2.0, 0.5, 1.5), (0.0, 6.0, 12.0, -4.0)),
    "no ties": (((0.83,), (1.37,), (3.01,)), (1.0, 0.5, 2.0), (3.0, -2.0, 11.0)),
    "changing": (((0.5, 4.0, 1.25), (1.0, 0.75), (2.5, 0.5, 1.5, 8.0)), (1.0, 2.0, 0.5), (0.0, 6.0, -12.0)),
}
RUNS = [  # probabilities are for a certain number of workers
    (name, fleet)
    for name, method in WRITTEN_TWICE.items()
    for fleet, (seconds, *_) in FLEETS.items()
    if len(getattr(method, "probabilities", None) or seconds) == len(seconds)
]
UPDATES = 60
CLOSE = drift(UPDATES, STEP, operations=16) * 64  # no weight and no gradient is larger


class Noisy(dd.Quadratic):
    """Gradients with the noise of the pseudo-code; exact gradients have none."""

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        return gradient + pseudo_code.noise(worker, draw), loss


@pytest.mark.numeric
@pytest.mark.parametrize(("name", "fleet"), RUNS)
def test_every_version_is_that_of_the_pseudo_code(name, fleet):
    """A method makes the models of its paper's pseudo-code, version by version to rounding, from arrivals of the same
    workers at the same times.

    Catches a wrong weight, order, count or delay in a method's file.
    """
    method, (seconds, a, b) = WRITTEN_TWICE[name], FLEETS[fleet]
    reference = getattr(pseudo_code, method.name)
    known = inspect.signature(reference).parameters
    options = {f.name: getattr(method, f.name) for f in fields(method) if f.name in known}
    updates = UPDATES
    if "drawn" in known:  # which workers are drawn is read from a run so long that all jobs of the first versions arrive
        updates, options["drawn"] = 6 * UPDATES, {}
    run, models = archive(method, Noisy([[center] for center in b], a), dd.speeds.RecordedSpeeds(seconds), updates=updates)
    arrivals = list(zip(run.trace.time.tolist(), run.trace.worker.tolist(), run.trace.version.tolist(), strict=True))
    for _, worker, version in arrivals if "drawn" in known else ():
        options["drawn"].setdefault(version, []).append(worker)

    world = pseudo_code.World(seconds, a, b, exact=method.exact)
    reference(world, UPDATES, **options)
    assert [float(x) for x in models[: UPDATES + 1]] == pytest.approx(world.models, rel=0, abs=CLOSE)
    assert arrivals[: len(world.arrivals)] == world.arrivals and ("drawn" in known or len(arrivals) == len(world.arrivals))
    assert max(abs(x - y) for x, y in pairwise(world.models)) > 1e-3  # it moves by far more than that
