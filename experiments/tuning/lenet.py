"""The paper's network on a processor, six times as fast as torch: CIFAR-10 with gradients and losses by lenet.cpp.

It needs g++. The gradients are those of torch to rounding: python experiments/tuning/lenet.py compares them.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualdelay.problems.cifar10 import Cifar10
from dualdelay.problems.data import Shard, objectives

_ONE = threading.Lock()  # the function's memory is the same for all threads


@cache
def _kernel() -> Any:
    """The compiled function."""
    source = Path(__file__).with_name("lenet.cpp")
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/lenet.so"
        subprocess.run(["g++", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC", source, "-o", made], check=True)
        function = ctypes.CDLL(made).lenet
    pointer = ctypes.c_void_p
    function.argtypes = [*[pointer] * 4, ctypes.c_int, ctypes.c_float, pointer, pointer]
    function.restype = ctypes.c_double
    return function


def _mean(x: Tensor, shard: Shard, picked: Tensor | None, gradient: Tensor | None) -> tuple[float, float]:
    """The mean loss over some samples or all, to whose gradient it adds, and the share that is classed rightly."""
    assert shard.pair is not None
    rows = torch.arange(shard.size) if shard.rows is None else shard.rows
    rows, right = rows if picked is None else rows[picked], ctypes.c_long(0)
    images, labels = shard.pair
    tensors = [part.data_ptr() for part in (x, images, labels, rows)]
    to = None if gradient is None else gradient.data_ptr()
    with _ONE:
        loss = _kernel()(*tensors, len(rows), 1 / len(rows), to, ctypes.addressof(right))
    return loss, right.value / len(rows)


class FastCifar10(Cifar10):
    """The same problem; more than one thread is no faster."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient = torch.zeros_like(x)
        loss, _ = _mean(x.contiguous(), self._shard(worker), self.indices(worker, draw), gradient)
        return gradient, loss

    def evaluate(self, x: Tensor) -> dict[str, float]:
        x = x.contiguous()
        shards = self.shards()
        losses = [_mean(x, shard, None, None)[0] for shard in shards]
        means = objectives(losses, [shard.size for shard in shards], self.scales)
        assert self._test_data._shard is not None
        return {**means, "accuracy": _mean(x, self._test_data._shard, None, None)[1], "gradient_norm": math.nan}


def main() -> None:
    """Compare a gradient with that of torch, and the time of both."""
    torch.set_num_threads(1)
    slow = Cifar10(minimum=1)
    fast = FastCifar10(**slow.settings)
    x = slow.start(0)
    seconds = {}
    for problem in (slow, fast):
        problem.gradient(x, 0, 0)  # compiled
        begin = time.perf_counter()
        for draw in range(200):
            problem.gradient(x, draw % 10, draw)
        seconds[problem] = time.perf_counter() - begin
    wanted, found = (problem.gradient(x, 3, 5)[0] for problem in (slow, fast))
    print(f"gradient: off by {float((found - wanted).norm() / wanted.norm()):.1e}")
    ends = [problem.evaluate(x) for problem in (slow, fast)]
    print("loss and accuracy:", *(f"{end['objective']:.6f} {end['accuracy']:.4f}" for end in ends))
    print(
        f"{5 * seconds[slow]:.1f} ms with torch, {5 * seconds[fast]:.1f} ms here: {seconds[slow] / seconds[fast]:.1f} times"
    )


if __name__ == "__main__":
    main()
