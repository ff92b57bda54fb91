from collections.abc import Iterator

import pytest
import torch

import dualdelay as dd
from own import METHODS

torch.set_num_threads(1)  # the tensors are tiny: a second thread would mostly wait


@pytest.fixture
def own_methods() -> Iterator[None]:
    """A user's own methods stand in the table of algorithms while a test lasts."""
    dd.ALGORITHMS.update(METHODS)
    yield
    for name in METHODS:
        del dd.ALGORITHMS[name]
