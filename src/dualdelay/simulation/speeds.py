"""How long a worker computes: pure models of ``seconds(worker, draw, start)``, every draw named by its place.

A speed model gives durations, the seconds of a job: a smaller number is a faster worker.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

from ..core.draws import Draws
from ..core.errors import BadInput, is_finite, require_kind, require_several, require_workers, shown
from ..core.settings import check_settings, positive
from .input_columns import floats, recorded_times

_STANDARD = NormalDist()
_WIDEST = 20.0  # a standard deviation of the logarithm beyond which times would leave the range of numbers
_WIDEST_DRIFT = 10.0  # the same for factors that drift
_MOST_STRETCHES = 100_000  # of a worker's pace in one job, after which something is not as it was meant
_MOST_CHANGES = 10_000_000  # of one worker's pace that are kept in memory
_drawing = threading.Lock()  # what is drawn in order is drawn by one thread at a time


class SpeedModel(ABC):
    """How long each job takes."""

    n: int  # workers

    @abstractmethod
    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        """The time worker ``worker`` computes on one minibatch as its job number ``draw``, begun at ``start``."""

    def job(self, worker: int, draw: int, start: float, batches: int) -> float:
        """The time of a job of several minibatches, all at the pace of its first."""
        seconds = self.seconds(worker, draw, start)
        try:
            return seconds * batches
        except TypeError:  # a user's None, say, which the clock refuses by name
            return seconds

    def plot(self, path: str | Path | None = None, jobs: int = 200, seed: int = 0) -> Any:
        """A picture of how long each worker's jobs take: a matplotlib figure, also written if ``path`` is given.

        jobs: how many of each worker's are drawn.
        seed: names the draws where the model was given none.
        """
        from ..analysis.portraits import speeds_portrait

        return speeds_portrait(self, path, jobs, seed)

    def _repr_html_(self) -> str:
        from ..analysis.html import speeds_html

        return speeds_html(self)


@dataclass(frozen=True)
class FixedSpeeds(SpeedModel):
    """Worker i always takes ``times[i]`` seconds: the paper's fixed-computation-speed model."""

    times: Sequence[float]
    """Seconds per gradient, one number for each worker."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", floats("times", self.times))
        object.__setattr__(self, "n", len(self.times))

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return self.times[worker]


@dataclass(frozen=True)
class TruncatedNormalSpeeds(SpeedModel):
    """Each worker's fixed time is drawn once from a normal conditioned on being above zero: the paper's TN(mean, std).

    Mean and standard deviation are those of the normal before truncation: with mean 1 and std 5 a worker takes 4.4 seconds
    on average. The density at zero is positive, so one very fast worker is no accident.
    """

    n: int
    """Number of workers."""
    std: float = positive(1.0)
    """Standard deviation before truncation; the paper uses 1 and 5."""
    seed: int | None = None
    """Names the draw; None: the run's own seed does."""
    mean: float = 1.0
    """Mean before truncation."""

    def __post_init__(self) -> None:
        check_settings(self)
        require_workers("n", self.n)
        if not is_finite(self.mean):
            raise BadInput(f"mean is {shown(self.mean)}; expected a finite number.")
        below = _STANDARD.cdf(-self.mean / self.std)  # the probability that is cut away
        if below > 1 - 1e-9:
            raise BadInput(f"mean is {self.mean} with std {self.std}: almost nothing is above zero; raise the mean.")
        draws = Draws(self.seed or 0, "speeds")
        levels = (below + draws.uniform(worker) * (1.0 - below) for worker in range(self.n))
        times = [self.mean + self.std * _STANDARD.inv_cdf(min(level, 1 - 2**-53)) for level in levels]
        if not all(map(math.isfinite, times)):
            raise BadInput(f"mean is {self.mean} with std {self.std}: times are too large for a number; lower them.")
        object.__setattr__(self, "times", tuple(max(time, 1e-12) for time in times))  # rounding may reach zero

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        times: tuple[float, ...] = self.__dict__["times"]
        return times[worker]


@dataclass(frozen=True)
class _RandomSpeeds(SpeedModel):
    means: Sequence[float]
    """Mean seconds per gradient, one number for each worker."""
    seed: int | None = None
    """Names the draws; None: the run's own seed does."""

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "means", floats("means", self.means))
        object.__setattr__(self, "n", len(self.means))
        object.__setattr__(self, "draws", Draws(self.seed or 0, "speeds"))

    def _uniform(self, worker: int, draw: int) -> float:
        draws: Draws = self.__dict__["draws"]
        return draws.uniform(worker, draw)


@dataclass(frozen=True)
class ExponentialSpeeds(_RandomSpeeds):
    """Every job's time is drawn from an exponential distribution with the worker's mean."""

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return -self.means[worker] * math.log(self._uniform(worker, draw))


