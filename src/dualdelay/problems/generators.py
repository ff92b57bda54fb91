"""The global random generators of torch, numpy and Python, on whose state no job may depend."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_lock = threading.RLock()  # there is one generator of each kind for the whole process, so runs in threads take turns
_spare: list[np.random.MT19937] = []  # to stand in for numpy's own, which is quicker than saving its state


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """The global generators of torch, numpy and Python start from a key, and are as before afterwards."""
    with _lock, torch.random.fork_rng(devices=[]):
        numpy: Any = np.random  # its types lack two names
        numpy_before, python_before = numpy.get_bit_generator(), random.getstate()
        generator = _spare.pop() if _spare else np.random.MT19937()
        devices: Any = torch  # some of the next are without types
        if devices.cuda.is_initialized() or devices.xpu.is_initialized() or devices.backends.mps.is_available():
            torch.manual_seed(key >> 1)
        else:  # the same without a stack trace for each device that is not in use, which costs as much as a small gradient
            torch.default_generator.manual_seed(key >> 1)
        numpy.set_bit_generator(generator)
        np.random.seed(key >> 32)
        random.seed(key)
        try:
            yield
        finally:
            numpy.set_bit_generator(numpy_before)
            _spare.append(generator)
            random.setstate(python_before)


def _states() -> dict[str, Any]:
    """What the global generators go on from, each in a form that can be compared."""
    torch_state, numpy_state = torch.get_rng_state().tolist(), str(np.random.get_state(legacy=False))
    return {"torch": torch_state, "numpy": numpy_state, "random": random.getstate()}


@contextmanager
def watched_generators() -> Iterator[list[str]]:
    """Leave the global generators as they were, and name those that were drawn from in between."""
    drew: list[str] = []
    with _lock, torch.random.fork_rng(devices=[]):
        before, numpy_before = _states(), np.random.get_state()
        try:
            yield drew
        finally:
            drew += [name for name, state in _states().items() if state != before[name]]
            np.random.set_state(numpy_before)
            random.setstate(before["random"])
