"""The page that leads from an empty folder to a model of one's own: every file on it is written and run."""

from __future__ import annotations

import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dualdelay as dd

PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "own_model.md"
FILES = dict(re.findall(r"```python (\S+)\n(.*?)```", PAGE.read_text(), re.S))


@pytest.fixture
def page(inside: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The files of the page in an empty folder; its modules are known while a test lasts."""
    for name, text in FILES.items():
        Path(name).write_text(text)
    monkeypatch.syspath_prepend(str(inside))
    yield SimpleNamespace(folder=inside, program=lambda name: runpy.run_path(name, run_name="__main__"))
    for name in ("site_data", "setting"):
        sys.modules.pop(name, None)


def test_the_page_has_these_files() -> None:
    assert list(FILES) == ["site_data.py", "setting.py", "rehearse.py", "train.py", "resume.py", "use.py"]


def test_the_rehearsal_learns(page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page.program("rehearse.py")
    summary = eval(capsys.readouterr().out, {"nan": float("nan")})
    assert summary["updates"] == 400 and summary["accuracy"] > 0.85
    assert summary["tau_max"] > 20 and summary["answered"] == 4


@pytest.mark.slow
def test_uneven_sites_are_trained_interrupted_resumed_used_and_replayed(
    page: Any, ray_here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two of the four sites: each is a process, which takes seconds to start."""
    sites = (
        FILES["site_data.py"].replace("SITES = 4", "SITES = 2").replace("0.0002, 0.0002, 0.0002, 0.002]", "0.0002, 0.002]")
    )
    Path("site_data.py").write_text(sites)
    endless = FILES["setting.py"].replace("UPDATES = 400", "UPDATES = 100_000")
    Path("setting.py").write_text(endless)  # so that it is interrupted on any machine
    train = subprocess.Popen([sys.executable, "train.py"], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 240
    while not Path("run", "config.json").exists() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1.0)  # until the run listens to signals, which no file tells
    train.send_signal(signal.SIGTERM)
    assert train.communicate(timeout=240)[1].splitlines()[-1].endswith("dd.resume goes on") and train.returncode != 0
    kept = dd.load("run")
    assert kept.ended == "interrupted"
    more = kept.version + 60
    Path("resume.py").write_text(FILES["resume.py"].replace('dd.resume("run",', f'dd.resume("run", updates={more},'))
    import ray
    import setting
    import site_data

    for module in (setting, site_data):  # the workers of a Ray that runs already do not have this folder on their path
        ray.cloudpickle.register_pickle_by_value(module)
    page.program("resume.py")
    assert f"Run({more} updates" in capsys.readouterr().out
    page.program("use.py")
    used = capsys.readouterr().out
    assert used.startswith(f"{more} updates 0.") and "torch.Size([1, 10])" in used
    site_data.PAUSES[:] = [0.0] * 2
    again = dd.replay("run", setting.problem, optimizer=setting.optimizer, schedule=setting.schedule)
    loaded = dd.load("run")
    assert torch.equal(again.x, loaded.x) and loaded.best is not None
    assert set(loaded.workers.worker.tolist()) == {0, 1}
    assert "accuracy" in loaded.workers and (Path("run") / "best.safetensors").exists()
