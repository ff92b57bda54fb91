"""What is compared: the panels of the paper, each for at least 200 jobs of the slowest worker, and who runs there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from corrected import Corrected
from first import FirstRule
from variants import Trial
from waiting import WaitingDuDe

from dualdelay.algorithms import DuDe, FedBuff, SyncSGD, VanillaASGD
from dualdelay.paper.experiment import Cell, Experiment

Method = tuple[str, Callable[..., Any], tuple[float, ...]]  # its name, its maker, its steps
LONG = 200  # jobs of the slowest worker
ARRIVALS = 20_000  # and at least so many


@dataclass(frozen=True)
class Place:
    """One draw of workers: their number, the spread of speeds and the seed."""

    workers: int
    std: float
    seed: int

    @property
    def name(self) -> str:
        return f"n{self.workers}-std{self.std:g}-seed{self.seed}"

    @property
    def cell(self) -> Cell:
        """The paper's cell; its number of updates is that of a fully asynchronous method in this time."""
        short = Cell(Experiment(self.workers, self.alphas, (self.std,), (self.seed,)), self.std, self.seed)
        updates = max(ARRIVALS, round(LONG * max(short.times) * short.rate))
        return Cell(replace(short.experiment, updates=updates), self.std, self.seed)

    @property
    def alphas(self) -> tuple[float, ...]:
        """How heterogeneous the data are in the paper's panels."""
        return (0.1, 0.5) if self.workers == 10 else (0.05, 0.1)


def explored(place: Place) -> Iterator[Method]:
    """The ways of choosing a step."""
    third = place.workers // 3
    yield "mean", Trial, (0.3, 0.45, 0.6, 0.8, 1.1)
    yield "max", partial(Trial, delay="max", decay=0.999, floor="none"), (1.0, 1.4, 2.0)
    yield "noise", partial(Trial, noise=0.1), (0.6, 1.2, 2.4)
    yield f"mean c={third}", partial(Trial, wait_for=third), (0.45, 0.6, 0.8)
    yield "corrected 3", partial(Corrected, keep=3.0), (0.2, 0.3, 0.45, 0.6, 0.8)
    yield f"corrected 3 buffer={third}", partial(Corrected, wait_for=third, wait=False), (0.3, 0.45, 0.6, 0.8)
    if place.workers == 10:
        yield "time", partial(Trial, unit="time"), (0.45, 0.6, 0.8)
        yield "bound 3", partial(Trial, bound=3.0), (0.6, 0.8)
        yield "corrected 1", partial(Corrected, keep=1.0), (0.2, 0.3, 0.45)
        yield "corrected 10", partial(Corrected, keep=10.0), (0.2, 0.3, 0.45)


def tuned(place: Place) -> Iterator[Method]:
    """DuDe and its rivals with steps by hand; of ten workers most of these runs are in experiments/paper."""
    small, third = place.workers == 10, place.workers // 3
    few = {1: (0.01,), 2: (0.02,), 3: (0.02, 0.05), 5: (0.05, 0.1), 10: (0.05, 0.1)}  # with step x tau_avg near 0.6
    for c, steps in few.items():
        yield f"dude c={c}" if c > 1 else "dude", partial(DuDe, wait_for=c), steps if not small or c == 10 else (0.1,)
    yield "fedbuff", partial(FedBuff, buffer=third), (0.1, 0.2) if small else (0.05, 0.1)
    yield "sync", SyncSGD, (0.1, 0.2)
    if not small:
        yield "vanilla", VanillaASGD, (0.01, 0.02)


def auto(place: Place) -> Iterator[Method]:
    """The rule that came of it."""
    yield "auto", FirstRule, (0.6,)


def waiting(place: Place) -> Iterator[Method]:
    """The same with last gradients in place of running means."""
    yield "waiting", WaitingDuDe, (0.45, 0.6, 0.8)


def control(place: Place) -> Iterator[Method]:
    """A rival computed where AutoDuDe was."""
    yield "fedbuff", partial(FedBuff, buffer=place.workers // 3), (0.1,)


def extreme(place: Place) -> Iterator[Method]:
    """Where one worker is hundreds of times faster than the slowest."""
    yield "dude", DuDe, (0.001, 0.002, 0.005)
    yield "mean", Trial, (0.6,)
    yield "corrected 3", partial(Corrected, keep=3.0), (0.3, 0.45)
    yield "vanilla", VanillaASGD, (0.01,)


TEN = [Place(10, std, seed) for seed in (0, 1, 2, 3, 4) for std in (1.0, 5.0)]
THIRTY = [Place(30, std, seed) for seed in (0, 1, 2, 3, 5) for std in (5.0, 1.0)]
EXTREME = [Place(30, 1.0, 4), Place(10, 5.0, 6)]
FEW = [place for place in (*THIRTY, *TEN) if place.seed < 3]
STAGES: dict[str, tuple[list[Place], Callable[[Place], Iterator[Method]]]] = {
    "auto": ([*EXTREME, *THIRTY, *TEN], auto),
    "waiting": ([*EXTREME, *THIRTY, *TEN], waiting),
    "control": ([place for place in TEN if place.std == 1.0], control),
    "extreme": (EXTREME, extreme),
    "explored": (FEW, explored),
    "tuned": ([*THIRTY, *TEN], tuned),
}
