"""The methods. To add one: a file like the others, and a row in the table below."""

from __future__ import annotations

from typing import Any

from ..core import Algorithm
from .aced import ACED
from .ca2fl import CA2FL
from .delay_adaptive import DelayAdaptiveASGD
from .dude import DuDe
from .fadas import FADAS
from .fedasync import FedAsync
from .fedbuff import FedBuff
from .fedfix import FedFix
from .generalized import GeneralizedASGD
from .iag import IAG
from .malenia import MaleniaSGD
from .mifa import MIFA
from .rennala import RennalaSGD
from .rescaled import RescaledASGD
from .ringleader import RingleaderASGD
from .ringmaster import RingmasterASGD
from .sag import SAG
from .saga import SAGA
from .shuffled import ShuffledASGD
from .siag import SIAG
from .sync import SyncSGD
from .sync_by_speed import SyncBySpeed
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
    "rescaled": RescaledASGD,
    "malenia": MaleniaSGD,
    "ringleader": RingleaderASGD,
    "ca2fl": CA2FL,
    "aced": ACED,
    "sync_by_speed": SyncBySpeed,
    "rennala": RennalaSGD,
    "ringmaster": RingmasterASGD,
    "delay_adaptive": DelayAdaptiveASGD,
    "generalized": GeneralizedASGD,
    "fedasync": FedAsync,
    "fedfix": FedFix,
    "iag": IAG,
    "sag": SAG,
    "saga": SAGA,
    "fadas": FADAS,
}

__all__ = [
    "ACED",
    "ALGORITHMS",
    "CA2FL",
    "FADAS",
    "IAG",
    "MIFA",
    "SAG",
    "SAGA",
    "SIAG",
    "DelayAdaptiveASGD",
    "DuDe",
    "FedAsync",
    "FedBuff",
    "FedFix",
    "GeneralizedASGD",
    "MaleniaSGD",
    "RennalaSGD",
    "RescaledASGD",
    "RingleaderASGD",
    "RingmasterASGD",
    "ShuffledASGD",
    "SyncBySpeed",
    "SyncSGD",
    "UniformASGD",
    "VanillaASGD",
]
