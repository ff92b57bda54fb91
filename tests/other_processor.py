"""Print the ATEN_CPU_CAPABILITY of a kind of processor that is not this one, for a second run of the numeric tests.

Torch can do without instructions that a processor has, not with those that it lacks: so the next kind below this one.
"""

import torch

BELOW = {"AVX512": "avx2", "AVX2": "default"}

if __name__ == "__main__":
    print(BELOW.get(torch.backends.cpu.get_cpu_capability(), "default"))
