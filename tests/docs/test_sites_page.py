"""The page on sites, from an empty folder to three sites: its files are written and its commands run, in their order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_pages import FENCE, ROOT

from dialling import free_port

PAGE = ROOT / "docs" / "tutorial" / "sites.md"


@pytest.mark.slow
def test_the_commands_of_the_page_train_three_sites_and_replay_the_run(tmp_path: Path) -> None:
    commands = []
    for _, language, name, text in FENCE.findall(PAGE.read_text()):
        if language == "python":
            (tmp_path / name).write_text(text)
        elif language == "bash":
            commands.append(text)
    script = "set -e\n" + "".join(commands).replace("8443", str(free_port()))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "NO_PROXY": "localhost"}
    with open(tmp_path / "out.txt", "w") as out:  # a site that stays would hold a pipe open
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, stdout=out, stderr=out, timeout=150)
    said = (tmp_path / "out.txt").read_text()
    assert done.returncode == 0, said
    assert "all 300 versions and the final weights are the same bits" in said
    assert re.search(r"hospital-c ed25519 \S+ until=\d{4}-\d\d-\d\d", said)
    for name in ("hospital-a", "hospital-b", "hospital-c"):
        assert re.search(rf"\d {name} +\d+ +\S+%", said), "the table has its name, and what it has sent"
        assert f"{name}: the run has ended." in (tmp_path / f"{name}.txt").read_text()
