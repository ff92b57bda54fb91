"""Asynchronous distributed training for PyTorch in which every worker counts the same, however slow it is."""

__version__ = "0.1.0"

from . import theory
from .algorithms import (
    ACED,
    ALGORITHMS,
    CA2FL,
    FADAS,
    IAG,
    MIFA,
    SAG,
    SAGA,
    SIAG,
    AutoDuDe,
    DelayAdaptiveASGD,
    DuDe,
    FedAsync,
    FedBuff,
    FedFix,
    GeneralizedASGD,
    MaleniaSGD,
    RennalaSGD,
    RescaledASGD,
    RingleaderASGD,
    RingmasterASGD,
    ShuffledASGD,
    SyncBySpeed,
    SyncSGD,
    UniformASGD,
    VanillaASGD,
)
from .availability import SPEEDS, Absence, AwaySpeeds, dropouts, on_off, told
from .clocks import join, leave
from .comparison import compare
from .config import label, parse
from .core import Algorithm, Arrival, Job, Order, Problem, again, cancel, send, wake
from .delays import Delays, delay_grids
from .draws import Draws
from .drive import Interrupted
from .errors import BadInput, DualDelayError, ReplayMismatch, RunFailed
from .links import Link
from .loggers import TensorBoard
from .memory import AggregateState, aggregate
from .paces import BurstySpeeds, DriftingSpeeds
from .problems import (
    PROBLEMS,
    Cifar10,
    Clipped,
    Digits,
    FullGradients,
    LocalSteps,
    Logistic,
    Network,
    Quadratic,
    without_batchnorm,
)
from .ray_fleet import RayFleet
from .recorded import load, replay, resume
from .result import EarlyStop, Run
from .run import simulate, train
from .speeds import (
    ChangingSpeeds,
    ExponentialSpeeds,
    FixedSpeeds,
    LognormalSpeeds,
    ParetoSpeeds,
    RecordedSpeeds,
    SpeedModel,
    TruncatedNormalSpeeds,
)
from .state import State
from .sweep import Sweep, sweep
from .trace import Table, Trace

__all__ = [
    "ACED",
    "ALGORITHMS",
    "CA2FL",
    "FADAS",
    "IAG",
    "MIFA",
    "PROBLEMS",
    "SAG",
    "SAGA",
    "SIAG",
    "SPEEDS",
    "Absence",
    "AggregateState",
    "Algorithm",
    "Arrival",
    "AutoDuDe",
    "AwaySpeeds",
    "BadInput",
    "BurstySpeeds",
    "ChangingSpeeds",
    "Cifar10",
    "Clipped",
    "DelayAdaptiveASGD",
    "Delays",
    "Digits",
    "Draws",
    "DriftingSpeeds",
    "DuDe",
    "DualDelayError",
    "EarlyStop",
    "ExponentialSpeeds",
    "FedAsync",
    "FedBuff",
    "FedFix",
    "FixedSpeeds",
    "FullGradients",
    "GeneralizedASGD",
    "Interrupted",
    "Job",
    "Link",
    "LocalSteps",
    "Logistic",
    "LognormalSpeeds",
    "MaleniaSGD",
    "Network",
    "Order",
    "ParetoSpeeds",
    "Problem",
    "Quadratic",
    "RayFleet",
    "RecordedSpeeds",
    "RennalaSGD",
    "ReplayMismatch",
    "RescaledASGD",
    "RingleaderASGD",
    "RingmasterASGD",
    "Run",
    "RunFailed",
    "ShuffledASGD",
    "SpeedModel",
    "State",
    "Sweep",
    "SyncBySpeed",
    "SyncSGD",
    "Table",
    "TensorBoard",
    "Trace",
    "TruncatedNormalSpeeds",
    "UniformASGD",
    "VanillaASGD",
    "again",
    "aggregate",
    "cancel",
    "compare",
    "delay_grids",
    "dropouts",
    "join",
    "label",
    "leave",
    "load",
    "on_off",
    "parse",
    "replay",
    "resume",
    "send",
    "simulate",
    "sweep",
    "theory",
    "told",
    "train",
    "wake",
    "without_batchnorm",
]
