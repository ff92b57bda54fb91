"""What can be done with a run's folder: go on with the run, or recompute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .clocks import RecordedClock
from .config import rebuild
from .core import Algorithm, Problem
from .devices import using_precision
from .drive import Watch, drive, ended_run, totals
from .errors import BadInput, ReplayMismatch
from .evaluation import Metric
from .files import load_table, load_weights
from .fleet import using_threads
from .folder import Folder, config_digest, digest_of
from .local_fleet import LocalFleet
from .loop import Loop
from .monitor import Logger
from .optimizer import Maker, optimizer_of
from .ray_fleet import RayFleet
from .result import EarlyStop, Run
from .setup import gradients_of, make_loop, manned, recorded_problem
from .speeds import SpeedModel
from .trace import Table

_CLOSE, _EARLY = 1e-3, 100  # how well the losses of the first arrivals agree when a run is computed in other company


def resume(
    folder: str | Path,
    updates: int | None = None,
    time: float | None = None,
    problem: Problem | None = None,
    *,
    algorithm: Algorithm[Any] | None = None,
    speeds: SpeedModel | None = None,
    fleet: RayFleet | None = None,
    metrics: Mapping[str, Metric] | None = None,
    optimizer: Maker = None,
    schedule: Maker = None,
    watch: Sequence[Watch] = (),
    log: Sequence[Logger] = (),
    cores: int | None = None,
) -> Run:
    """Go on from a folder's last good checkpoint, to the totals it was started with or to new ones.

    A problem, algorithm, speed model, metric, optimizer or schedule of your own cannot be built from the folder: pass it
    again. A problem is checked by its fingerprint. A simulation ends with the same bits as one that was never stopped; real
    workers go on in new processes, and what had arrived since the checkpoint is computed again. Those may be given another
    ``fleet``, with the same number of threads.
    """
    place = Folder(Path(folder))
    config = place.config()
    method = rebuild("algorithm", config["algorithm"], algorithm)
    built = recorded_problem(config, problem, method, BadInput)
    if set(config["metrics"]) != set(metrics or ()):
        raise BadInput(
            f"the run was started with metrics {config['metrics']}; pass the same functions again (metrics=...)."
        )
    if fleet is not None and ("fleet" not in config or fleet.threads != config["threads"]):
        kind = f"real workers with threads={config['threads']}" if "fleet" in config else "simulated workers"
        raise BadInput(f"the run was started with {kind}; pass a fleet of the same kind, or none.")
    if updates is not None or time is not None:
        old = (config[key] for key in ("evaluate_every", "evaluate_seconds", "checkpoint_every"))
        config |= totals(updates, time, *old)
    x = place.start(config["start"]).to(config.get("device", "cpu"))
    mover = optimizer_of(config["optimizer"], optimizer, schedule, config["updates"])
    loaded, result = place.load(), place.result()
    ended = ""
    if loaded is not None and result is not None:
        same = (result.get("config"), result.get("moment")) == (config_digest(config), loaded[0]["moment"])
        ended = result["ended"] if same else ""
        if same and "fleet" in config:  # nobody needs to be called
            loop = Loop(method, built, LocalFleet(built, RecordedClock(place.trace()), method.message), x, optimizer=mover)
            loop.load(loaded[0], loaded[1])
            metrics_made = Table(load_table(place.path / "metrics.parquet")[0])
            return ended_run(loop, metrics_made, float(result["time"]), ended, place.path)
    with manned(config, method, built, speeds=speeds, fleet=fleet, cores=cores) as crew:
        loop = make_loop(config, method, built, crew, x, metrics, mover)
        if updates is not None or time is not None:
            place.write_config(config)
        stop = None if config["stop"] is None else EarlyStop(**config["stop"])
        if loaded is None:
            place.clear_after(0, -1)
            with using_threads(config["threads"]):
                loop.begin()
            return drive(loop, config, place, watch, stop, log=log)
        content, rows, problems = loaded
        notes = [f"{wrong}; an older checkpoint was used" for wrong in problems]
        if config["updates"] is not None and content["state"]["version"] > config["updates"]:
            notes.append(f"the run has made {content['state']['version']} updates already, more than {config['updates']}")
        loop.load(content, rows)
        place.clear_after(content["arrivals"], content["moment"])
        return drive(loop, config, place, watch, stop, resumed=True, notes=tuple(notes), ended=ended, log=log)


def replay(
    folder: str | Path,
    problem: Problem | None = None,
    *,
    algorithm: Algorithm[Any] | None = None,
    optimizer: Maker = None,
    schedule: Maker = None,
    watch: Sequence[Watch] = (),
) -> Run:
    """Recompute a recorded run, simulated or real, in its recorded order; raises ReplayMismatch unless every bit agrees.

    A run that a sweep computed side by side with others is recomputed by itself, which gives other last digits: then the
    order must agree exactly and the first losses to a thousandth, and ``notes`` says how far apart the weights end.
    """
    place = Folder(Path(folder))
    config, result, trace = place.config(), place.finished(), place.trace()
    method = rebuild("algorithm", config["algorithm"], algorithm)
    built = recorded_problem(config, problem, method, ReplayMismatch)
    threads, server_threads = config["threads"], config["server_threads"]
    gradients = gradients_of(config, built) if config.get("batch") else None
    apart = None if threads == server_threads else threads
    fleet = LocalFleet(built, RecordedClock(trace), method.message, apart, gradients)
    x = place.start(config["start"]).to(config.get("device", "cpu"))
    mover = optimizer_of(config["optimizer"], optimizer, schedule, config["updates"])
    loop = Loop(method, built, fleet, x, seed=config["seed"], bad="as recorded", optimizer=mover, table=config["table"])
    with using_threads(server_threads), using_precision(config.get("device", "cpu"), config.get("precision", "float32")):
        loop.begin()
        alone, row = config.get("together", 1) == 1, 0
        while loop.fleet.peek() is not None:
            a = loop.advance()
            if a is None:
                continue
            made = {name: column[0] for name, column in loop.recorder.rows(row).items()}
            for name in ("version", "after", "loss", "fingerprint"):
                same = made[name].tobytes() == trace[name][row].tobytes()
                if not alone and name == "fingerprint":
                    same = True
                elif not alone and name == "loss":
                    same = row >= _EARLY or bool(np.isclose(made[name], trace[name][row], _CLOSE))
                if not same:
                    raise ReplayMismatch(
                        f"version {made['after']} differs: at arrival {row} (worker {a.worker}, job number {made['draw']}, "
                        f"taken at version {made['version']}) the recorded {name} is {trace[name][row]}, replayed it is "
                        f"{made[name]}. Code, data, libraries ({config['versions']}) or the record have changed."
                    )
            row += 1
            for function in watch:
                function(loop.state, a)
    recorded, made = load_weights(place.path / "model.safetensors"), built.state_dict(loop.state.x)
    notes: tuple[str, ...] = ()
    if not alone:
        apart = sum(float((made[name].double() - recorded[name].double()).norm()) ** 2 for name in recorded) ** 0.5
        size = sum(float(x.double().norm()) ** 2 for x in recorded.values()) ** 0.5
        others = config["together"] - 1
        notes = (f"it was computed side by side with {others} others: alone the weights end {apart / size:.1e} apart",)
    elif {name: digest_of(x) for name, x in recorded.items()} != {name: digest_of(x) for name, x in made.items()}:
        raise ReplayMismatch(f"version {loop.state.version} differs: the final weights are not those of model.safetensors.")
    metrics = Table(load_table(place.path / "metrics.parquet")[0])
    return ended_run(loop, metrics, float(result["time"]), "replay", place.path, notes)
