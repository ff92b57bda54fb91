"""How samples are put into batches, and which of a worker's samples make up the minibatch of each job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.draws import Draws
from ..core.errors import BadInput, plain_number, require_room, require_several, require_whole
from ..core.settings import check_settings, whole

Collate = Callable[[list[Any]], Any]

_BLOCK = 32  # minibatches of a worker that are drawn together: one by one they cost as much as a small gradient
_MOST_BLOCKS = 1024  # workers for which a block is kept


@dataclass(frozen=True)
class Batches:
    """How a network's samples are put into batches."""

    size: int | Sequence[int] = 64
    """Samples per gradient, one number or one for each worker."""
    replacement: bool = True
    """Whether a minibatch is drawn with replacement, as in the paper."""
    collate_fn: Collate | None = None
    """Makes a batch of a list of samples, as in torch's DataLoader; for samples of varying length, say."""
    stochastic: bool = False
    """Whether random numbers are drawn where a batch is made or computed with, as by augmentation and dropout. The global
    generators of torch, numpy and Python are then seeded by the job's name around each gradient. Runs in several threads
    take turns with them; they belong to the process, so while such a run computes in one thread, code of your own in
    another should not draw from them."""
    evaluation_size: int | None = whole(None)
    """Samples in one call of an evaluation; None: 1,024, or 16,384 on a GPU. A metric that is no mean over batches, such as
    an AUC, needs so many that all held-out data are in one."""

    def __post_init__(self) -> None:
        check_settings(self)


def portion(count: int, part: int, parts: int) -> slice:
    """Which of ``count`` things are in one of ``parts`` parts: neighbours, and no part has two more than another."""
    size, larger = divmod(count, parts)
    start = part * size + min(part, larger)
    return slice(start, start + size + (part < larger))


class Minibatches:
    """Which samples make up the minibatch of each job."""

    def __init__(self, workers: int, batch_size: int | Sequence[int], seed: int, replacement: bool) -> None:
        batch_size = plain_number(batch_size)
        if not isinstance(batch_size, int):
            require_several("batch_size", batch_size, "numbers, one for each worker, or one number for all")
        self.sizes = [batch_size] * workers if isinstance(batch_size, int) else list(map(plain_number, batch_size))
        if len(self.sizes) != workers:
            raise BadInput(f"batch_size has {len(self.sizes)} numbers; expected one, or {workers}, one for each worker.")
        for worker, size in enumerate(self.sizes):
            require_whole(f"batch_size of worker {worker}", size, 1)
        largest = max(self.sizes)
        require_room(f"a minibatch of {largest} samples", 3.0 * 8 * _BLOCK * largest, "use a smaller batch_size")
        self._replacement, self._draws = replacement, Draws(seed, "minibatch")
        self._blocks: dict[int, tuple[int, tuple[Tensor, ...]]] = {}  # by worker: a block's number and its minibatches

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}

    @property
    def size(self) -> int | None:
        """The size of all minibatches; None if they differ."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    @property
    def base(self) -> int | None:
        """The seed of the draws for ``draws.integers_at``; None if minibatches are drawn without replacement."""
        return self._draws.base if self._replacement else None

    def require_enough(self, worker: int, samples: int, name: str) -> None:
        """Refuse data with too few samples for a minibatch without replacement."""
        if (size := self.sizes[worker]) > samples and not self._replacement:
            what = f"{name} has {samples} samples, fewer than its batch of {size}, and replacement=False"
            raise BadInput(f"{what}; take a smaller batch or draw with replacement.")

    def extended(self, workers: int) -> Minibatches:
        """Minibatches for more workers, each new worker's as large as the last one's."""
        sizes = [*self.sizes, *self.sizes[-1:] * (workers - len(self.sizes))]
        return Minibatches(workers, sizes, self._draws.seed, self._replacement)

    def reseeded(self, seed: int) -> Minibatches:
        """Minibatches of the same sizes that another seed draws."""
        return Minibatches(len(self.sizes), self.sizes, seed, self._replacement)

    def epoch(self, worker: int, samples: int) -> int:
        """How many minibatches have as many samples as the worker."""
        return -(-samples // self.sizes[worker])

    def rows(self, worker: int, draw: int, samples: int) -> Tensor:
        """The minibatch of a job, as positions in the worker's own ``samples``; not to be written to."""
        size = self.sizes[worker]
        if not self._replacement:
            return torch.from_numpy(self._draws.permutation(samples, worker, draw)[:size])
        number, row = divmod(draw, _BLOCK)
        block = self._blocks.get(worker)
        if block is None and len(self._blocks) == _MOST_BLOCKS:
            return torch.from_numpy(self._draws.integers(samples, size, worker, draw))
        if block is None or block[0] != number:
            places = ((worker, later) for later in range(number * _BLOCK, (number + 1) * _BLOCK))
            block = (number, torch.from_numpy(self._draws.tables(samples, size, places)).unbind(0))
            self._blocks[worker] = block
        return block[1][row]
