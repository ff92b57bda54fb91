"""The global generators of torch, numpy and Python, which a job must not depend on."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_turn = threading.RLock()  # there is one generator of each kind for the whole process, so runs in threads take turns
_spare: list[np.random.MT19937] = []  # each stands in for numpy's own at times, which is quicker than to save a state


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """The global generators of torch, numpy and Python start at a named place, and are as before afterwards."""
    with _turn, torch.random.fork_rng(devices=[]):
        numpy: Any = np.random  # its types lack two names
        in_numpy, in_python = numpy.get_bit_generator(), random.getstate()
        other = _spare.pop() if _spare else np.random.MT19937()
        devices: Any = torch  # some of the next are without types
        if devices.cuda.is_initialized() or devices.xpu.is_initialized() or devices.backends.mps.is_available():
            torch.manual_seed(key >> 1)
        else:  # the same without a stack trace for each device that is not in use, which costs as much as a small gradient
            torch.default_generator.manual_seed(key >> 1)
        numpy.set_bit_generator(other)
        np.random.seed(key >> 32)
        random.seed(key)
        try:
            yield
        finally:
            numpy.set_bit_generator(in_numpy)
            _spare.append(other)
            random.setstate(in_python)


@contextmanager
def watched_generators() -> Iterator[list[str]]:
    """Leave the global generators as they were, and name those that were used in between."""
    drew: list[str] = []
    with _turn:
        in_torch, in_numpy, in_python = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
        try:
            yield drew
        finally:
            if not torch.equal(in_torch, torch.get_rng_state()):
                drew.append("torch")
            if str(in_numpy) != str(np.random.get_state(legacy=False)):
                drew.append("numpy")
            if in_python != random.getstate():
                drew.append("random")
            torch.set_rng_state(in_torch)
            np.random.set_state(in_numpy)
            random.setstate(in_python)
