"""dualdelay size: the page, the line of JSON, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualdelay.cli import main
from dualdelay.cli import size as command
from dualdelay.theory import footprint as counting
from dualdelay.theory.machine import FILE, SHIPPED, values_of

OWN = """
import dualdelay as dd
from dataclasses import dataclass

@dataclass(frozen=True)
class Mine(dd.Algorithm[dd.State]):
    "Plain steps."
    name = "mine"

    def init(self, x, n, rng):
        return dd.State(x, n)

    def step(self, s, a):
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUALDELAY_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(counting, "_TIMED", 1000)  # how long a pass takes is nothing that is tested
    return tmp_path / "cache"


def values(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["size", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_the_page_says_what_each_process_takes_and_what_an_update_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "size",
            "--weights",
            "7e9",
            "--workers",
            "64",
            "--shards",
            "8",
            "--bandwidth",
            "1e9",
            "--memory-per-process",
            "8e10",
        ]
    )
    page = capsys.readouterr().out
    for text in ("head", "shard", "worker", "last gradients of the workers", "The bottleneck is", "does not fit: a shard"):
        assert text in page
    assert "shipped with the package" in page and "what could be done otherwise" in page
    assert "--shards 64" in page and "compress=int8 in --method" in page and "No shards are" not in page
    assert "lines of 1 GB/s" in page


def test_the_line_of_json_has_it_all_and_the_sizes_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, "--weights", "1e6", "--workers", "10", "--method", "dude[wait_for=5]", "--machines", "1")
    server = found["processes"][0]
    assert server["kind"] == "server" and server["memory"]["last gradients of the workers"] == 10 * 4e6
    assert server["memory"]["weights"] == 4e6 and server["peak"] == pytest.approx(sum(server["memory"].values()))
    assert found["footprint"]["arrivals"] == 5 and found["bottleneck"] in found["seconds_per_update"]
    assert found["updates_per_second"] == pytest.approx(1 / max(found["seconds_per_update"].values()))
    assert found["machine"] == json.loads(json.dumps(values_of(SHIPPED))) and found["kept"] is None
    half = values(capsys, "--weights", "1e6", "--workers", "10", "--table", "half", "--optimizer", "Adam", "--cores", "8")
    assert half["processes"][0]["memory"]["last gradients of the workers"] == 10 * 2e6
    assert half["processes"][0]["memory"]["the optimiser's state"] == 8e6 and half["machine"]["cores"] == 8
    small = values(capsys, "--weights", "1e6", "--workers", "10", "--uplink", "int8", "--downlink", "0.01")
    assert small["footprint"]["up"] == 1 and small["footprint"]["down"] == pytest.approx(0.08)


def test_a_method_of_the_users_own_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    found = values(
        capsys, "--weights", "1e5", "--workers", "3", "--method", "mine", "--import", str(tmp_path / "mine.py"), "--gpu"
    )
    assert found["footprint"]["server"] == {"weights": 4.0, "undo": 4.0} and found["plan"]["gradient_cores"] == 0


def test_what_is_measured_is_kept_and_used_from_then_on(
    capsys: pytest.CaptureFixture[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(SHIPPED, cores=3, origin="measured here on a day")
    monkeypatch.setattr(command, "measure_machine", lambda report: here)
    found = values(capsys, "--measure")
    assert found["kept"] == str(cache / FILE) and found["machine"]["cores"] == 3 and "plan" not in found
    assert values(capsys, "--weights", "1e5", "--workers", "3")["machine"]["origin"] == "measured here on a day"
    other = cache / "other.json"
    other.write_text(json.dumps(values_of(replace(here, cores=5))))
    assert values(capsys, "--weights", "1e5", "--workers", "3", "--machine", str(other))["machine"]["cores"] == 5


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "expected --weights and --workers"),
        (["--weights", "1e6"], "expected --weights and --workers"),
        (["--weights", "nan", "--workers", "3"], "weights"),
        (["--weights", "1e6", "--workers", "0"], "workers"),
        (["--weights", "1e5", "--workers", "3", "--method", "dude[wait_for=4]"], "wait_for"),
        (["--weights", "1e5", "--workers", "3", "--method", "nothing"], "there is no"),
        (["--weights", "1e5", "--workers", "3", "--uplink", "int4"], "uplink"),
        (["--weights", "1e5", "--workers", "3", "--cores", "0"], "cores"),
        (["--weights", "1e5", "--workers", "3", "--memory-per-process", "0"], "memory_per_process is 0"),
        (["--weights", "1e5", "--workers", "3", "--machine", "nowhere.json"], "nowhere.json"),
        (["--weights", "1e5", "--workers", "3", "--measure", "--machine", "other.json"], "give one of both"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["size", *words])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and error in said and len(said.splitlines()) == 1
