"""The held-out settings and the methods that are compared on them: the protocol of README.md as code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import dualdelay as dd
from dualdelay.algorithms import CA2FL, FADAS, AsyncDiLoCo, DelayedNesterov, HeLoCo, MomentumLookAhead
from dualdelay.problems import FashionMnist, Mnist
from dualdelay.simulation.speeds import BurstySpeeds, ExponentialSpeeds, LognormalSpeeds, ParetoSpeeds

LOCAL = {"steps": 16, "inner": "AdamW", "inner_lr": 0.001, "inner_state": "keep"}


@dataclass(frozen=True)
class Method:
    """A method and the steps that it is tried with; one step: it is not tuned."""

    make: Callable[[float], Any]
    steps: tuple[float, ...]
    optimizer: str | None = None
    local: bool = False  # whether a job is 16 local steps


@dataclass(frozen=True)
class Setting:
    """What is trained by whom, for how long, and which methods are compared."""

    problem: Callable[[], Any]
    speeds: Callable[[], Any]
    gradients: int
    methods: dict[str, Method]
    outcome: str = "objective"
    tuning: tuple[int, ...] = (200, 201)
    judging: tuple[int, ...] = (202, 203, 204)
    precision: str = "float32"
    means: tuple[float, ...] = field(default=())  # seconds of a job, of speeds that are drawn anew for each

    def length(self, seed: int) -> float:
        """The time in which so many gradients arrive from workers that never wait."""
        speeds = self.speeds()
        times = self.means or replace(speeds, seed=seed).times
        return float(self.gradients / sum(1 / time for time in times))


def powers(first: int, last: int) -> tuple[float, ...]:
    """Powers of two."""
    return tuple(2.0**k for k in range(first, last + 1))


def sgd(n: int) -> dict[str, Method]:
    """AutoDuDe, and the rivals by plain SGD."""
    c, buffer = max(2, n // 4), max(2, round(n / 3))
    return {
        "auto": Method(lambda lr: dd.AutoDuDe(lr=lr), (1.4,)),
        "dude": Method(lambda lr: dd.DuDe(lr=lr), powers(-7, -3)),
        "dude c": Method(lambda lr: dd.DuDe(lr=lr, wait_for=c), powers(-5, -1)),
        "vanilla": Method(lambda lr: dd.VanillaASGD(lr=lr), powers(-7, -3)),
        "fedbuff": Method(lambda lr: dd.FedBuff(lr=lr, buffer=buffer), powers(-5, -1)),
        "ca2fl": Method(lambda lr: CA2FL(lr=lr, buffer=buffer), powers(-5, -1)),
    }


def adam() -> dict[str, Method]:
    """AutoDuDe as it is, the methods by AdamW, and those with local steps."""
    one, four = powers(-11, -9), powers(-10, -8)
    return {
        "auto": Method(lambda lr: dd.AutoDuDe(lr=lr), (1.4,)),
        "auto adamw": Method(lambda lr: dd.AutoDuDe(lr=lr), four, "AdamW"),
        "dude adamw": Method(lambda lr: dd.DuDe(lr=lr), one, "AdamW"),
        "dude c adamw": Method(lambda lr: dd.DuDe(lr=lr, wait_for=4), four, "AdamW"),
        "vanilla adamw": Method(lambda lr: dd.VanillaASGD(lr=lr), one, "AdamW"),
        "fedbuff adamw": Method(lambda lr: dd.FedBuff(lr=lr, buffer=4), four, "AdamW"),
        "ca2fl adamw": Method(lambda lr: CA2FL(lr=lr, buffer=4), four, "AdamW"),
        "fadas": Method(lambda lr: FADAS(lr=lr, buffer=4, correct_means=True), powers(-11, -9)),
        "diloco": Method(lambda lr: AsyncDiLoCo(lr=lr, **LOCAL), powers(-3, -1)),
        "delayed nesterov": Method(lambda lr: DelayedNesterov(lr=lr, **LOCAL), powers(-3, -1)),
        "look-ahead": Method(lambda lr: MomentumLookAhead(lr=lr, **LOCAL), powers(-3, -1)),
        "heloco": Method(lambda lr: HeLoCo(lr=lr, **LOCAL), powers(-3, -1)),
        "dude local": Method(lambda lr: dd.DuDe(lr=lr * 0.001), powers(-3, -1), local=True),
    }


def spread(n: int) -> tuple[float, ...]:
    """Mean seconds of n workers, from 0.5 to 4 by equal factors."""
    return tuple(0.5 * 8 ** (k / (n - 1)) for k in range(n))


FIVE = (1.0, 1.3, 1.7, 2.2, 3.0)
STRAGGLER = (*[1.0] * 9, 130.0)
SETTINGS = {
    "wide": Setting(
        lambda: dd.Cifar10(workers=10, alpha=0.1, model="wide"),
        lambda: dd.TruncatedNormalSpeeds(10, std=5.0), 5000, sgd(10),
    ),
    "resnet": Setting(
        lambda: dd.Cifar10(workers=20, alpha=0.1, model="resnet"),
        lambda: LognormalSpeeds(spread(20)), 3000, sgd(20), means=spread(20),
    ),
    "fashion5": Setting(
        lambda: FashionMnist(workers=5, alpha=0.1), lambda: BurstySpeeds(dd.FixedSpeeds(FIVE)), 4000, sgd(5), means=FIVE
    ),
    "mnist50": Setting(
        lambda: Mnist(workers=50, alpha=0.1), lambda: ParetoSpeeds(spread(50)), 5000, sgd(50), means=spread(50)
    ),
    "convex20": Setting(
        lambda: FashionMnist(workers=20, alpha=0.1, model="linear"),
        lambda: ExponentialSpeeds(spread(20)), 5000, sgd(20), means=spread(20),
    ),
    "straggler10": Setting(
        lambda: Mnist(workers=10, alpha=0.1, model="small"),
        lambda: dd.FixedSpeeds(STRAGGLER), 4000, sgd(10), means=STRAGGLER,
    ),
    "language": Setting(
        lambda: dd.Languages(), lambda: dd.TruncatedNormalSpeeds(12, std=5.0), 6000, adam(),
        outcome="bits_per_byte", tuning=(200,), judging=(201, 202), precision="tf32",
    ),
}  # fmt: skip