@dataclass(frozen=True)
class LognormalSpeeds(_RandomSpeeds):
    """Every job's time is drawn from a lognormal distribution with the worker's mean."""

    sigma: float = positive(1.0, high=_WIDEST)
    """Standard deviation of the logarithm."""

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        normal = _STANDARD.inv_cdf(self._uniform(worker, draw))
        return self.means[worker] * math.exp(self.sigma * normal - self.sigma**2 / 2)


@dataclass(frozen=True)
class ParetoSpeeds(_RandomSpeeds):
    """Every job's time is drawn from a Pareto distribution with the worker's mean: mostly quick, sometimes very long."""

    shape: float = positive(2.0)
    """Tail exponent, above 1 so that the mean exists; the smaller, the heavier the tail."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape <= 1:
            raise BadInput(f"shape is {self.shape}; expected above 1, since otherwise there is no mean.")

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        least = self.means[worker] * (self.shape - 1) / self.shape
        return float(least * self._uniform(worker, draw) ** (-1 / self.shape))


@dataclass(frozen=True)
class PacedSpeeds(SpeedModel):
    """Another model whose workers change pace; a job under way changes pace with its worker.

    One may stand in another: the factors multiply at every moment, so the order does not matter.
    """

    speeds: SpeedModel
    """The times at factor 1."""

    def __post_init__(self) -> None:
        require_kind("speeds", self.speeds, SpeedModel, "dd.FixedSpeeds([1.0, 2.0]); on the shell 'fixed[times=[1,2]]'")
        check_settings(self)
        object.__setattr__(self, "n", self.speeds.n)

    @abstractmethod
    def stretch(self, worker: int, time: float) -> tuple[float, float]:
        """How many times slower this model makes a worker from ``time`` on (infinitely: it pauses), and until when."""

    def pace(self, worker: int, time: float) -> tuple[float, float]:
        """The same of this model and those in it together."""
        factor, until = self.stretch(worker, time)
        if not isinstance(self.speeds, PacedSpeeds):
            return factor, until
        other, sooner = self.speeds.pace(worker, time)
        return factor * other, min(until, sooner)

    def work(self, worker: int, draw: int, start: float, batches: int) -> float:
        """The time of a job at factor 1."""
        inner = self.speeds.work if isinstance(self.speeds, PacedSpeeds) else self.speeds.job
        return inner(worker, draw, start, batches)

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return self.job(worker, draw, start, 1)

    def job(self, worker: int, draw: int, start: float, batches: int) -> float:
        work, now, (factor, until) = self.work(worker, draw, start, batches), start, self.pace(worker, start)
        stretches = 0
        while work * factor > until - now:
            stretches += 1
            if stretches > _MOST_STRETCHES:
                raise BadInput(
                    f"worker {worker} changes its pace more than {_MOST_STRETCHES:,} times in one job, its number {draw}, "
                    f"which began at time {start:g}; expected fewer. Let each pace last longer, or jobs be shorter."
                )
            after, later = self.pace(worker, until)
            if after != factor:  # otherwise the stretch goes on, and nothing is rounded
                work, now, factor = work - (until - now) / factor, until, after
                if work <= 0:  # it ended with the stretch, but for rounding
                    return now - start
            until = later
        return now - start + work * factor


@dataclass(frozen=True)
class ChangingSpeeds(PacedSpeeds):
    """Another model whose workers grow slower or faster at given times; a job under way changes pace with its worker."""

    changes: Sequence[float]
    """The moments of change, rising."""
    factors: Sequence[Sequence[float]]
    """For each stretch of time, one more than there are changes, how many times slower each worker is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_several("changes", self.changes, "times")
        require_several("factors", self.factors, "lists of numbers, one for each worker")
        try:
            changes = tuple(float(change) for change in self.changes)
        except (TypeError, ValueError, OverflowError):
            changes = (math.nan,)
        if list(changes) != sorted(set(changes)) or not all(math.isfinite(change) for change in changes):
            raise BadInput(f"changes is {shown(self.changes)}; expected finite times, each above the one before.")
        factors = tuple(floats(f"factors[{k}]", row) for k, row in enumerate(self.factors))
        if len(factors) != len(changes) + 1 or any(len(row) != self.speeds.n for row in factors):
            raise BadInput(
                f"factors has rows of lengths {[len(row) for row in factors]}; expected {len(changes) + 1} rows (one more "
                f"than changes) of {self.speeds.n} numbers (one for each worker)."
            )
        object.__setattr__(self, "changes", changes)
        object.__setattr__(self, "factors", factors)

    def stretch(self, worker: int, time: float) -> tuple[float, float]:
        k = bisect_right(self.changes, time)
        return self.factors[k][worker], self.changes[k] if k < len(self.changes) else math.inf


