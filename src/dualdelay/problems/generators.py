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


@contextmanager
def watched_generators() -> Iterator[list[str]]:
    """Leave the global generators as they were, and name those that were drawn from in between."""
    drew: list[str] = []
    with _lock:
        torch_before, numpy_before, python_before = (
            torch.get_rng_state(),
            np.random.get_state(legacy=False),
            random.getstate(),
        )
        try:
            yield drew
        finally:
            if not torch.equal(torch_before, torch.get_rng_state()):
                drew.append("torch")
            if str(numpy_before) != str(np.random.get_state(legacy=False)):
                drew.append("numpy")
            if python_before != random.getstate():
                drew.append("random")
            torch.set_rng_state(torch_before)
            np.random.set_state(numpy_before)
            random.setstate(python_before)
