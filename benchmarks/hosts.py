"""What crosses machines, on hosts that one machine is divided into: a sharded server, and the sweep of the page on Slurm.

    python benchmarks/hosts.py shards    # two shards and four workers on two hosts, of which one is switched off: a minute
    python benchmarks/hosts.py group     # a worker of two ranks, one on each of two hosts: half a minute
    python benchmarks/hosts.py slurm     # docs/how_to/cluster_sweeps.md: cancelled, submitted again, a raylet killed: ten

A host has a network, processes, a name, /tmp and /dev/shm of its own, by Linux namespaces; files are the same on all, as on
a file system that they share. So processes of two hosts share no memory, and each Ray has an address of its own. Cores and
memory are the same ones: nothing here is a figure of speed. It needs root and iproute2; the last also slurmctld, slurmd,
the client of Slurm and munged.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dualdelay as dd

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "hosts"  # not in /tmp, which hosts do not share
NET, BRIDGE = "10.77.0", "ddhosts"
PORT = 6400
UPDATES = 900


def call(*words: object, check: bool = True, seconds: float = 120.0, **options: Any) -> str:
    """What a command prints."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, timeout=seconds, **options)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {done.stderr}")
    return str(done.stdout)


def wait_for(what: str, happened: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {seconds:g} s")
        time.sleep(0.5)


class Host:
    """One of them: host1, host2, ..."""

    def __init__(self, number: int, names: Path) -> None:
        self.name, self.address = f"host{number}", f"{NET}.{10 + number}"
        call("ip", "netns", "del", self.name, check=False)  # one that was left
        call("ip", "netns", "add", self.name)
        call("ip", "link", "add", f"{BRIDGE}{number}", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        call("ip", "link", "set", f"{BRIDGE}{number}", "master", BRIDGE, "up")
        call("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for line in ("lo", "eth0"):
            call("ip", "-n", self.name, "link", "set", line, "up")
        begin = f"hostname {self.name}; mount -t proc proc /proc; mount --bind {names} /etc/hosts; "
        begin += "for place in /tmp /dev/shm; do mount -t tmpfs tmpfs $place; done; exec sleep infinity"
        space = ["unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--kill-child", "sh", "-c", begin]
        self._outer = subprocess.Popen(["ip", "netns", "exec", self.name, *space])
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        wait_for(self.name, lambda: bool(children.read_text()))
        self._first = children.read_text().split()[0]
        wait_for(self.name, lambda: "infinity" in Path(f"/proc/{self._first}/cmdline").read_text())

    def within(self, *words: object) -> list[str]:
        """A command that runs there."""
        return ["nsenter", "-t", self._first, "-a", "--", *map(str, words)]

    def off(self) -> None:
        """As if its power were cut."""
        if self._outer.poll() is None:
            os.kill(int(self._first), signal.SIGKILL)
            self._outer.wait()


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    names = FOLDER / "names"
    lines = ["127.0.0.1 localhost", f"{NET}.1 control", *(f"{NET}.{10 + k} host{k}" for k in range(1, count + 1))]
    names.write_text("\n".join([*lines, ""]))
    call("ip", "link", "del", BRIDGE, check=False)
    call("ip", "link", "add", BRIDGE, "type", "bridge")
    all_of_them: list[Host] = []
    try:
        call("ip", "addr", "add", f"{NET}.1/24", "dev", BRIDGE)
        call("ip", "link", "set", BRIDGE, "up")
        all_of_them.extend(Host(number, names) for number in range(1, count + 1))
        yield all_of_them
    finally:
        for host in all_of_them:
            host.off()
            call("ip", "netns", "del", host.name, check=False)
        call("ip", "link", "del", BRIDGE, check=False)


# --- a sharded server, and a group ---


def shard(worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(worker)) + worker
    return inputs, inputs.sum(1, keepdim=True)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 60_000), torch.nn.Linear(60_000, 1))


def inside(what: str, address: str) -> None:
    """What the first host runs."""
    folder, shares = FOLDER / "run", what == "shards"
    problem = dd.Network(net, torch.nn.functional.mse_loss, shard, workers=4 if shares else 1, batch_size=16)
    fleet = dd.RayFleet(address=address, cpus=0.2, shards=2) if shares else dd.RayFleet(address=address, ranks=2)
    run = dd.train(dd.DuDe(lr=1e-6), problem, fleet, updates=UPDATES, folder=folder, checkpoint_every=40)
    print(f"{run.version} updates, faults {run.faults or 'none'}")
    if shares:
        print(f"in the end shards are on {len({node for node, _ in fleet.control.shards.values()})} of 2 hosts")
    for note in run.notes:
        print(f"note: {note}")
    print(f"a replay has the same bits: {torch.equal(dd.replay(folder, problem).x, run.x)}")


def ray_on_two_hosts(what: str, cpus: int) -> None:
    with hosts(2) as (first, second):
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        path = {**os.environ, **token, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        common = ("--num-cpus", cpus, "--disable-usage-stats", "--node-ip-address")
        call(*first.within("ray", "start", "--head", "--port", PORT, *common, first.address), env=path)
        call(*second.within("ray", "start", "--address", f"{first.address}:{PORT}", *common, second.address), env=path)
        command = first.within(sys.executable, __file__, what, f"{first.address}:{PORT}")
        with subprocess.Popen(command, env=path) as run:
            saved = (FOLDER / "run").glob
            wait_for("a checkpoint", lambda: run.poll() is not None or any(saved("checkpoints/*.safetensors")))
            if what == "shards" and run.poll() is None:
                time.sleep(3.0)
                print(f"{second.name} is switched off", flush=True)
                second.off()
        raise SystemExit(run.returncode)


# --- Slurm ---

SLURM = """ClusterName=here
SlurmctldHost=control({net}.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
NodeName=host1 NodeAddr={net}.11 CPUs=1
NodeName=host2 NodeAddr={net}.12 CPUs=1
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def batch_file() -> str:
    """The file of the page, for two hosts of one core."""
    page = (ROOT / "docs" / "how_to" / "cluster_sweeps.md").read_text()
    text = next(block for block in re.findall(r"```bash\n(.*?)```", page, re.S) if "#SBATCH" in block)
    changed = text.replace("--nodes=4", "--nodes=2").replace("--cpus-per-task=16", "--cpus-per-task=1")
    assert changed.count("--nodes=2") == changed.count("--cpus-per-task=1") == 1
    return str(changed)


def slurm() -> None:
    with hosts(2) as both:
        (FOLDER / "slurm.conf").write_text(SLURM.format(net=NET, folder=FOLDER))
        (FOLDER / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (FOLDER / "state").mkdir()
        (FOLDER / "munge.key").write_bytes(secrets.token_bytes(128))
        (FOLDER / "munge.key").chmod(0o400)
        (FOLDER / "venv").symlink_to(sys.prefix)
        (FOLDER / "sweep.sbatch").write_text(batch_file())
        there = {**os.environ, "SLURM_CONF": str(FOLDER / "slurm.conf"), "HOME": str(FOLDER)}
        files = [f"--{name}={FOLDER}/munge.{end}" for name, end in (("socket", "socket"), ("key-file", "key"))]
        files += [f"--{name}={FOLDER}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
        started = [subprocess.Popen(["munged", "--force", "--foreground", *files], stderr=subprocess.DEVNULL)]
        control = ["unshare", "--uts", "sh", "-c", "hostname control; exec slurmctld -D"]
        try:
            wait_for("munged", lambda: (FOLDER / "munge.socket").exists())
            started.append(subprocess.Popen(control, env=there, stderr=subprocess.DEVNULL))
            for host in both:
                (FOLDER / f"spool.{host.name}").mkdir()
                subprocess.Popen(host.within("slurmd", "-D", "-N", host.name), env=there, stderr=subprocess.DEVNULL)
            _sweep(both, there)
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait()


def _sweep(both: list[Host], there: dict[str, str]) -> None:
    def submit() -> tuple[str, Path]:
        wait_for("two idle hosts", lambda: "2" in call("sinfo", "-h", "-t", "idle", "-o", "%D", env=there, check=False))
        number = call("sbatch", "sweep.sbatch", env=there, cwd=FOLDER).split()[-1]
        print(f"job {number} is submitted", flush=True)
        return number, FOLDER / f"slurm-{number}.out"

    def ended(output: Path) -> int:
        """Runs that have ended."""
        said = re.findall(r"(\d+) of 30 runs", output.read_text()) if output.exists() else []
        return int(said[-1]) if said else 0

    def state(number: str) -> str:
        """Of a job."""
        return re.findall(r"JobState=(\w+)", call("scontrol", "show", "job", number, env=there))[0]

    number, output = submit()
    wait_for("four runs", lambda: ended(output) >= 4)
    call("scancel", number, env=there)
    print(f"it is cancelled when {ended(output)} of 30 runs have ended", flush=True)
    number, output = submit()
    wait_for("a run", lambda: ended(output) > 0)
    print(f"it begins with {ended(output)} that have ended", flush=True)
    wait_for("ten runs", lambda: ended(output) >= 10)
    call(*both[1].within("pkill", "-9", "raylet"))
    print(f"the raylet of {both[1].name} is killed when {ended(output)} have ended", flush=True)
    wait_for("the end", lambda: state(number) != "RUNNING", 900.0)
    print(f"job {number}: {state(number)}", flush=True)
    command = re.search(r"dualdelay (compare .*?) --folder", batch_file().replace("\\\n", " "), re.S)
    assert command is not None
    print("the same sweep is computed here", flush=True)
    call("sh", "-c", f"{sys.executable} -m dualdelay {command[1]} --folder {FOLDER / 'here'} --json", seconds=900.0)
    runs = sorted(path.parent.name for path in (FOLDER / "here").glob("*/config.json"))
    same = [torch.equal(*(dd.load(FOLDER / place / name).x for place in ("here", "runs/sweep"))) for name in runs]
    print(f"runs with the same bits: {sum(same)} of {len(runs)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shards", "group", "slurm"))
    parser.add_argument("address", nargs="?", help="of the Ray that runs, as the first host is told")
    given = parser.parse_args()
    if given.address is not None:
        inside(given.what, given.address)
    elif given.what == "slurm":
        slurm()
    else:
        ray_on_two_hosts(given.what, cpus=4 if given.what == "shards" else 1)


if __name__ == "__main__":
    main()