@dataclass(frozen=True)
class RecordedSpeeds(SpeedModel):
    """Times that were measured: worker i's job number k takes ``times[i][k]``, from the front again when they run out."""

    times: str | Path | Sequence[Sequence[float]]
    """One list of seconds for each worker; or a .csv or .parquet file, columns worker and seconds, a row for each job."""

    def __post_init__(self) -> None:
        given = recorded_times(Path(self.times)) if isinstance(self.times, (str, Path)) else self.times
        require_several("times", given, "lists of seconds, one for each worker")
        rows = tuple(floats(f"times[{worker}]", row) for worker, row in enumerate(given))
        if not rows:
            raise BadInput("times is empty; expected one list of seconds for each worker.")
        object.__setattr__(self, "times", rows)
        object.__setattr__(self, "n", len(rows))

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        times: tuple[tuple[float, ...], ...] = self.__dict__["times"]
        return times[worker][draw % len(times[worker])]


def _require_few(changes: float, worker: int, time: float, what: str) -> None:
    """Refuse a pace that changes so often that neither memory nor patience suffices."""
    if not changes <= _MOST_CHANGES:
        raise BadInput(
            f"worker {worker} would have changed its pace about {changes:.2g} times by time {time:g}; expected "
            f"{_MOST_CHANGES:,} times at most. Make {what} longer, or the run shorter."
        )


class Alternating:
    """For each worker, the moments at which it turns from one state into the other and back, as far as anybody asked.

    Both states last exponentially distributed times, with means ``first`` and ``second``. They are drawn as if they had
    followed one another for ever, so that at every moment the second has the share second / (first + second).
    """

    def __init__(self, draws: Draws, first: float, second: float, *place: int) -> None:
        self._draws, self._means, self._place = draws, (first, second), place
        self._turns: dict[int, list[float]] = {}

    def at(self, worker: int, time: float) -> tuple[int, float]:
        """The state at that time, 0 for the first and 1 for the second, and until when it lasts."""
        turns = self._turns.setdefault(worker, [])
        begins = int(self._draws.uniform(*self._place, worker, 0) * sum(self._means) < self._means[1])
        if not turns or turns[-1] <= time:
            _require_few(2 * time / sum(self._means), worker, time, "the mean times of its states")
            with _drawing:
                while not turns or turns[-1] <= time:  # each after the one before, whatever is asked first
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
    every: float = positive(10.0)
    """Seconds between two changes."""
    keep: float = 0.9
    """Correlation of the logarithm from one stretch to the next; 0: all stretches are independent, 1: no change."""
    seed: int | None = None
    """Names the draws; None: the run's own seed does."""
    _levels: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _draws: Draws = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, most in (("spread", self.spread, _WIDEST_DRIFT), ("keep", self.keep, 1.0)):
            if not is_finite(value) or not 0 <= value <= most:
                raise BadInput(f"{name} is {shown(value)}; expected a number from 0 to {most:g}.")
        object.__setattr__(self, "_draws", Draws(self.seed or 0, "drift"))

    def stretch(self, worker: int, time: float) -> tuple[float, float]:
        _require_few(time / self.every, worker, time, "every")
        k = int(time // self.every)
        k += (k + 1) * self.every <= time  # the moment of a change belongs to what follows it, also where it was rounded
        levels = self._levels.setdefault(worker, [])  # of each stretch the factor's logarithm, in standard deviations
        if len(levels) <= k:
            with _drawing:
                for stretch in range(len(levels), k + 1):  # each from the one before, whatever is asked first
                    normal = _STANDARD.inv_cdf(self._draws.uniform(worker, stretch))
                    levels.append(self.keep * levels[-1] + math.sqrt(1.0 - self.keep**2) * normal if stretch else normal)
        return math.exp(self.spread * levels[k]), (k + 1) * self.every


@dataclass(frozen=True)
class BurstySpeeds(PacedSpeeds):
    """Another model whose workers are now and then much slower for a while, each at times of its own.

    Usual stretches and bursts last exponentially distributed times. At every moment, also the first, a worker is in a burst
    with probability burst / (usual + burst).
    """

    usual: float = positive(50.0)
    """Mean seconds of a usual stretch."""
    burst: float = positive(5.0)
    """Mean seconds of a burst."""
    factor: float = positive(10.0)
    """How many times slower a worker is in a burst."""
    seed: int | None = None
    """Names the draws; None: the run's own seed does."""
    _turns: Alternating = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_turns", Alternating(Draws(self.seed or 0, "bursts"), self.usual, self.burst))

    def stretch(self, worker: int, time: float) -> tuple[float, float]:
        state, until = self._turns.at(worker, time)
        return (float(self.factor) if state else 1.0), until
