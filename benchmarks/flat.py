"""The verbs and a network with all options side by side: tables of cases merge them more easily than small values."""

from __future__ import annotations

from typing import Any

import dualdelay as dd

EVALUATION = {
    "evaluate_every": "every",
    "evaluate_seconds": "seconds",
    "evaluate_samples": "samples",
    "metrics": "metrics",
    "keep_best": "best_by",
    "stop": "early_stop",
}
COMPUTE = {
    "device": "device",
    "cores": "cores",
    "precision": "precision",
    "threads": "threads",
    "batch": "batch",
    "memory": "memory_limit",
}
SERVER = {
    "start": "initial_weights",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "on_nonfinite": "on_nonfinite",
    "table": "gradient_table",
}
BATCHES = {
    "replacement": "replacement",
    "collate_fn": "collate_fn",
    "stochastic": "stochastic",
    "evaluation_size": "evaluation_size",
}
REPORTING = {"log": "log", "progress": "progress", "report": "report"}


def _taken(options: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {new: options.pop(old) for old, new in names.items() if old in options}


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a verb that options side by side stand for."""
    rest = dict(options)
    kinds = (("evaluation", dd.Evaluation, EVALUATION), ("compute", dd.Compute, COMPUTE), ("server", dd.Server, SERVER))
    for name, kind, names in kinds:
        if values := _taken(rest, names):
            rest[name] = kind(**values)
    if saving := _taken(rest, {"keep": "keep", "go_on": "go_on"}):
        rest["folder"] = dd.Saving(rest.pop("folder", None), rest.pop("checkpoint_every", None), **saving)
    if reporting := _taken(rest, REPORTING):
        rest["watch"] = dd.Reporting(rest.pop("watch", ()), **reporting)
    return rest


def network(model: Any, loss: Any = None, shards: Any = None, batch_size: Any = 64, **options: Any) -> dd.Network:
    if batches := _taken(options, BATCHES):
        batch_size = dd.Batches(batch_size, **batches)
    return dd.Network(model, loss, shards, batch_size, **options)


def _fleet(speeds: Any, options: dict[str, Any]) -> Any:
    travel = _taken(options, {"link": "link", "changes": "changes"})
    return dd.SimulatedFleet(speeds, **travel) if travel else speeds


def simulate(algorithm: Any, problem: Any, speeds: Any, **options: Any) -> dd.Run:
    return dd.simulate(algorithm, problem, _fleet(speeds, options), **grouped(options))


def train(algorithm: Any, problem: Any, fleet: Any = None, **options: Any) -> dd.Run:
    return dd.train(algorithm, problem, fleet, **grouped(options))


def sweep(grid: Any, problem: Any = None, speeds: Any = None, **options: Any) -> dd.Sweep:
    return dd.sweep(grid, problem, _fleet(speeds, options), **grouped(options))


def compare(algorithms: Any, problem: Any, speeds: Any, **options: Any) -> dd.Sweep:
    if "seed" in options:
        options["seeds"] = [options.pop("seed")]
    return dd.compare(algorithms, problem, _fleet(speeds, options), **grouped(options))


def resume(folder: Any, *totals: Any, **options: Any) -> dd.Run:
    if {"link", "changes"} & options.keys():
        options["speeds"] = _fleet(options.pop("speeds", None), options)
    return dd.resume(folder, *totals, **_reporting(options))


def replay(folder: Any, *problem: Any, **options: Any) -> dd.Run:
    return dd.replay(folder, *problem, **_reporting(options))


def _reporting(options: dict[str, Any]) -> dict[str, Any]:
    if reporting := _taken(options, REPORTING):
        return {**options, "watch": dd.Reporting(options.get("watch", ()), **reporting)}
    return options
