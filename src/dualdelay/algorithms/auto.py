"""AutoDuDe: DuDe that chooses its own step and how many workers it waits for: docs/results/tuning.md has the rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, send
from ..core.aggregate import AggregateState
from ..core.draws import Draws
from ..core.settings import positive
from ..core.state import ShapedState


@dataclass(kw_only=True)
class AutoState(AggregateState, ShapedState):  # its table holds the running means h_i; x is the mean of the models z
    z: Tensor  # (d): the model that workers are sent
    start: Tensor  # (d): where z began
    sizes: Tensor = field(init=False)  # (k): what a weight of each of the k tensors is like at the start
    squares: Tensor = field(init=False)  # (k): the running mean square of the arriving gradients, for each tensor
    path: Tensor = field(init=False)  # (1): the sum of (1 + 2 tau) |u|^2
    reach: Tensor = field(init=False)  # (1): how far x has been from the start, in sizes
    versions: list[int]  # u_i: where each worker's newest gradient was taken
    wait_for: int  # workers per update
    newest: dict[int, Tensor] = field(default_factory=dict)  # G_j of the workers that have reported since, and idle
    round_start: int = 0  # a round lasts until half of the gradients were taken at this version or later
    rounds: int = 0  # with as many workers per update as now
    patience: int = 1  # rounds before it is tried with fewer; twice as many each time that those were too few
    fewer: bool = False  # whether the last change was to fewer

    def __post_init__(self) -> None:
        super().__post_init__()
        self.uncounted = set(range(self.workers))  # until they report
        self.sizes = self.weights.new_zeros(*self.weights.shape[:-1], 1, dtype=torch.float64)
        self.squares, self.path, self.reach = self.sizes.clone(), self.sizes.clone(), self.sizes.clone()


@dataclass(frozen=True)
class AutoDuDe(Algorithm[AutoState]):
    """DuDe with a running mean of each worker's gradients, over eight updates, that sets its own step and ``wait_for``.

    An update follows the mean of all h_i plus that of what is new, G_j - h_j. Each tensor moves in units of what its
    weights are at the start, over the root mean square of its gradients: by the farthest that the model has been from the
    start, but by 1 at least, over the root of the sum of squared directions, each counted 1 + 2 tau times for the delay
    tau. Workers compute at the model z that moves so; the run's model x is the mean of about the last twelfth of
    these. With an optimizer, that one steps along the direction, by ``lr``.
    """

    name, title = "auto", "AutoDuDe"
    colour, line, marker = "#332288", "-", "^"
    keeps, wastes = "a running mean of each worker's gradients, and two models", "the time of workers that wait"
    away = "its gradient leaves the average until it reports again"
    own_lr = "the factor of a step that it chooses itself"
    waits = False

    lr: float = positive(1.4)
    """What the chosen step is multiplied by, a tenth of this for a trained model; with an optimizer, the learning rate."""
    delay: ClassVar[float] = 8.0
    """What the means go back, in updates; waiting keeps the median delay between half of it and 1.4 times."""
    power: ClassVar[float] = 10.0
    """The model of the run is the mean of all z_t, with weights that grow about as t to this power."""
    nearest: ClassVar[float] = 1.0
    """How far from the start counts at least, in sizes: the weights are expected to move by about as much as they are."""
    longest: ClassVar[float] = 0.07
    """The longest step of a weight over ``lr``, in sizes, where a direction is as long as its gradients."""

    def init(self, x: Tensor, n: int, rng: Draws) -> AutoState:
        return AutoState(x, n, z=x, start=x, versions=[0] * n, wait_for=max(1, round(n / self.delay)))

    def model(self, s: AutoState, worker: int) -> Tensor:
        return s.z if s.optimizer is None else s.x

    def step(self, s: AutoState, a: Arrival) -> Orders:
        s.newest[a.worker], s.versions[a.worker] = a.value, a.version
        return self._update(s)

    def _update(self, s: AutoState) -> Orders:
        heard = len(s.newest.keys() | (set(s.present) - s.uncounted))
        if not s.newest or len(s.newest) < min(s.wait_for, heard) or 2 * heard < s.n:
            return []
        t, news = s.version + 1, torch.zeros_like(s.total)
        for j, gradient in s.newest.items():  # h_j <- h_j + a (G_j - h_j) with a = 1 - exp(-tau_j / 8), at first 1
            a = 1.0 if j in s.uncounted else 1 - math.exp((s.versions[j] - t) / self.delay)
            mean = torch.lerp(s.last(j), gradient, a)
            s.replace(j, mean)
            news += gradient - mean
        ages = sorted(t - version for worker, version in enumerate(s.versions) if worker not in s.uncounted)
        tau = ages[(len(ages) - 1) // 2]  # of as many as are half, the oldest
        if 2 * sum(age <= t - s.round_start for age in ages) >= len(ages):
            s.round_start = t
            self._end_round(s, tau)
        direction = s.total / s.counted + news / len(s.newest)
        if s.optimizer is None:
            mean_age = sum(ages) / len(ages)  # where a few are far older than most, steps go by one over this mean
            self._descend(s, direction.to(s.weights.dtype), max(tau, mean_age * mean_age / tau))
        else:
            s.descend(direction, self.lr)
        ready, s.newest = list(s.newest), {}
        return [send(worker) for worker in ready]

    def _end_round(self, s: AutoState, tau: int) -> None:
        """Wait for one worker fewer or more where the median delay is far from eight.

        Not for more than half of them, so that no certain worker is ever waited for.
        """
        s.rounds += 1
        if tau < 0.5 * self.delay and s.wait_for > 1 and s.rounds >= s.patience:
            s.wait_for, s.rounds, s.fewer = s.wait_for - 1, 0, True
        elif tau > 1.4 * self.delay and s.wait_for < (s.counted + 1) // 2:
            s.patience *= 2 if s.fewer else 1
            s.wait_for, s.rounds, s.fewer = s.wait_for + 1, 0, False

    def _descend(self, s: AutoState, direction: Tensor, tau: float) -> None:
        t, lengths = s.version + 1, torch.tensor([piece.shape[-1] for piece in s.pieces(s.z)], device=s.z.device)

        def spread(values: Tensor) -> Tensor:  # a number for each tensor -> one for each weight
            return torch.repeat_interleave(values.to(s.z.dtype), lengths, dim=-1, output_size=s.z.shape[-1])

        squares = [mean_squares(s, gradient) for gradient in s.newest.values()]
        square = sum(squares[1:], squares[0]) / len(squares)
        if t == 1:
            s.sizes, s.squares, s.reach = sizes(s), torch.zeros_like(square), torch.full_like(s.path, self.nearest)
        s.squares = torch.lerp(s.squares, square, 0.001)
        u = direction / spread((s.squares / (1 - 0.999**t)).sqrt()).clamp_min(torch.finfo(s.z.dtype).tiny)
        s.path = s.path + (1 + 2 * tau) * u.square().mean(-1, keepdim=True)
        each = spread(s.sizes)
        away = ((s.weights - s.start) / each).square().mean(-1, keepdim=True).sqrt()
        s.reach = torch.maximum(s.reach, torch.minimum(away, s.reach * 2 ** (1 / tau)))  # twofold in a delay at most
        step = (s.reach / s.path.sqrt().clamp_min(torch.finfo(s.path.dtype).tiny)).clamp_max(self.longest)
        s.z = s.z - (self.lr * step).to(s.z.dtype) * each * u
        s.descend(s.weights - s.z, (self.power + 1) / (t + self.power))

    def leave(self, s: AutoState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.newest.pop(worker, None)
        return self._update(s)

    def join(self, s: AutoState, worker: int) -> Orders:
        s.join(worker)
        return [send(worker)]


def mean_squares(s: AutoState, flat: Tensor) -> Tensor:
    """Of each tensor the mean of its squared numbers, in float64, where no square is too large or too small."""
    norms = [torch.linalg.vector_norm(piece, dim=-1, keepdim=True, dtype=torch.float64) for piece in s.pieces(flat)]
    counts = [max(1, piece.shape[-1]) for piece in s.pieces(flat)]
    return torch.cat([norm.square() / count for norm, count in zip(norms, counts, strict=True)], -1)


def sizes(s: AutoState) -> Tensor:
    """The root mean square of each tensor at the start; of one that is zero, what torch would have begun it with."""
    shapes = [shape for _, shape in s.places(s.start)]
    usual = [1 / math.sqrt(3 * max(1, math.prod(shape[1:] if len(shape) > 1 else shape))) for shape in shapes]
    of_matrices = sorted(size for size, shape in zip(usual, shapes, strict=True) if len(shape) > 1)
    if of_matrices:  # a vector, such as a bias, is like the matrices
        like = of_matrices[len(of_matrices) // 2]
        usual = [size if len(shape) > 1 else like for size, shape in zip(usual, shapes, strict=True)]
    roots = mean_squares(s, s.start).sqrt()
    return torch.where(roots > 0, roots, torch.tensor(usual, dtype=roots.dtype, device=roots.device))
