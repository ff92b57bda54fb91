"""Which checkpoints of a run's folder stay."""

from __future__ import annotations

from pathlib import Path

import pytest

import dualdelay as dd
from tables import CASES, LR


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_checkpoints_stay(keep: int, tmp_path: Path) -> None:
    for name, count in (("some", keep), ("all", 99)):
        dd.simulate(dd.VanillaASGD(LR), *CASES["noisy"], updates=24, folder=dd.Saving(tmp_path / name, 5, count))
    some, all_of_them = (sorted(p.name for p in (tmp_path / name / "checkpoints").iterdir()) for name in ("some", "all"))
    assert len(all_of_them) == 5  # after 5, 10, 15, 20 and, at the end, 24 updates
    assert some == all_of_them[-keep:]
