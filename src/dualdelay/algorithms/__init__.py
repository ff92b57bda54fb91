"""The methods. To add one: a file like the others, and a row in the table below."""

from __future__ import annotations

from typing import Any

from ..core import Algorithm
from .dude import DuDe
from .fedbuff import FedBuff
from .mifa import MIFA
from .shuffled import ShuffledASGD
from .siag import SIAG
from .sync import SyncSGD
from .uniform import UniformASGD
from .vanilla import VanillaASGD

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "dude": DuDe,
    "sync": SyncSGD,
    "vanilla": VanillaASGD,
    "uniform": UniformASGD,
    "shuffled": ShuffledASGD,
    "fedbuff": FedBuff,
    "mifa": MIFA,
    "siag": SIAG,
}

__all__ = ["ALGORITHMS", "MIFA", "SIAG", "DuDe", "FedBuff", "ShuffledASGD", "SyncSGD", "UniformASGD", "VanillaASGD"]
