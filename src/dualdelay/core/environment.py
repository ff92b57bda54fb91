"""What a run's bits depend on besides what was asked for: libraries, the processor's kind, and the code itself."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

_WORDS = {
    "torch": "torch",
    "numpy": "numpy",
    "python": "Python",
    "capability": "the instructions that torch uses (ATEN_CPU_CAPABILITY)",
    "blas": "the libraries for matrices",
    "processor": "the processor",
    "simd": "the instructions that numpy uses",
    "precision": "torch's precision of float32 products",
    "commit": "the commit of dualdelay",
}
_SWITCHES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "NPY_DISABLE_CPU_FEATURES")


def environment() -> dict[str, str]:
    """The libraries, processor and commit that a run is computed with, as texts."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "blas": _blas(),
        "processor": _processor(),
        "simd": _simd(),
        "precision": torch.get_float32_matmul_precision(),
        "commit": _commit(),
    }


def differences(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two environments, in words."""
    return [
        f"{words}: {recorded.get(key) or 'unknown'} in the record, {now.get(key) or 'unknown'} here"
        for key, words in _WORDS.items()
        if recorded.get(key, "") != now.get(key, "")
    ]


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """How an environment has changed, in a few words; what changes no bit by itself is left out. Empty: not at all."""
    keys = [key for key in _WORDS if key not in ("python", "commit") and before.get(key, "") != now.get(key, "")]
    return "; ".join(f"{key}: {before.get(key) or 'unknown'} -> {now.get(key) or 'unknown'}" for key in keys)


@lru_cache(maxsize=1)
def _blas() -> str:
    text = torch.__config__.show()
    versions = [
        (name, re.search(pattern, text))
        for name, pattern in (("BLAS", r"BLAS_INFO=(\w+)"), ("MKL", r"Library Version (\S+)"), ("oneDNN", r"DNN (v\S+)"))
    ]
    parts = [f"{name} {match[1]}" for name, match in versions if match]
    return ", ".join([*parts, *(f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ)])


@lru_cache(maxsize=1)
def _processor() -> str:
    try:
        match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def _simd() -> str:
    config = np.show_config(mode="dicts")
    instructions = config.get("SIMD Extensions", {}).get("found", []) if isinstance(config, dict) else []
    return " ".join(instructions[-1:])


@lru_cache(maxsize=1)
def _commit() -> str:
    """The commit that this package is checked out at, with a mark if it was changed; empty if it is installed."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
