"""Nothing in a folder is trusted: files of other runs, settings, links."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.runs.resume import recorded_fleet
from dualdelay.storage.files import json_digest
from dualdelay.storage.folder import FORMAT
from dualdelay.workers.output import Output
from own import Scenario, centers, content, seen

PROBLEM, SPEEDS = dd.Quadratic(centers, noise=0.3), dd.FixedSpeeds([1.0, 2.0, 3.0])
CALLS: list[Any] = [dd.load, dd.replay, dd.resume]

# ------------------------------------------------------------------------------------- files and settings of no such run


def crafted(folder: Path, **changes: Any) -> None:
    """Write a configuration with other values, or without those that are ``...``, and a digest that is right."""
    values = json.loads((folder / "config.json").read_text())
    values.pop("digest")
    values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps({**values, "digest": json_digest(values)}))


@pytest.mark.parametrize("version", [1, FORMAT + 1, "new", ...])
def test_another_format_is_refused_by_name(version: Any, finished: Path) -> None:
    crafted(finished, format=version)
    shown = 1 if version is ... else version  # the first format had no number
    for call in CALLS:
        with pytest.raises(dd.BadInput, match=rf"has format {shown!r} and was written by .* reads format {FORMAT}"):
            call(finished)


@pytest.mark.parametrize("key", ["algorithm", "seed", "layout", "metrics", "environment", "speeds", "updates", "start"])
@pytest.mark.parametrize("value", [..., [[]], True], ids=["missing", "a list", "a truth value"])
def test_a_configuration_that_no_run_writes_is_refused_by_the_name_of_the_setting(
    key: str, value: Any, finished: Path
) -> None:
    crafted(finished, **{key: value})
    for call in CALLS:
        with pytest.raises(dd.BadInput, match=rf"config\.json has no valid {key}, so no run has written it"):
            call(finished)


def test_no_file_of_another_run_is_taken_for_this_one_s(tmp_path: Path) -> None:
    """The foreign files are undamaged, of a run that differs in its lr alone, finished or not."""
    best = dd.Evaluation(best_by="objective")
    for name, lr in (("own", 0.1), ("foreign", 0.05)):
        scenario = Scenario(dd.DuDe(lr), PROBLEM, SPEEDS, updates=30, checkpoint_every=10, evaluation=best)
        scenario.run(tmp_path / name)
        scenario.killed(tmp_path / f"{name} killed", 28)
    straight, outcomes = dd.load(tmp_path / "own").x, {"refused": 0, "right": 0}
    for state in ("", " killed"):
        own, foreign = tmp_path / f"own{state}", tmp_path / f"foreign{state}"
        good, before = content(own), seen(dd.load(own))
        for name in good.keys() - {"lock"}:
            place = own / name
            other = foreign / name if place.parent == own else max((foreign / place.parent.name).iterdir())
            place.unlink()
            shutil.copyfile(other, place.with_name(other.name))
            for call in CALLS:
                try:
                    run = call(own)
                except dd.DualDelayError:
                    outcomes["refused"] += 1
                    continue
                outcomes["right"] += 1
                assert call is not dd.load or run.notes or seen(run) == before
                assert call is dd.load or run.x.equal(straight)
            shutil.rmtree(own)
            for path, data in good.items():
                (own / path).parent.mkdir(parents=True, exist_ok=True)
                (own / path).write_bytes(data)
    assert outcomes["refused"] > 20 and outcomes["right"] > 20, outcomes


def test_an_argument_in_the_wrong_place_is_named(killed: Path, finished: Path) -> None:
    with pytest.raises(dd.BadInput, match=r"updates is .*Quadratic"):
        dd.resume(killed, PROBLEM)
    with pytest.raises(dd.BadInput, match=r"problem is .digits.; expected a dd\.Problem"):
        dd.replay(finished, "digits")


# ------------------------------------------------------------------------- a folder does not decide where a run reaches out


@pytest.fixture
def real(killed: Path) -> Callable[..., Path]:
    """Makes the folder one of a run of real workers, as far as resume looks at it before it starts anything."""

    def write(**fleet: Any) -> Path:
        described = {"name": "ray", "threads": 1, "server_threads": 1, **fleet}
        simulated = dict.fromkeys(("speeds", "link", "changes", "device", "precision", "batch"))
        crafted(killed, fleet=described, **simulated)
        return killed

    return write


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"address": "192.0.2.1:6379"},
        {"address": "127.0.0.1:6379"},
        {"address": "auto"},
        {"insecure": True},
        {"address": "192.0.2.1:6379", "insecure": True},
    ],
    ids=str,
)
def test_a_folder_does_not_decide_where_a_run_listens_or_which_cluster_it_joins(
    settings: dict[str, Any], real: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = real(**settings)
    with pytest.raises(dd.BadInput, match=rf"says of its workers .*{'.*'.join(settings)}.* not for a folder to decide"):
        dd.resume(folder)
    with pytest.raises(SystemExit) as stop:
        main(["resume", str(folder)])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and all(f"--{name}" in printed for name in settings) and "--address local" in printed


def test_what_the_caller_confirms_is_used_and_the_rest_comes_from_the_folder(
    real: Callable[..., Path], originals: Path
) -> None:
    folder = real(address="192.0.2.1:6379", insecure=True, restarts=7)
    with pytest.raises(dd.BadInput, match="insecure=True"):
        recorded_fleet(folder, address="10.0.0.1:1")  # confirmed in part
    fleet = recorded_fleet(folder, address="10.0.0.1:1", insecure=False)
    assert fleet is not None
    assert (fleet.address, fleet.insecure, fleet.host, fleet.faults.restarts) == ("10.0.0.1:1", False, "127.0.0.1", 7)
    local = recorded_fleet(folder, address="local", insecure=False)
    assert local is not None and local.address is None
    with pytest.raises(dd.BadInput, match="is a simulation"):
        recorded_fleet(originals / "finished", address="local")


@pytest.mark.parametrize("name", ["checkpoints", "trace", "output", "moved"])
def test_a_folder_with_links_to_other_places_is_not_written_to(name: str, killed: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    if (killed / name).exists():
        (killed / name).rename(outside)
    else:
        outside.mkdir()
    (outside / "000000000099-000000000000.parquet").write_bytes(b"not of this run")
    (killed / name).symlink_to(outside)
    before = content(outside)
    with pytest.raises(dd.BadInput, match=f"{name} is a link to another place"):
        dd.resume(killed)
    assert content(outside) == before


def test_what_workers_print_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "worker-0-0.txt").symlink_to(tmp_path / "letter.txt")
    output = Output(tmp_path / "output")
    output.add(0, 0, ["printed"])
    output.close()
    assert (tmp_path / "letter.txt").read_text() == "dear"
