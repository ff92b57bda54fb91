"""The table of algorithms and the table of cases that the tests cross; a new algorithm is a new row."""

from __future__ import annotations

from typing import Any

import dualdelay as dd

LR = 2.0**-6  # small enough for every delay in the cases below, and exact in binary

ALGORITHMS: dict[str, dd.Algorithm[Any]] = {
    "dude": dd.DuDe(LR),
    "dude two": dd.DuDe(LR, wait_for=2),
    "dude workers": dd.DuDe(LR, memory="workers"),
    "dude two workers": dd.DuDe(LR, wait_for=2, memory="workers"),
    "dude busy": dd.DuDe(LR, start="busy"),
    "auto": dd.AutoDuDe(64 * LR),  # a factor of the step that it chooses itself
    "dude zeros": dd.DuDe(LR, start="zeros"),
    "sync": dd.SyncSGD(LR),
    "vanilla": dd.VanillaASGD(LR),
    "uniform": dd.UniformASGD(LR),
    "shuffled": dd.ShuffledASGD(LR),
    "fedbuff": dd.FedBuff(LR, buffer=2),
    "fedbuff wait": dd.FedBuff(LR, buffer=2, wait=True),
    "fedbuff stale": dd.FedBuff(LR, buffer=2, staleness=0.5),
    "mifa": dd.MIFA(LR),
    "mifa active": dd.MIFA(LR, active=2),
    "siag": dd.SIAG(LR),
    "dude int8": dd.DuDe(LR, memory="workers", compress="int8"),
    "dude sparse": dd.DuDe(LR, memory="workers", compress=0.5),
    "rescaled": dd.algorithms.RescaledASGD(LR),
    "malenia": dd.algorithms.MaleniaSGD(LR, gradients=6),
    "ringleader": dd.algorithms.RingleaderASGD(LR),
    "ca2fl": dd.algorithms.CA2FL(LR, buffer=2),
    "aced": dd.algorithms.ACED(LR, max_delay=6),
    "sync by speed": dd.algorithms.SyncBySpeed(LR),
    "rennala": dd.algorithms.RennalaSGD(LR),
    "rennala unheard": dd.algorithms.RennalaSGD(LR, cancel=False),
    "malenia unheard": dd.algorithms.MaleniaSGD(LR, gradients=6, cancel=False),
    "ringmaster": dd.algorithms.RingmasterASGD(LR, threshold=3),
    "ringmaster stops": dd.algorithms.RingmasterASGD(LR, threshold=3, stop=True),
    "delay adaptive": dd.algorithms.DelayAdaptiveASGD(LR),
    "generalized": dd.algorithms.GeneralizedASGD(LR),
    "fedasync": dd.algorithms.FedAsync(4 * LR, mixing="hinge"),
    "fedasync proximal": dd.algorithms.FedAsync(4 * LR, steps=2, proximal=0.5),
    "fedfix": dd.algorithms.FedFix(LR, period=2.0),
    "iag": dd.algorithms.IAG(LR),
    "sag": dd.algorithms.SAG(LR),
    "saga": dd.algorithms.SAGA(LR),
    "fadas": dd.algorithms.FADAS(LR, buffer=2),
    "quafl": dd.algorithms.QuAFL(LR, steps=3, sampled=2, period=2.0),
    "favano": dd.algorithms.FAVANO(2 * LR, steps=3, sampled=2, period=2.0),
    "scaffold": dd.algorithms.SCAFFOLD(LR, steps=2),
    "scaffold sampled": dd.algorithms.SCAFFOLD(LR, steps=2, sampled=2),
    "mimic": dd.algorithms.MimiC(LR, steps=2),
    "defedavg": dd.algorithms.DeFedAvg(LR, steps=2, sampled=2),
    "asofed": dd.algorithms.ASOFed(4 * LR, steps=2),
    "adsaga": dd.algorithms.ADSAGA(LR),
    "adpsgd": dd.algorithms.ADPSGD(4 * LR),
    "adpsgd ring": dd.algorithms.ADPSGD(4 * LR, graph="ring"),
    "sync two": dd.SyncSGD(LR, wait_for=2),
    "area": dd.algorithms.AREA(16 * LR),
    "area steps": dd.algorithms.AREA(16 * LR, steps=2, buffer=2),
    "dc asgd": dd.algorithms.DCASGD(LR, strength=LR / 64),  # more is too much for the huge gradients of a trial
    "ormo": dd.algorithms.OrMo(LR, momentum=0.5),
    "diloco": dd.algorithms.AsyncDiLoCo(4 * LR, steps=2, inner_lr=0.25, momentum=0.5),
    "diloco inner momentum": dd.algorithms.AsyncDiLoCo(
        4 * LR, steps=2, inner_lr=0.125, inner="SGD[momentum=0.5]", inner_state="keep", momentum=0.5, staleness=0.5
    ),
    "delayed nesterov": dd.algorithms.DelayedNesterov(8 * LR, steps=2, inner_lr=0.25, momentum=0.5, spread=0.125),
    "delayed nesterov dynamic": dd.algorithms.DelayedNesterov(
        8 * LR, steps=3, inner_lr=0.125, momentum=0.5, every=2, dynamic=True
    ),
    "mla": dd.algorithms.MomentumLookAhead(4 * LR, steps=2, inner_lr=0.25, momentum=0.5),
    "heloco": dd.algorithms.HeLoCo(4 * LR, steps=2, inner_lr=0.25, momentum=0.5),
    "ringmaster lmo": dd.algorithms.RingmasterLMO(LR, threshold=3, alpha=0.5),  # on networks; a vector follows its momentum
}
DUDES = tuple(row for row, method in ALGORITHMS.items() if type(method) is dd.DuDe)

# Q3 is the three-worker problem whose limits are known by hand: centers 0, 6, 12 and seconds 1, 2, 4.
CASES: dict[str, tuple[dd.Problem, dd.SpeedModel]] = {
    "q3": (dd.Quadratic([[0.0], [6.0], [12.0]]), dd.FixedSpeeds([1.0, 2.0, 4.0])),
    "noisy": (
        dd.Quadratic(
            [[0.0, 1.0], [2.0, -1.0], [4.0, 0.0], [-1.0, 3.0]],
            [1.0, [[2.0, 0.5], [0.5, 1.0]], 0.5, [[1.0, -0.25], [-0.25, 1.5]]],
            noise=0.5,
            seed=1,
        ),
        dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1),
    ),
    "logistic": (
        dd.problems.Logistic(workers=5, features=3, samples=20, batch_size=4, seed=2),
        dd.TruncatedNormalSpeeds(5, std=1.0, seed=2),
    ),
    "local steps": (
        dd.LocalSteps(dd.Quadratic([[0.0, 8.0], [4.0, 0.0], [-4.0, 4.0]], noise=0.25, seed=3), 2, LR),
        dd.speeds.ChangingSpeeds(
            dd.speeds.LognormalSpeeds([1.0, 1.0, 2.0], seed=3), [5.0], [[1.0, 1.0, 1.0], [1.0, 4.0, 0.5]]
        ),
    ),
    "digits": (
        dd.Digits(workers=4, alpha=1.0, seed=4, batch_size=8, hidden=4),  # float32
        dd.speeds.ParetoSpeeds([1.0, 1.0, 2.0, 2.0], seed=4),
    ),
}
