"""The methods. To add one: a file like the others, and a row in the table below."""

from __future__ import annotations

from typing import Any

from ..core import Algorithm
from .aced import ACED as ACED
from .auto import AutoDuDe as AutoDuDe
from .ca2fl import CA2FL as CA2FL
from .delay_adaptive import DelayAdaptiveASGD as DelayAdaptiveASGD
from .dude import DuDe as DuDe
from .fadas import FADAS as FADAS
from .fedasync import FedAsync as FedAsync
from .fedbuff import FedBuff as FedBuff
from .fedfix import FedFix as FedFix
from .generalized import GeneralizedASGD as GeneralizedASGD
from .iag import IAG as IAG
from .malenia import MaleniaSGD as MaleniaSGD
from .mifa import MIFA as MIFA
from .rennala import RennalaSGD as RennalaSGD
from .rescaled import RescaledASGD as RescaledASGD
from .ringleader import RingleaderASGD as RingleaderASGD
from .ringmaster import RingmasterASGD as RingmasterASGD
from .sag import SAG as SAG
from .saga import SAGA as SAGA
from .shuffled import ShuffledASGD as ShuffledASGD
from .siag import SIAG as SIAG
from .sync import SyncSGD as SyncSGD
from .sync_by_speed import SyncBySpeed as SyncBySpeed
from .uniform import UniformASGD as UniformASGD
from .vanilla import VanillaASGD as VanillaASGD

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "dude": DuDe,
    "auto": AutoDuDe,
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
