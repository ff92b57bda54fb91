import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(inside, capsys):
    """Runs an example as a program, in an empty folder, and returns what it printed."""

    def program(name):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return program


def test_every_example_is_run_here():
    text = Path(__file__).read_text()
    assert all(f'run("{path.name}"' in text for path in EXAMPLES.glob("*.py"))


def test_own_logger(run):
    out = run("own_logger.py")
    assert re.fullmatch(r"the metrics are in metrics.jsonl\n2000 updates, objective 0\.[01]\d\d\n", out), out
    rows = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2000
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert {"loss", "tau_max", "worker/9/rate"} <= set(rows[-1])
    assert sum({"objective", "accuracy"} <= set(row) for row in rows) > 10


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("ray_here")
def test_several_ranks(run):
    out = run("several_ranks.py")
    rows = re.findall(r"(\w+): 30 updates, objective (\d\.\d\d\d), (\S+) from alone\n", out)
    assert [name for name, _, _ in rows] == ["Digits", "WithDDP", "WithFSDP"], out
    assert len({objective for _, objective, _ in rows}) == 1 and all(float(apart) < 1e-4 for _, _, apart in rows)
