"""Whether a GPU computes what the processor does: one run and a grid of runs on both."""

from __future__ import annotations

import sys

import torch

import dualdelay as dd
from dualdelay.core.devices import using_precision
from dualdelay.runs.names import label
from gpu import data, network
from models import UNTUNED, Untuned


def _in_float64(problem: dd.Network, one: Untuned, worker: int, draw: int) -> torch.Tensor:
    """The gradient of a job at the first weights, taken in float64."""
    module = problem.model(problem.start(0)).double()
    inputs, targets = problem.shards()[worker].batch(problem.indices(worker, draw))
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    parts = torch.autograd.grad(one.loss(module(inputs), targets), list(module.parameters()))
    return torch.cat([part.reshape(-1) for part in parts])


def main() -> None:
    """Print relative distances of the final weights."""
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU")
    whole = data(4000)
    problems = [network(whole, alpha=alpha, kind=dd.Network) for alpha in (0.1, 0.5)]
    speeds = dd.TruncatedNormalSpeeds(n=10, std=1.0)
    methods = [dd.DuDe(lr=0.01), dd.VanillaASGD(lr=0.01)]
    gradient = {}
    for device, precision in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "tf32"), ("cuda", "bfloat16")):
        problem = problems[0].on(device, precision)
        with using_precision(device, precision):
            together = problem.batched([problem])
            many, _ = together([problem.start(0)] * 20, [0] * 20, [k % 10 for k in range(20)], [k // 10 for k in range(20)])
            gradient[device, precision] = many.cpu().double()
    for name, one in UNTUNED.items():
        untuned = one.problem(one.data(2000), kind=dd.Network)
        x, jobs = [untuned.start(0)] * 4, ([0] * 4, [0, 1, 2, 3], [0, 1, 2, 3])
        doubled = torch.stack([_in_float64(untuned, one, *job) for job in zip(*jobs[1:], strict=True)])
        with using_precision("cuda", "float32"):
            there = untuned.on("cuda")
            found, _ = there.batched([there])([row.cuda() for row in x], *jobs)
        here, _ = untuned.batched([untuned])(x, *jobs)
        off = [float((part.cpu().double() - doubled).norm() / doubled.norm()) for part in (found, here)]
        print(f"gradients of {name} in float32: off by {off[0]:.1e} on the GPU and {off[1]:.1e} here, against float64")
    exact = gradient["cpu", "float32"]
    for key, value in gradient.items():
        print(f"gradients {key}: relative error {float((value - exact).norm() / exact.norm()):.1e}")
    grid = {"algorithm": methods, "lr": [0.01, 0.05], "problem": problems, "seed": [0]}
    common = {"speeds": speeds, "updates": 30, "evaluation": dd.Evaluation(every=30)}
    there = {p: dd.sweep(grid, compute=dd.Compute("cuda", precision=p), **common) for p in ("float32", "tf32", "bfloat16")}
    here = dd.sweep(grid, compute=dd.Compute(cores=8), **common)
    again = dd.sweep(grid, compute=dd.Compute("cuda"), **common)
    for precision, table in there.items():
        apart = [
            float((a.x - b.x).norm() / (b.x - b.problem.start(0)).norm())
            for a, b in zip(table.runs, here.runs, strict=True)
        ]
        order = all((a.trace.worker == b.trace.worker).all() for a, b in zip(table.runs, here.runs, strict=True))
        print(f"sweep {precision}: {len(apart)} runs, moved alike to {max(apart):.1e} of the way, same order {order}")
    same = all(torch.equal(a.x, b.x) for a, b in zip(there["float32"].runs, again.runs, strict=True))
    print(f"the sweep again gives the same bits: {same}")
    for optimizer in ("Adam", "SGD[momentum=0.9]"):
        rule = {**common, "server": dd.Server(optimizer=optimizer)}
        together, alone = (dd.sweep(grid, compute=dd.Compute("cuda", batch=batch), **rule) for batch in (True, False))
        pairs = zip(together.runs, alone.runs, strict=True)
        apart = [float((a.x.cpu() - b.x.cpu()).norm() / (b.x.cpu() - b.problem.start(0).cpu()).norm()) for a, b in pairs]
        print(f"{optimizer}: {len(apart)} runs side by side are those by themselves to {max(apart):.1e} of the way")
    for method in methods:
        one = dd.simulate(method, problems[0], speeds, updates=30, compute=dd.Compute(device="cuda"))
        two = dd.simulate(method, problems[0], speeds, updates=30, compute=dd.Compute(device="cuda"))
        cpu = dd.simulate(method, problems[0], speeds, updates=30, compute=dd.Compute(cores=8))
        off = float((one.x.cpu() - cpu.x).norm() / (cpu.x - problems[0].start(0)).norm())
        again = torch.equal(one.x, two.x)
        print(f"{label(method)} alone: {off:.1e} of the way off, same bits again {again}, audit {one.audit}")


if __name__ == "__main__":
    main()
