"""Workers whose pace changes by chance: a slow drift, and bursts of slowness. Every draw is named by its place."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from statistics import NormalDist

from ..core.draws import Draws
from ..core.errors import BadInput, is_finite, require_positive, shown, take_plain_numbers
from .speeds import PacedSpeeds

_STANDARD = NormalDist()
_one_after_the_other = threading.Lock()  # what is drawn in order is drawn by one thread at a time
_MOST = 10_000_000  # changes of one worker's pace that are kept in mind
_WIDEST = 10.0  # a standard deviation of the logarithm beyond which factors would leave the range of numbers


def require_few(changes: float, worker: int, time: float, what: str) -> None:
    """Refuse a pace that would have changed so often that neither the memory nor anybody's patience is enough."""
    if not changes <= _MOST:
        raise BadInput(
            f"worker {worker} would have changed its pace about {changes:.2g} times by time {time:g}; expected {_MOST:,} "
            f"times at most. Make {what} longer, or the run shorter."
        )


class Alternating:
    """For each worker, the moments at which it turns from one state into the other and back, as far as anybody asked.

    Both states last exponentially distributed times, with means ``first`` and ``second``. They are drawn as if they had
    followed one another for ever, so that at every moment the second has the share second / (first + second).
    """

    def __init__(self, draws: Draws, first: float, second: float, *place: int) -> None:
        self._draws, self._means, self._place = draws, (first, second), place
        self._turns: dict[int, list[float]] = {}

    def begins(self, worker: int) -> int:
        """The state at time 0: 0 is the first, 1 the second."""
        return int(self._draws.uniform(*self._place, worker, 0) * sum(self._means) < self._means[1])

    def at(self, worker: int, time: float) -> tuple[int, float]:
        """The state at that time, and until when it lasts."""
        turns, begins = self._turns.setdefault(worker, []), self.begins(worker)
        if not turns or turns[-1] <= time:
            require_few(2 * time / sum(self._means), worker, time, "the mean times of its states")
            with _one_after_the_other:
                while not turns or turns[-1] <= time:  # each after the one before, so that who asks first changes nothing
                    mean = self._means[(begins + len(turns)) % 2]
                    length = -mean * math.log(self._draws.uniform(*self._place, worker, len(turns) + 1))
                    turns.append((turns[-1] if turns else 0.0) + length)
        k = bisect_right(turns, time)
        return (begins + k) % 2, turns[k]


@dataclass(frozen=True)
class DriftingSpeeds(PacedSpeeds):
    """Another model whose workers drift: every so often each gets slower or faster by chance, and partly stays what it was.

    The logarithm of a worker's factor is an autoregressive process of order one; half of the time the factor is above 1,
    and its mean is exp(spread**2 / 2).
    """

    spread: float = 0.5
    """Standard deviation of the factor's logarithm, at every moment; 0: no drift."""
    every: float = 10.0
    """Seconds between two changes."""
    keep: float = 0.9
    """Correlation of the logarithm from one stretch to the next; 0: all stretches are independent, 1: no change."""
    seed: int | None = None
    """Names the draws; None: the run's own seed does."""
    _levels: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _draws: Draws = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        take_plain_numbers(self)
        require_positive("every", self.every)
        for name, value, most in (("spread", self.spread, _WIDEST), ("keep", self.keep, 1.0)):
            if not is_finite(value) or not 0 <= value <= most:
                raise BadInput(f"{name} is {shown(value)}; expected a number from 0 to {most:g}.")
        object.__setattr__(self, "_draws", Draws(self.seed or 0, "drift"))

    def level(self, worker: int, k: int) -> float:
        """The logarithm of a worker's factor in stretch number ``k``, in units of its standard deviation."""
        levels = self._levels.setdefault(worker, [])
        if len(levels) <= k:
            with _one_after_the_other:
                for stretch in range(
                    len(levels), k + 1
                ):  # each from the one before, so that who asks first changes nothing
                    normal = _STANDARD.inv_cdf(self._draws.uniform(worker, stretch))
                    levels.append(self.keep * levels[-1] + math.sqrt(1.0 - self.keep**2) * normal if stretch else normal)
        return levels[k]

    def stretch(self, worker: int, time: float) -> tuple[float, float]:
        require_few(time / self.every, worker, time, "every")
        k = int(time // self.every)
        k += (k + 1) * self.every <= time  # the moment of a change belongs to what follows it, also where it was rounded
        return math.exp(self.spread * self.level(worker, k)), (k + 1) * self.every


@dataclass(frozen=True)
class BurstySpeeds(PacedSpeeds):
    """Another model whose workers are now and then much slower for a while, each at times of its own.

    Usual stretches and bursts last exponentially distributed times. At every moment, also the first, a worker is in a burst
    with probability burst / (usual + burst).
    """

    usual: float = 50.0
    """Mean seconds of a usual stretch."""
    burst: float = 5.0
    """Mean seconds of a burst."""
    factor: float = 10.0
    """How many times slower a worker is in a burst."""
    seed: int | None = None
    """Names the draws; None: the run's own seed does."""
    _turns: Alternating = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        take_plain_numbers(self)
        for name in ("usual", "burst", "factor"):
            require_positive(name, getattr(self, name))
        object.__setattr__(self, "_turns", Alternating(Draws(self.seed or 0, "bursts"), self.usual, self.burst))

    def stretch(self, worker: int, time: float) -> tuple[float, float]:
        state, until = self._turns.at(worker, time)
        return (float(self.factor) if state else 1.0), until
