"""The small values that a run's options are grouped into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from torch import Tensor

from ..core import Arrival, State
from ..core.compression import Compress, require_way
from ..core.devices import require_device
from ..core.errors import BadInput, plain_number, require_kind, require_path, require_several, shown
from ..core.settings import check_settings, positive, thread_count, whole
from ..engine.evaluation import Metric
from ..engine.monitor import Logger
from ..engine.result import EarlyStop
from ..simulation.availability import Change, checked_changes
from ..simulation.clocks import VirtualClock
from ..simulation.link import Link
from ..simulation.speeds import SpeedModel
from .optimizer import Maker

Watch = Callable[[State, Arrival], None]
InitialWeights = Tensor | Mapping[str, Tensor] | str | Path | None
SpeedsOf = SpeedModel | Callable[[int], SpeedModel]
NO_LINK = Link()


@dataclass(frozen=True)
class Evaluation:
    """When the model is evaluated, off the clock, on what, and what follows from it.

    By default a run is evaluated so often that it takes about a tenth of the work, fifty times at most.
    """

    every: int | None = whole(None, label="every of the evaluation (--evaluate-every)")
    """After every so many updates."""
    seconds: float | None = positive(None, label="seconds of the evaluation (--evaluate-seconds)")
    """At every so many seconds, simulated or real."""
    samples: int | None = whole(None, label="samples of the evaluation (--evaluate-samples)")
    """On so many samples of each worker, always the same; the end is evaluated on all."""
    metrics: Mapping[str, Metric] | None = None
    """Functions of ``problem.model(x)`` of your own, by name."""
    best_by: str | None = None
    """The metric by which the best model is kept, such as "objective" or "max accuracy"."""
    early_stop: EarlyStop | None = None
    """When to stop before the end; the run then returns its best model."""

    def __post_init__(self) -> None:
        check_settings(self)
        if self.best_by is not None and not isinstance(self.best_by, str):
            raise BadInput(f"best_by is {shown(self.best_by)}; expected the name of a metric, such as 'objective'.")
        if self.early_stop is not None:
            require_kind("early_stop", self.early_stop, EarlyStop, "dd.EarlyStop(patience=5)")
            target = plain_number(self.early_stop.target)
            if target is not None and not (isinstance(target, (int, float)) and target == target):
                raise BadInput(f"the target of early_stop is {shown(target)}; expected a number.")
            metric, way = self.early_stop.metric, self.early_stop.keeps.split()[0]
            if self.best_by in (f"max {metric}", f"min {metric}") and self.best_by != f"{way} {metric}":
                raise BadInput(f"best_by is {self.best_by!r}, and early_stop follows '{way} {metric}'; give both one way.")

    @property
    def keeps(self) -> str | None:
        """The metric by which the best model is kept, if that is asked for: early stopping has one, too."""
        return self.early_stop.keeps if self.best_by is None and self.early_stop is not None else self.best_by


@dataclass(frozen=True)
class Compute:
    """Where a simulation is computed, by how many threads and how precisely."""

    device: str | None = None
    """"cpu" or "cuda"; by default where the problem's data are."""
    cores: int | None = thread_count(None)
    """Cores to use on the processor, with the same bits whatever their number; by default all. Runs of a sweep go side by
    side in processes; a run by itself has its jobs in flight computed by threads, if a gradient takes longer than handing
    it over."""
    precision: str = "float32"
    """Or "tf32" or "bfloat16", for a network's products and convolutions."""
    threads: int | None = thread_count(1)
    """Threads that torch uses: small models are faster with one, another number gives other bits, None is torch's own."""
    batch: bool | None = None
    """Whether jobs in flight are computed many in one call, with other last digits; by default on a GPU."""
    memory_limit: float | None = positive(None)
    """Bytes that runs of a sweep may take side by side, or copies of their problems in processes; by default half of what
    is free."""

    def __post_init__(self) -> None:
        check_settings(self)
        require_device(self.device or "cpu", self.precision)


