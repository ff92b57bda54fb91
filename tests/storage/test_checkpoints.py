"""How often a run is saved, which checkpoints of its folder stay, and what a checkpoint can hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dualdelay as dd
from dualdelay.storage.files import decode, encode
from tables import CASES, LR


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_checkpoints_stay(keep: int, tmp_path: Path) -> None:
    for name, count in (("some", keep), ("all", 99)):
        dd.simulate(dd.VanillaASGD(LR), *CASES["noisy"], updates=24, folder=dd.Saving(tmp_path / name, 5, count))
    some, all_of_them = (sorted(p.name for p in (tmp_path / name / "checkpoints").iterdir()) for name in ("some", "all"))
    assert len(all_of_them) == 5  # after 5, 10, 15, 20 and, at the end, 24 updates
    assert some == all_of_them[-keep:]


def test_a_run_with_a_time_limit_is_saved_about_twenty_times(tmp_path: Path) -> None:
    dd.simulate(dd.SyncSGD(LR), *CASES["q3"], time=400.0, folder=dd.Saving(tmp_path / "run", keep=99))
    assert 18 <= len(list((tmp_path / "run" / "checkpoints").iterdir())) <= 22


def test_a_state_may_hold_tuples_sets_and_dicts_of_them() -> None:
    content = {"a": {(1, 2): (3, [4.5]), "b": {1, 2}}, "c": [None, True, torch.ones(2)]}
    back = decode(encode(content))
    assert back["a"] == content["a"] and back["c"][:2] == [None, True]
    assert torch.equal(back["c"][2], torch.ones(2))
