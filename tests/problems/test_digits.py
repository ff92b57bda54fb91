"""Where the digits come from."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import dualdelay as dd
from dualdelay.problems import digits


@pytest.fixture(autouse=True)
def anew() -> None:
    digits._table.cache_clear()


def test_they_are_scikit_learns_also_where_its_file_has_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = np.column_stack(load_digits(return_X_y=True))
    assert (digits._table() == expected).all()
    digits._table.cache_clear()
    monkeypatch.setattr(digits, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / "__init__.py")))
    assert (digits._table() == expected).all()


def test_without_scikit_learn_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(dd.BadInput, match=r"scikit-learn, which is not installed: pip install scikit-learn\."):
        dd.Digits()