@dataclass(frozen=True)
class Server:
    """How the server begins, moves the weights, keeps gradients, and what it does about those that are not finite."""

    initial_weights: InitialWeights = None
    """A flat tensor, a state dict, a file of one, or an earlier run's folder or checkpoint; by default the problem's."""
    optimizer: Maker = None
    """A name from torch.optim such as "Adam[betas=(0.9,0.99)]", or a function that makes one; by default plain SGD. The
    algorithm's lr is the learning rate."""
    schedule: Maker = None
    """A name from torch.optim.lr_scheduler such as "StepLR[step_size=100]", or a function that makes one."""
    on_nonfinite: Literal["retry", "leave", "stop"] = "retry"
    """A worker whose gradient is not finite tries again, and ten times in a row end the run ("retry") or make the worker
    "leave"; or the run ends at once ("stop")."""
    uplink: Compress = None
    """How workers' messages are made small: "int8", a byte for each number, or the share of the largest numbers, such as
    0.01. What one message leaves out is added to the next."""
    downlink: Compress = None
    """How models are made small on their way to a worker, in the same ways: it is sent the difference to what it was sent
    before, and what one difference leaves out is in the next."""
    gradient_table: Literal["full", "half", "host"] = "full"
    """How a method that remembers gradients keeps them: as they are, in half the memory (bfloat16), or on the host."""

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("uplink", "downlink"):
            require_way(name, getattr(self, name))


@dataclass(frozen=True)
class Saving:
    """Where a run is kept, so that it can be killed, resumed and replayed, and how often it is saved."""

    folder: str | Path | None = None
    """The run's folder, which is made unless it is there and empty; None: it is not saved."""
    every: int | None = whole(None, label="checkpoint_every")
    """Updates between two checkpoints; by default twenty checkpoints in all."""
    keep: int = whole(3)
    """How many of the newest checkpoints stay."""
    go_on: bool = False
    """Whether a folder that holds the same run already is resumed; otherwise it is refused."""

    def __post_init__(self) -> None:
        check_settings(self)
        if self.folder is not None:
            require_path("folder", self.folder)

    @property
    def path(self) -> Path | None:
        """The folder as a path."""
        return None if self.folder is None else Path(self.folder)

    @classmethod
    def of(cls, folder: str | Path | Saving | None, every: int | None) -> Saving:
        """What was given as a run's folder and its checkpoints."""
        if not isinstance(folder, Saving):
            return cls(folder, every)
        if every is not None:
            raise BadInput(f"checkpoint_every is {shown(every)}, and the folder a dd.Saving; give dd.Saving(every=...).")
        return folder


@dataclass(frozen=True)
class Reporting:
    """Who is shown how a run goes on."""

    watch: Sequence[Watch] = ()
    """Functions of the state and the arrival, called after every arrival."""
    log: Sequence[Logger] = ()
    """Functions of a step and its values, called about once a second and at every evaluation."""
    progress: bool = True
    """Whether progress is shown on standard error once a run takes more than two seconds."""
    report: Callable[[float, str], None] | None = None
    """Of a sweep: a function that is told the share that is done, and what is going on if several runs are."""

    def __post_init__(self) -> None:
        require_several("watch", self.watch, "functions of state and arrival")
        require_several("log", self.log, "functions of values and step")

    @classmethod
    def of(cls, watch: Sequence[Watch] | Reporting) -> Reporting:
        """What was given as ``watch``."""
        return watch if isinstance(watch, Reporting) else cls(watch)


@dataclass(frozen=True)
class SimulatedFleet:
    """Workers on a virtual clock: how long they compute, how long their messages travel, and who comes and goes."""

    speeds: SpeedsOf | None
    """A speed model, or in comparisons and sweeps a function that makes one for a seed; None: those of the run that is
    resumed."""
    link: Link = NO_LINK
    """How long messages travel by their size; by default no time."""
    changes: Sequence[Change] = ()
    """Workers that leave and join, of which the server hears."""

    def __post_init__(self) -> None:
        require_kind("link", self.link, Link, "dd.speeds.Link(latency=0.1)")
        object.__setattr__(self, "changes", tuple(checked_changes(self.changes)))

    def clock(self) -> VirtualClock:
        """The clock that these workers go by, once their speeds are a model."""
        return VirtualClock(cast("SpeedModel", self.speeds), self.link, self.changes)

    @classmethod
    def of(cls, speeds: SpeedsOf | SimulatedFleet | None) -> SimulatedFleet:
        """What was given as ``speeds``."""
        return speeds if isinstance(speeds, SimulatedFleet) else cls(speeds)


DEFAULT_EVALUATION, DEFAULT_COMPUTE, DEFAULT_SERVER = Evaluation(), Compute(), Server()
