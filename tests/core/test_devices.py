"""Where and how precisely gradients are computed: what is refused, and what bfloat16 products change."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import dualdelay as dd
from helpers import operations, rounding
from own import mlp, shards
from tables import CASES, LR

# weights, inputs and outputs of two layers are rounded on the way there and back, and the outputs of what is between
ROUNDED_PRODUCTS = rounding(16, torch.bfloat16) / 2


PAGES = """
import resource, torch
from dualdelay.core.devices import keep_freed_memory
keep_freed_memory()
faults = []
for _ in range(20):
    vectors = [torch.ones(600_000) for _ in range(3)]
    del vectors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-11])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")
def test_memory_of_freed_vectors_is_used_again():
    """Three vectors of 586 pages each, ten times. Otherwise the system clears 11,400 pages for them, in most processes."""
    done = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 586


def net() -> dd.Network:
    return dd.Network(mlp(), cross_entropy, shards(), 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu"}, "device is 'tpu'; expected 'cpu' or 'cuda'"),
        ({"device": "meta"}, "device is 'meta'; expected 'cpu' or 'cuda'"),
        ({"precision": "float16"}, "precision is 'float16'"),
        ({"precision": "tf32"}, "'tf32' is a mode of GPUs; on the processor use"),
    ],
)
def test_devices_and_precisions_that_do_not_exist_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(dd.BadInput, match=words):
        dd.Compute(**options)


@pytest.mark.parametrize("case", ["q3", "logistic", "local steps"])
def test_a_problem_with_its_own_arithmetic_refuses_another_device_or_precision(case: str) -> None:
    problem, speeds = CASES[case]
    words = f"{type(getattr(problem, 'problem', problem)).__name__} is computed on the processor in its own precision"
    for place in (("cuda", "float32"), ("cpu", "bfloat16")):
        with pytest.raises(dd.BadInput, match=words):
            problem.on(*place)
    with pytest.raises(dd.BadInput, match=words):
        dd.simulate(dd.DuDe(LR), problem, speeds, updates=1, compute=dd.Compute(precision="bfloat16"))
    assert problem.on("cpu").fingerprint() == problem.fingerprint()


@pytest.mark.numeric
@pytest.mark.parametrize("stacked", [False, True])
def test_bfloat16_products_change_a_gradient_by_their_rounding(stacked: bool) -> None:
    exact = net()
    short = exact.on("cpu", "bfloat16")
    assert torch.equal(short.start(0), exact.start(0))
    for k in range(5):
        x = exact.start(0) * (1 + 0.3 * k)
        expected, _ = exact.gradient(x, 2, 7)
        found = short.batched([short])([x], [0], [2], [7])[0][0] if stacked else short.gradient(x, 2, 7)[0]
        assert found.dtype == torch.float32
        distance = (found - expected).norm() / expected.norm()
        assert rounding(operations(exact), torch.float32) < distance <= ROUNDED_PRODUCTS


@pytest.mark.numeric
def test_a_run_with_bfloat16_products_is_replayed_with_them(tmp_path: Path) -> None:
    exact, short = (
        dd.simulate(
            *(dd.DuDe(0.1), net(), dd.FixedSpeeds([1.0, 2.0, 4.0])),
            updates=9,
            compute=dd.Compute(precision=precision),
            folder=tmp_path / precision,
        )
        for precision in ("float32", "bfloat16")
    )
    assert 0 < (exact.x - short.x).norm() <= ROUNDED_PRODUCTS * (exact.x - net().start(0)).norm()
    assert torch.equal(dd.replay(tmp_path / "bfloat16", net()).x, short.x)
