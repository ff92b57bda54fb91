import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, folder):
    done = subprocess.run([sys.executable, EXAMPLES / name], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here():
    text = Path(__file__).read_text()
    assert all(f'run("{path.name}"' in text for path in EXAMPLES.glob("*.py"))


@pytest.mark.real
def test_own_model(tmp_path):
    out = run("own_model.py", tmp_path)
    said = re.fullmatch(
        r"800 updates in [\d.]+ s, saved in (runs/own-model-\S+)\naccuracy (\S+) before, (\S+) after; tau_max \d+\n", out
    )
    assert said is not None, out
    assert float(said[2]) < 0.3
    assert float(said[3]) > 0.7, "it knows the digits of every worker"
    config = json.loads((tmp_path / said[1] / "config.json").read_text())
    assert config["fleet"]["name"] == "ray"


def test_own_logger(tmp_path):
    out = run("own_logger.py", tmp_path)
    assert re.fullmatch(r"the vital signs are in metrics.jsonl\n2000 updates, objective 0\.[01]\d\d\n", out), out
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert told[-1]["step"] == 2000
    assert [row["step"] for row in told] == sorted(row["step"] for row in told)
    assert {"loss", "objective", "accuracy", "tau_max", "worker/9/rate"} <= set(told[-1])
