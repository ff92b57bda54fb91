"""The settings that ``dualdelay train`` and ``dualdelay compare`` share; each field is a flag, its text the help."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..core import Algorithm, Problem
from ..core.errors import BadInput, nearest
from ..engine.result import EarlyStop
from ..runs.names import REGISTRIES, alternatives, call, label, parameters, parse, require_text, stem
from ..runs.seeds import seeded_problem, seeded_speeds, unvaried
from ..runs.settings import Compute, Evaluation, Saving, Server, SimulatedFleet
from ..runs.sweep import Options, Point
from ..simulation.availability import announced
from ..simulation.link import Link
from ..simulation.speeds import SpeedModel
from ..workers.ray_fleet import RayFleet

MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH")]
MaybeText = Annotated[str | None, tyro.conf.arg(metavar="STR")]
BoardPath = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="PATH",
        help="Write loss, metrics, faults and each worker's rate and delay into this folder, about once a second; look at "
        "them with: tensorboard --logdir PATH",
    ),
]
FleetText = Annotated[
    str,
    tyro.conf.arg(
        help="Who computes: 'simulated' workers on a virtual clock in this process, or 'ray' for real ones, a process "
        "each, such as 'ray[cpus=0.5,threads=2,gone=freeze,minimum=2]'. See: dualdelay list ray"
    ),
]

_SIMULATED = (
    "speeds",
    "absences",
    "latency",
    "bandwidth",
    "threads",
    "device",
    "cores",
    "precision",
    "table",
)  # what real workers cannot be told


def _filled(text: str, **given: int) -> str:
    """The text of a speed model with these settings wherever a model in it, with brackets, takes them and has none."""

    def fill(match: re.Match[str]) -> str:
        known, mine = parameters(REGISTRIES["speeds"][match[1]]), text[match.end() :]
        while (outside := re.sub(r"[\[(][^][()]*[])]", "", mine)) != mine:  # what stands in brackets is not its own
            mine = outside
        own = re.findall(r"(\w+)\s*=", mine.partition("]")[0])
        return match[0] + "".join(f"{name}={value}," for name, value in given.items() if name in known and name not in own)

    require_text(text)
    return re.sub(rf"\b({'|'.join(REGISTRIES['speeds'])})\[", fill, text)


@dataclass(frozen=True)
class Common:
    """What every run can be told."""

    problem: str = "digits"
    """What is trained, such as 'digits[workers=10,alpha=0.1]'; compare also takes 'digits[alpha=0.1|0.5]'. See: dualdelay
    list problems"""
    speeds: str = "truncated_normal[std=1]"
    """How fast simulated workers are, such as 'fixed[times=[1,2,4]]'; compare also takes 'truncated_normal[std=1|5]'. See:
    dualdelay list speeds"""
    absences: MaybePath = None
    """When simulated workers are away, of which the server is told: a .csv or .parquet file, columns worker, start, end."""
    updates: MaybeInt = None
    """Stop after so many server updates."""
    time: MaybeFloat = None
    """Stop at this time: simulated, where arrivals at exactly that time count, or seconds on real workers."""
    optimizer: MaybeText = None
    """The server's step: torch's optimiser of that name, such as 'Adam[betas=(0.9,0.99)]', with the method's lr."""
    schedule: MaybeText = None
    """How the step size changes: torch's schedule of that name, such as 'StepLR[step_size=100]', one step per update."""
    folder: MaybePath = None
    """Where the run is kept, so that it can be resumed and replayed; by default a new folder under runs/."""
    checkpoint_every: MaybeInt = None
    """Save after every so many updates; by default about twenty times in all."""
    keep: int = 3
    """How many checkpoints stay."""
    evaluate_every: MaybeInt = None
    """Evaluate the model after every so many updates."""
    evaluate_seconds: MaybeFloat = None
    """Evaluate the model at every so many seconds, simulated or real; by default so often that it takes a tenth of the
    work, fifty times at most."""
    evaluate_samples: MaybeInt = None
    """Evaluate on so many samples of each worker, always the same; the end is evaluated on all."""
    latency: float = 0.0
    """Simulated seconds that a message takes, whatever its size; the paper has none."""
    bandwidth: MaybeFloat = None
    """Bytes per simulated second at which messages travel; the paper has no limit."""
    metric: str = "objective"
    """What early stopping looks at."""
    target: MaybeFloat = None
    """Stop early when the metric is this good."""
    patience: MaybeInt = None
    """Stop early after so many evaluations without a new best metric."""
    on_nonfinite: Literal["retry", "leave", "stop"] = "retry"
    """When a gradient is not finite the worker tries again; ten in a row end the run, or make the worker leave; or the run
    stops at once."""
    keep_best: MaybeText = None
    """Keep the best model by this metric, such as objective or 'max accuracy', in best.safetensors."""
    threads: int = 1
    """Threads that torch uses in a simulation; small models are faster with one, and another number gives other bits."""
    device: MaybeText = None
    """Where simulated workers compute: cpu, or cuda for a GPU, where many gradients are taken in one call."""
    cores: MaybeInt = None
    """Cores that compute jobs in flight on the processor; by default all, if a gradient takes long enough."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """How precisely a network's products and convolutions are computed; tf32 on a GPU only."""
    table: Literal["full", "half", "host"] = "full"
    """How a method that remembers gradients keeps them: as they are, in half the memory (bfloat16), or on the host."""
    start: MaybePath = None
    """Initial weights: an earlier run's folder, model.safetensors or checkpoint."""
    tensorboard: BoardPath = None
    json: bool = False
    """Print one line of JSON at the end, and everything else to standard error."""

    def evaluation(self) -> Evaluation:
        """When the run is evaluated, and when it stops early."""
        early = self.target is not None or self.patience is not None
        if not early and self.metric != "objective":
            raise BadInput(
                f"metric {self.metric} is given, but neither target nor patience; give one of them to stop by it."
            )
        return Evaluation(
            self.evaluate_every,
            self.evaluate_seconds,
            self.evaluate_samples,
            best_by=self.keep_best,
            early_stop=EarlyStop(self.metric, self.target, self.patience) if early else None,
        )

    def server(self) -> Server:
        """How the server begins and moves the weights."""
        return Server(self.start, self.optimizer, self.schedule, self.on_nonfinite)

    def compute(self, batch: bool | None = None) -> Compute:
        """Where a simulation is computed."""
        return Compute(self.device, self.cores, self.precision, self.threads, batch, self.table)

    def saving(self, folder: Path) -> Saving:
        """Where the run is kept."""
        return Saving(folder, self.checkpoint_every, self.keep)

    def options(self, folder: Path, batch: bool | None) -> Options:
        """What all runs of a comparison have in common."""
        parts = (self.evaluation(), self.compute(batch), self.server())
        return Options(self.updates, self.time, self.saving(folder), *parts)

    def simulated(self, speeds: SpeedModel, workers: int) -> SimulatedFleet:
        """So many simulated workers of that speed."""
        changes = [] if self.absences is None else announced(self.absences, workers)
        return SimulatedFleet(speeds, Link(self.latency, self.bandwidth), changes)

    def built(self, seed: int, text: str = "") -> Problem:
        """What is trained in a run with this seed."""
        return seeded_problem(parse("problem", text or self.problem), seed)

    def paced(self, workers: int, seed: int, text: str = "") -> SpeedModel:
        """How fast so many workers are in a run with this seed, where the text leaves their number out."""
        return seeded_speeds(parse("speeds", _filled(text or self.speeds, n=workers), n=workers), seed)

    def unvaried(self, seeds: Sequence[int]) -> list[str]:
        """What stays the same although the seeds vary."""
        said: list[str] = []
        for problem, speeds in itertools.product(alternatives(self.problem), alternatives(self.speeds)):
            mine: Problem = parse("problem", problem)
            pace: SpeedModel = parse("speeds", _filled(speeds, n=mine.workers), n=mine.workers)
            said += [one for one in unvaried(mine, pace, seeds) if one not in said]
        return said

    def points(self, methods: Sequence[Algorithm[Any]], seeds: Sequence[int], folder: Path) -> list[Point]:
        """Every run of a comparison: all methods on all problems at all speeds that the texts name, for every seed."""
        points = []
        problems, paces = alternatives(self.problem), alternatives(self.speeds)
        least = min(self.built(seed, problem).workers for seed in seeds for problem in problems)
        for seed, (i, problem) in itertools.product(seeds, enumerate(problems)):
            mine = self.built(seed, problem)
            for (j, speeds), method in itertools.product(enumerate(paces), methods):
                several = [
                    (n, k, texts) for n, k, texts in (("problem", i, problems), ("speeds", j, paces)) if len(texts) > 1
                ]
                names = {"algorithm": label(method), "seed": seed, **{name: texts[k] for name, k, texts in several}}
                path = folder / stem(label(method), seed, *(f"{name}{k}" for name, k, _ in several))
                fleet = self.simulated(self.paced(mine.workers, seed, speeds), least)
                points.append(Point(names, method, mine, fleet, seed, path))
        return points

    def real_workers(self, fleet: str) -> RayFleet | None:
        """The real workers that a text names; None if they are simulated."""
        name, settings = call(fleet)
        if name == "simulated" and not settings:
            return None
        if name == "simulated":
            raise BadInput(
                f"{fleet!r} has settings; simulated workers are described by --speeds, --latency and --bandwidth."
            )
        if name not in REGISTRIES["fleet"]:
            raise BadInput(f"there is no fleet {name!r}; {nearest(name, ['simulated', *REGISTRIES['fleet']])}")
        given = [f"--{f.name}" for f in fields(self) if f.name in _SIMULATED and getattr(self, f.name) != f.default]
        if given:
            raise BadInput(
                f"{' and '.join(given)} cannot be chosen for real workers (--fleet {fleet}): they are as fast as they are. "
                "Leave it out, or simulate them (--fleet simulated). Threads are a setting of the fleet: 'ray[threads=2]'."
            )
        made: RayFleet = parse("fleet", fleet)
        return made
