"""A logger of your own: the tool that tracks your experiments can track a run, simulated or real."""

import json
import math
from pathlib import Path

import dualdelay as dd


class JsonLines:
    """A tracker in the manner of MLflow and Weights & Biases that writes each step as a line of JSON.

    Only the three numbered lines know where the numbers go. With MLflow or W&B they would be

        1   mlflow.start_run()                         self._run = wandb.init()
        2   mlflow.log_metrics(metrics, step=step)     self._run.log({**metrics, "version": step})
        3   mlflow.end_run()                           self._run.finish()

    An evaluation comes with the version that was evaluated, and on real workers it comes after newer versions. W&B needs
    steps that rise, so there the version is a number beside the others (``define_metric("*", "version")``).
    """

    def __init__(self, path):
        """Begin to write."""
        self._path = Path(path)  # 1

    def log_metrics(self, metrics, step):
        """Write down named numbers."""
        with self._path.open("a") as file:
            print(json.dumps({"step": step, **metrics}), file=file)  # 2

    def __call__(self, version, values):
        """Take a version and named numbers: how the run stands, about once a second and at the end, and each evaluation."""
        self.log_metrics({name: value for name, value in values.items() if math.isfinite(value)}, step=version)

    def close(self):
        """End, and print where the numbers are."""
        print(f"the metrics are in {self._path}")  # 3


if __name__ == "__main__":
    problem, speeds = dd.Digits(workers=10, alpha=0.1), dd.TruncatedNormalSpeeds(10, std=5.0)
    tracker = JsonLines("metrics.jsonl")
    run = dd.simulate(dd.DuDe(lr=0.05), problem, speeds, updates=2000, watch=dd.Reporting(log=[tracker]))
    tracker.close()
    print(f"{run.version} updates, objective {run.metrics.objective[-1]:.3f}")
