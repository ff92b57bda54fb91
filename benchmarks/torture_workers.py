"""An attack on real workers, with Ray on this machine alone: frozen, mute and killed ones, and a server that is paused.

Three workers train; something happens to worker 2, or to the server. The others must not be harmed, updates go on to the
end, and the folder replays to the bit. A trial takes many seconds, most of them to start processes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dualdelay as dd
from torture_core import Attack, Failure, must

CENTERS = [[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]]
VICTIM, DEADLINE, UPDATES = 2, 3.0, 400
HARMS = ("freeze", "mute", "kill", "pause the server", "exit", "end")


class Troubled(dd.Quadratic):
    """A problem whose gradients take a while, and one of whose workers gets into trouble at one of its jobs."""

    def __init__(self, harm: str, job: int) -> None:
        """``job`` is the number of the job at which it happens, and of all after it."""
        super().__init__(CENTERS, noise=0.3)
        self._harm, self._job = harm, job

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        """The gradient, unless this is the job."""
        made = super().gradient(x, worker, draw)
        time.sleep(0.02)
        if worker == VICTIM and draw >= self._job and _in_a_worker():
            if self._harm == "mute":
                time.sleep(600)
            elif self._harm == "exit":
                sys.exit("enough")
            elif self._harm == "end":
                os._exit(3)
        return made


def _in_a_worker() -> bool:
    """Whether this process is a worker's: a replay is not troubled."""
    return "ray" in sys.modules and sys.modules["ray"].get_runtime_context().get_actor_id() is not None


class Workers(Attack):
    """Something happens to a worker or to the server."""

    name, weight, batch, limit = "workers", 3.0, 1, 180.0

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers do not have this file
        os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "(?s).*"
        harm, job = HARMS[number % len(HARMS)], chance.randint(3, 20)
        memory, gone = chance.choice(["server", "workers"]), chance.choice(["leave", "freeze"])
        said, folder = f"{harm} at job {job}, memory={memory}, gone={gone}", place / "run"
        problem, method = Troubled(harm, job), dd.DuDe(lr=0.05, memory=memory)
        fleet = dd.RayFleet(cpus=0, faults=dd.FaultPolicy(deadline=DEADLINE, gone=gone, resend=1.0))
        striker = Striker(fleet, harm, job)
        options: dict[str, Any] = {"updates": UPDATES, "checkpoint_every": 50}
        try:
            watch = dd.Reporting([striker], progress=False)
            run = must("lost run", said, lambda: dd.train(method, problem, fleet, folder=folder, watch=watch, **options))
        finally:
            striker.over()
        require_unharmed(run, said, harm)
        again = must("wrong bit", f"replay, {said}", lambda: dd.replay(folder, problem, watch=dd.Reporting(progress=False)))
        if not torch.equal(again.x, run.x):
            raise Failure("wrong bit", f"the replay ends elsewhere: {said}")


class Striker:
    """A watch function that does from outside what is to be done, once its victim has come so far."""

    def __init__(self, fleet: dd.RayFleet, harm: str, job: int) -> None:
        self._fleet, self._harm, self._job, self._done = fleet, harm, job, False
        self._frozen: list[int] = []
        self._pauser: subprocess.Popen[bytes] | None = None

    def __call__(self, state: dd.State, arrival: dd.Arrival) -> None:
        """Strike when it is time."""
        if self._done or arrival.worker != VICTIM or arrival.job.draw < self._job:
            return
        self._done, pid = True, self._fleet.control.places[VICTIM][1]
        if self._harm == "kill":
            os.kill(pid, signal.SIGKILL)
        elif self._harm == "freeze":
            self._frozen.append(pid)
            os.kill(pid, signal.SIGSTOP)
        elif self._harm == "pause the server":
            pause = f"kill -STOP {os.getpid()}; sleep {DEADLINE + 2}; kill -CONT {os.getpid()}"
            self._pauser = subprocess.Popen(["sh", "-c", pause])

    def over(self) -> None:
        """Let what was stopped go on."""
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self._pauser is not None:
            self._pauser.wait()


def require_unharmed(run: dd.Run, said: str, harm: str) -> None:
    """The healthy workers were not touched, the run went to its end, and the sum is that of what the workers hold."""
    victim = None if harm == "pause the server" else VICTIM
    healthy = [event for event in run.trace.events if event["worker"] not in (victim, -1)]
    if healthy:
        kinds = Counter(f"{event['kind']} {event['worker']}" for event in healthy)
        raise Failure("lost run", f"healthy workers were harmed, {dict(kinds)}: {said}", f"healthy {harm}")
    if run.version < UPDATES:
        raise Failure("lost run", f"only {run.version} updates: {said}")
    if run.audit is not None and not run.audit < 1e-9:
        raise Failure("wrong bit", f"the audit is {run.audit}: {said}")
