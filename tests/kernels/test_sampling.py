"""The samples that jobs take, drawn by the package's own kernel: those of ``core.draws``, to the last bit."""

from __future__ import annotations

import pytest
import torch

from dualdelay.core.draws import Draws, integers_at
from dualdelay.kernels.sampling import drawn


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_rows_are_those_of_the_job_s_name(batch: int) -> None:
    places = [(0, 5, 0, 0, 0), (5, 1, -3, 1, 2), (6, 30, 2**40, 17, 10**6), (2, 34, -(2**60), 3, 2**31)]
    bases = [Draws(seed, "minibatch").base for _, _, seed, _, _ in places]
    assert min(bases) < 0 < max(bases)  # both signs
    table = [
        (begin, bound, base, worker, draw) for (begin, bound, _, worker, draw), base in zip(places, bases, strict=True)
    ]
    located = torch.tensor(table).T.contiguous()
    order = torch.randperm(36, generator=torch.Generator().manual_seed(0))
    begin, bound, base, worker, draw = located
    rows = integers_at(base, bound, batch, worker, draw)
    assert torch.equal(drawn(located, order, batch), order[begin[:, None] + rows])
    for row, (_, most, seed, one, other) in zip(rows, places, strict=True):
        assert row.tolist() == Draws(seed, "minibatch").integers(most, batch, one, other).tolist()
