"""Settings that a method cannot work with are refused: by the method, or as soon as the number of workers is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

import dualdelay as dd
from own import refused
from tables import ALGORITHMS, CASES, LR

A = dd.algorithms
SETTINGS: list[tuple[Any, str, list[Any]]] = [
    (dd.DuDe, "wait_for", [0, -1, 1.5, True, 10**5000, "1"]),
    (dd.FedBuff, "buffer", [0, 1.5]),
    (A.CA2FL, "buffer", [0]),
    (A.FADAS, "buffer", [0]),
    (A.FADAS, "betas", [(0.9, 1.0), (-0.1, 0.9), (0.9,), 0.9]),
    (A.FADAS, "eps", [0.0]),
    (A.FADAS, "late", [0]),
    (A.FADAS, "rule", ["stop"]),
    (A.FedAsync, "steps", [0]),
    (A.FedAsync, "proximal", [-1.0]),
    (A.MaleniaSGD, "gradients", [0, 2.5]),
    (A.RennalaSGD, "gradients", [0, 2.5]),
    (A.ACED, "max_delay", [0, -1.0, 0.5, math.nan, "10"]),
    (A.FedAsync, "alpha", [0.0, 1.5, "1"]),
    (A.FedAsync, "mixing", ["linear"]),
    (A.FedAsync, "a", [0.0]),
    (A.FedAsync, "b", [-1.0]),
    (A.FedFix, "period", [0.0]),
    (A.GeneralizedASGD, "probabilities", [[0.5, 0.6], [0.0, 1.0], [], 0.5]),
    (A.RingmasterASGD, "threshold", [0, math.inf]),
    (A.SyncBySpeed, "least", [0]),
    (A.DelayAdaptiveASGD, "delay", ["age"]),
    (dd.SyncSGD, "wait_for", [0, 1.5]),
    (A.QuAFL, "steps", [0, 1.5]),
    (A.QuAFL, "sampled", [0]),
    (A.QuAFL, "period", [0.0]),
    (A.FAVANO, "divide_by", ["steps"]),
    (A.SCAFFOLD, "steps", [0]),
    (A.SCAFFOLD, "sampled", [0]),
    (A.SCAFFOLD, "global_lr", [0.0]),
    (A.MimiC, "sampled", [0, 1.5]),
    (A.DeFedAvg, "sampled", [0]),
    (A.ASOFed, "beta", [0.0, 1.5]),
    (A.ASOFed, "proximal", [-1.0]),
    (A.ASOFed, "compare_with", ["received"]),
    (A.ADPSGD, "graph", ["star"]),
    (A.AREA, "steps", [0, 1.5]),
    (A.AREA, "buffer", [0]),
    (A.DCASGD, "strength", [-0.1]),
    (A.DCASGD, "decay", [-0.1, 1.0]),
    (A.DCASGD, "eps", [0.0]),
    (A.OrMo, "momentum", [-0.1, 1.0]),
    (A.AsyncDiLoCo, "momentum", [-0.1, 1.0]),
    (A.AsyncDiLoCo, "weight", [0.0]),
    (A.AsyncDiLoCo, "staleness", [0.0]),
    (A.DelayedNesterov, "every", [0, 1.5]),
    (A.DelayedNesterov, "spread", [-0.1]),
    (A.MomentumLookAhead, "weight", [0.0]),
    (A.HeLoCo, "aligned", [1.5, -1.1, "1"]),
    (A.HeLoCo, "caution", [-1.0]),
    (A.HeLoCo, "eps", [0.0]),
    (A.RingmasterLMO, "alpha", [0.0, 1.5]),
    (A.RingmasterLMO, "lmo", ["frobenius"]),
    (A.RingmasterLMO, "rest", ["spectral"]),
]


@pytest.mark.parametrize(("kind", "name", "values"), SETTINGS, ids=[f"{row[0].__name__} {row[1]}" for row in SETTINGS])
def test_a_setting_that_cannot_work_is_refused_with_its_name(kind: Any, name: str, values: list[Any]) -> None:
    for value in values:
        refused(lambda value=value: kind(0.1, **{name: value}), f"{name} is ", "expected")


TOO_MANY = {
    "wait_for": (dd.DuDe(LR, wait_for=4), ("3 workers", "4", "1..3")),
    "buffer": (dd.FedBuff(LR, buffer=4, wait=True), ("4", "3 workers")),
    "active": (dd.MIFA(LR, active=4), ("4", "1..3")),
    "wait_for of sync": (dd.SyncSGD(LR, wait_for=4), ("wait_for", "3 workers", "4", "1..3")),
    "sampled of QuAFL": (A.QuAFL(LR, sampled=4), ("sampled", "4", "1..3")),
    "sampled of SCAFFOLD": (A.SCAFFOLD(LR, sampled=4), ("sampled", "4", "1..3")),
    "sampled of MimiC": (A.MimiC(LR, sampled=4), ("sampled", "4", "1..3")),
    "sampled of DeFedAvg": (A.DeFedAvg(LR, sampled=4), ("sampled", "4", "1..3")),
    "expected": (A.FAVANO(LR, divide_by="expected", expected=[1.0, 2.0]), ("has 2 entries", "expected 3")),
    "probabilities": (A.GeneralizedASGD(LR, [0.5, 0.5]), ("has 2 entries", "expected 3")),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_setting_that_does_not_fit_the_number_of_workers_is_refused(name: str) -> None:
    method, words = TOO_MANY[name]
    refused(lambda: dd.simulate(method, *CASES["q3"], updates=9), name.partition(" ")[0], *words)


def test_expectations_are_given_to_the_variant_that_uses_them() -> None:
    refused(lambda: A.FAVANO(0.1, expected=[1.0]), "expected is given", "divide_by='expected'")
    for given in ([], [0.0], 1.0):
        refused(lambda given=given: A.FAVANO(0.1, divide_by="expected", expected=given), "expected is ", "above zero")


def test_every_method_of_the_package_has_a_row() -> None:
    assert {type(method) for method in ALGORITHMS.values()} == set(dd.ALGORITHMS.values()), "a row in tests/tables.py"
