"""The global generators of torch, numpy and Python, which a job must not depend on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Torch's global generator starts at a named place and is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        devices: Any = torch  # some of the next are without types
        if devices.cuda.is_initialized() or devices.xpu.is_initialized() or devices.backends.mps.is_available():
            torch.manual_seed(key >> 1)
        else:  # the same without a stack trace for each device that is not in use, which costs as much as a small gradient
            torch.default_generator.manual_seed(key >> 1)
        yield


@contextmanager
def watched_generators() -> Iterator[list[str]]:
    """Leave the global generators as they were, and name those that were used in between."""
    drew: list[str] = []
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
