"""AutoDuDe with running means: the lead that is left. On a processor, one place of the paper's panels takes minutes.

DUALDELAY_DATA=... python experiments/tuning/running.py WORKERS STD SEED ALPHA
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from settings import Place
from torch import Tensor

import dualdelay as dd
from dualdelay.algorithms.auto import AutoState
from dualdelay.algorithms.dude import DuDeState
from dualdelay.core import Arrival, Orders
from dualdelay.draws import Draws


@dataclass(kw_only=True)
class RunningState(AutoState):
    """AutoDuDe's state, with running means in the table."""

    heard: list[int]  # the update to which each worker reported last
    fresh: Tensor  # (d), float64: what came since the last update, each less its worker's mean


@dataclass(frozen=True)
class RunningDuDe(dd.AutoDuDe):
    """h_j <- h_j + a (G_j - h_j) with a = 1 - exp(-updates since j's last report / memory); x follows mean h + G_j - h_j.

    G_j - h_j is averaged over those who have reported since the last update. DuDe is a = 1; at a solution h_j = grad F_j,
    so nothing is biased. A fast worker's fresh gradient counts nearly whole at once, against its mean of a few updates ago.
    """

    span: float = 8.0
    """How many updates the means go back: the memory in the formula."""

    def init(self, x: Tensor, n: int, rng: Draws) -> RunningState:
        """The means are the first gradients, once they are there."""
        fresh = torch.zeros_like(x, dtype=torch.float64)
        return RunningState(**vars(super().init(x, n, rng)), heard=[0] * n, fresh=fresh)

    def step(self, s: DuDeState, a: Arrival) -> Orders:
        """Take the new mean into the table, and keep what is fresh apart."""
        assert isinstance(s, RunningState) and s.table is not None
        i, update = a.worker, s.version + 1
        share = 1.0 if i in s.missing else 1 - math.exp(-(update - s.heard[i]) / self.span)
        mean = s.table[i] + share * (a.value - s.table[i])
        s.fresh, s.heard[i] = s.fresh + (a.value - mean), update
        return super().step(s, a._replace(value=mean))

    def _update(self, s: DuDeState) -> Orders:
        assert isinstance(s, RunningState)
        before, total, count = s.version, s.total, len(s.waiting)
        s.total = total + s.fresh * (s.n / max(count, 1))
        orders = super()._update(s)
        s.total = total
        if s.version > before:
            s.fresh = torch.zeros_like(s.fresh)
        return orders


def main(workers: int, std: float, seed: int, alpha: float) -> None:
    """One run, as long as those in docs/tuning.md."""
    torch.set_num_threads(1)
    cell = Place(workers, std, seed).cell
    options = {"time": cell.horizon, "evaluate_seconds": cell.horizon / 5, "seed": seed}
    run = dd.simulate(RunningDuDe(), cell.problem(alpha), cell.speeds, **options)
    print(f"| {workers}, {alpha:g}, {std:g}, {seed} | {run.metrics.objective[-1]:.3f} | {run.metrics.accuracy[-1]:.3f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
