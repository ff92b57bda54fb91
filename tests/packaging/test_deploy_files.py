"""The images, the compose file and the units start what the program takes, from paths that agree, without privileges.

There is no Docker here: what compose would start is started as processes, with the containers' paths in one folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import tyro
import yaml

from dialling import free_port
from dualdelay.cli import flags as all_flags
from dualdelay.cli.shell import BAD_INPUT, COMMANDS, INTERRUPTED

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "how_to" / "deploy_sites.md"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SITES = [name for name in SERVICES if name != "server"]
UNITS = sorted(path.name for path in DEPLOY.glob("*.service"))
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.S | re.M)


# --- what the files say ---


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each named stage of the Dockerfile, after those of the stage that it begins from."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in filter(None, text.splitlines()):
        word, given = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = given.partition(" AS ")
            found[name] = list(found.get(base, []))
        found[name].append((word, given))
    return found


def image_of(service: str) -> dict[str, str]:
    """The instructions of a service's image; of a word that stands there twice, the last counts."""
    return dict(stages()[SERVICES[service]["build"]["target"]])


def filled(text: str, variables: Mapping[str, str]) -> str:
    """A text of the compose file, or of a unit, with its variables, or what they are by default."""
    return VARIABLE.sub(lambda found: variables.get(found[1], found[2] or ""), text)


def container_command(service: str, variables: Mapping[str, str]) -> list[str]:
    """What runs in a service's container."""
    entry: list[str] = json.loads(image_of(service)["ENTRYPOINT"])
    return [*entry, *(filled(word, variables) for word in SERVICES[service]["command"])]


def mounts(service: str) -> dict[str, tuple[str, bool]]:
    """What lies where in a service's container: from where, and whether it can be written to there."""
    there = {
        one["target"]: (filled(one["source"], {}), not one.get("read_only", False)) for one in SERVICES[service]["volumes"]
    }
    secrets = {f"/run/secrets/{name}": COMPOSE["secrets"][name]["file"] for name in SERVICES[service]["secrets"]}
    return there | {place: (filled(source, {}), False) for place, source in secrets.items()}


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a unit, each with all that is given for it."""
    settings: dict[str, list[str]] = {}
    section = ""
    for line in (DEPLOY / name).read_text().replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            heading, setting = re.fullmatch(r"\[(Unit|Service|Install)\]", line), re.fullmatch(r"([A-Z]\w+)=(.*)", line)
            assert heading or (setting and section), f"{name}: {line}"
            if heading:
                section = heading[1]
            elif setting:
                settings.setdefault(setting[1], []).append(setting[2])
    return settings


def unit_command(name: str) -> list[str]:
    """What a unit starts, with the variables that it sets; systemd puts credentials into a folder."""
    settings = unit(name)
    variables = dict(pair.split("=", 1) for line in settings["Environment"] for pair in shlex.split(line))
    [command] = settings["ExecStart"]
    return [filled(word, {**variables, "CREDENTIALS_DIRECTORY": "/run/credentials"}) for word in shlex.split(command)]


def parsed(words: Sequence[str]) -> Any:
    """The flags that the program reads from a command."""
    program, command, *rest = words
    assert PurePosixPath(program).name == "dualdelay"
    kind = getattr(all_flags, COMMANDS[command].flags)
    return tyro.cli(kind, args=list(rest))


def paths(flags: Any) -> dict[str, PurePosixPath]:
    """The files that a command names, by flag; the run's own file lies where the command is started."""
    given = {field.name: getattr(flags, field.name) for field in fields(flags)}
    named = {name: PurePosixPath(value) for name, value in given.items() if isinstance(value, Path)}
    own = given["run"] if "run" in given else given["problem"].partition(":")[0]
    named |= {"folder": PurePosixPath(given["common"].folder)} if "common" in given else {}
    return {**named, "own": PurePosixPath(own)}


COMMANDS_SHOWN = {
    **{f"compose {name}": container_command(name, {}) for name in SERVICES},
    **{name: unit_command(name) for name in UNITS},
}


@pytest.mark.parametrize("where", COMMANDS_SHOWN)
def test_every_command_is_one_that_the_program_takes_and_speaks_https(where: str) -> None:
    flags = parsed(COMMANDS_SHOWN[where])
    if isinstance(flags, all_flags.Serve):
        assert flags.certificate is not None
        assert flags.key is not None
        assert flags.status_token is not None, "otherwise each start has another"
        assert flags.common.updates is not None
        assert flags.common.folder is not None, "a second start would begin another run"
    else:
        assert isinstance(flags, all_flags.Site)
        assert flags.server.startswith("https://")
        assert flags.problem == "run.py:problem"


def test_the_files_are_a_server_and_sites() -> None:
    assert UNITS == ["dualdelay-server.service", "dualdelay-site.service"]
    assert len(SITES) == 3
    kinds = {where: type(parsed(words)) for where, words in COMMANDS_SHOWN.items()}
    assert {where for where, kind in kinds.items() if kind is all_flags.Serve} == {
        "compose server",
        "dualdelay-server.service",
    }
    assert [parsed(container_command(name, {})).name for name in SITES] == SITES


# --- images ---


@pytest.mark.parametrize("target", ["server", "site"])
def test_an_image_has_one_extra_no_file_of_anybodys_and_an_ordinary_user(target: str) -> None:
    lines = stages()[target]
    words = [word for word, _ in lines]
    assert not {"COPY", "ADD"} & set(words), "whatever is copied in stays in"
    [install] = [given for word, given in lines if word == "RUN" and "pip install" in given]
    assert re.findall(r"\.whl\)\[(.*?)\]", install) == ["sites"]
    assert words.index("USER") > max(place for place, word in enumerate(words) if word == "RUN")
    assert words.count("USER") == 1
    user = dict(lines)["USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "who is named by number is known to be nobody special"
    assert any(f"useradd --uid {user.partition(':')[0]} " in given for word, given in lines if word == "RUN")
    assert not any(re.search(r"token|secret|passw|\bkey", given, re.I) for word, given in lines if word in ("ENV", "ARG"))
    assert dict(lines)["STOPSIGNAL"] == "SIGINT", "as process 1, Python would not hear SIGTERM"


def test_what_belongs_to_an_operator_comes_neither_into_an_image_nor_into_git() -> None:
    for name in (".dockerignore", ".gitignore"):
        ignored = [line.strip("/") for line in (ROOT / name).read_text().splitlines()]
        own = {PurePosixPath("deploy", source) for service in SERVICES for source, _ in mounts(service).values()}
        for path in {*own, PurePosixPath("deploy/.env"), PurePosixPath("deploy/own.yaml")}:
            assert any(fnmatch(str(part), line) for part in (path, *path.parents) for line in ignored), (name, path)
    assert not list(DEPLOY.rglob("*.pem"))
    assert not [path for path in DEPLOY.iterdir() if path.is_file() and "PRIVATE KEY" in path.read_text()]


def test_the_port_is_the_same_everywhere() -> None:
    port = parsed(container_command("server", {})).listen.rpartition(":")[2]
    image = image_of("server")
    assert image["EXPOSE"] == port
    assert f"'127.0.0.1', {port}," in image["HEALTHCHECK"]
    [published] = SERVICES["server"]["ports"]
    assert filled(published, {}) == f"{port}:{port}"
    for name in SITES:
        assert parsed(container_command(name, {})).server == f"https://server:{port}"
        assert "ports" not in SERVICES[name], "a site opens none"


# --- compose ---


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_privileges_and_can_write_to_the_runs_alone(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", filled(service["user"], {}))
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"cap_add", "privileged", "devices", "network_mode", "pid", "ipc", "entrypoint"} & set(service)
    assert service["restart"].startswith("on-failure"), "after the end of the run there is no use for it"
    writable = {place for place, (_, may_write) in mounts(name).items() if may_write}
    assert writable == ({"/runs"} if name == "server" else set())
    assert (DEPLOY / service["build"]["context"] / "Dockerfile").samefile(ROOT / "Dockerfile")


@pytest.mark.parametrize("name", SERVICES)
def test_every_path_of_a_containers_command_is_mounted_and_nobody_has_anothers_key(name: str) -> None:
    there, image = mounts(name), image_of(name)
    for flag, path in paths(parsed(container_command(name, {}))).items():
        place = PurePosixPath(image["WORKDIR"]) / path
        holders = [one for one in there if place == PurePosixPath(one) or PurePosixPath(one) in place.parents]
        assert len(holders) == 1, f"{flag}: {place} is not there"
        assert there[holders[0]][1] == (flag == "folder"), flag
        if flag in ("key", "certificate", "status_token"):
            assert holders == [str(place)], f"{flag} is no secret"
        if flag == "sites":
            assert holders == [str(place.parent)], "a file that is replaced is seen in a mounted folder alone"
    own = {f"{name}.key"} if name != "server" else {"server-key.pem", "status-token.txt"}
    public = {"server.pem", "authority.pem"}
    assert {PurePosixPath(source).name for place, (source, _) in there.items() if "secrets" in place} - public == own
    assert not any(source.endswith(("own/keys", "/own")) for source, _ in there.values())


# --- units ---


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_again_after_a_crash_alone_and_has_no_privileges(name: str) -> None:
    settings = {key: values[-1] for key, values in unit(name).items()}
    assert settings["User"] not in ("root", "0")
    assert settings["Restart"] == "on-failure"
    assert int(settings["RestartSec"]) >= 10
    assert settings["RestartPreventExitStatus"] == str(BAD_INPUT)
    assert settings["SuccessExitStatus"] == str(INTERRUPTED)
    assert settings["KillSignal"] == "SIGINT"
    assert settings["After"] == settings["Wants"] == "network-online.target"
    assert settings["NoNewPrivileges"] == settings["PrivateTmp"] == "yes"
    assert settings["ProtectSystem"] == "strict"
    assert settings["CapabilityBoundingSet"] == ""
    assert "MemoryDenyWriteExecute" not in settings, "torch compiles while it runs"


@pytest.mark.parametrize("name", UNITS)
def test_every_path_of_a_unit_is_one_that_the_page_fills_or_systemd_makes(name: str) -> None:
    settings, page = unit(name), PAGE.read_text()
    folder = PurePosixPath(settings["WorkingDirectory"][0])
    credentials = dict(line.split(":", 1) for line in settings.get("LoadCredential", ()))
    installed = {
        PurePosixPath(word).name
        for line in re.findall(rf"^\$ sudo install -m .* {folder}\S*$", page, re.M)
        for word in line.split()
    }
    for flag, path in paths(parsed(unit_command(name))).items():
        place = folder / path
        if flag == "folder":
            assert str(place.parent) == f"/var/lib/{settings['StateDirectory'][0]}" == settings["ReadWritePaths"][0]
            assert str(place.parent) in page
            continue
        if str(place).startswith("/run/credentials/"):
            place = PurePosixPath(credentials.pop(place.name))
        elif flag == "key":
            assert f"-m 600 -o {settings['User'][0]} " in page
        assert place.parent == folder
        assert place.name in installed, flag
    assert not credentials, "nobody reads these"
    assert f"sudo python3 -m venv {PurePosixPath(unit_command(name)[0]).parents[1]}\n" in page
    assert re.search(rf"useradd --system .* {settings['User'][0]}\n", page)
    assert f"{name} /etc/systemd/system\n" in page


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_knows_every_setting_of_the_units(tmp_path: Path) -> None:
    for name in UNITS:
        text = (DEPLOY / name).read_text().replace("/opt/dualdelay/bin/dualdelay", sys.executable)
        (tmp_path / name).write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", str(tmp_path / name)], capture_output=True, text=True)
        assert [line for line in done.stderr.splitlines() if "dualdelay" in line] == []


# --- the page ---


def test_the_page_has_every_variable_and_names_what_exists() -> None:
    page, text = PAGE.read_text(), (DEPLOY / "compose.yaml").read_text()
    used = {name for name, _ in VARIABLE.findall(text)}
    assert set(re.findall(r"\bDUALDELAY_\w+", page)) == used
    for command in re.findall(r"\bdualdelay-(?:server|site)\b(?!\.service)", page):
        assert f"{command}.service" in UNITS or command in {service["image"] for service in SERVICES.values()}
    for name in re.findall(r"docker compose [^`\n]*?\b(server|hospital-\w)\b", page):
        assert name in SERVICES


def until(holds: Callable[[], bool], what: Callable[[], str], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


@pytest.mark.slow
def test_what_compose_starts_trains_until_the_run_has_ended(tmp_path: Path) -> None:
    """The page's commands prepare a folder, and the containers' commands run there, their paths led into it."""
    program, port = Path(sys.executable).parent / "dualdelay", free_port()
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "COLUMNS": "200", **kept}
    script = "set -e\n" + "".join(BLOCK.findall(PAGE.read_text()))
    prepared = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert prepared.returncode == 0, prepared.stderr
    [run] = re.findall(r"^```python run.py\n(.*?)^```$", (ROOT / "docs/tutorial/sites.md").read_text(), re.S | re.M)
    (tmp_path / "own/code/run.py").write_text(run)
    variables = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    assert variables == {"DUALDELAY_UID": str(os.getuid()), "DUALDELAY_GID": str(os.getgid())}
    variables["DUALDELAY_SERVER"] = f"https://localhost:{port}"
    running: list[subprocess.Popen[bytes]] = []

    def start(service: str, log: str, **changed: str) -> subprocess.Popen[bytes]:
        words = container_command(service, variables)[1:]
        for place, (source, _) in mounts(service).items():
            words = [re.sub(rf"(?<=[=]){re.escape(place)}(?=/|$)", str(tmp_path / source), word) for word in words]
        words = [word.replace("0.0.0.0:8443", f"127.0.0.1:{port}") for word in words]
        for old, new in changed.items():
            words = [re.sub(rf"^--{old}=.*", f"--{old}={new}", word) for word in words]
        with open(tmp_path / log, "w") as out:
            process = subprocess.Popen(
                [program, *words],
                cwd=tmp_path / "own/code",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        running.append(process)
        return process

    def said() -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in tmp_path.glob("*.log"))

    try:
        server = start("server", "server.log")
        stopped, ended = start("hospital-a", "stopped.log"), start("hospital-c", "ended.log")
        refused = start("hospital-b", "refused.log", key=str(tmp_path / "own/keys/hospital-a.key"))
        until(lambda: "hospital-a is there" in said() and "hospital-c is there" in said(), said)
        check = json.loads(image_of("server")["HEALTHCHECK"].partition(" CMD ")[2])
        check = [sys.executable, *(word.replace("8443", str(port)) for word in check[1:])]
        assert subprocess.run(check, timeout=20).returncode == 0, "healthy"
        strict = ssl.create_default_context(cafile=tmp_path / "own/keys/authority.pem")
        strict.verify_flags |= ssl.VERIFY_X509_STRICT  # which Python 3.13 asks for by itself
        for name in ("server", "localhost"):
            with socket.create_connection(("127.0.0.1", port)) as line, strict.wrap_socket(line, server_hostname=name):
                pass
        stopped.send_signal(signal.Signals[image_of("hospital-a")["STOPSIGNAL"]])
        ended.send_signal(signal.SIGTERM)  # what everything else stops a process by
        assert stopped.wait(20) == ended.wait(20) == INTERRUPTED, said()
        assert refused.wait(20) == BAD_INPUT, said()
        assert "has another key here" in (tmp_path / "refused.log").read_text()
        sites = {name: start(name, f"{name}.log") for name in SITES}
        assert server.wait(90) == 0, said()
        for name, process in sites.items():
            assert process.wait(20) == 0, said()
            assert f"{name}: the run has ended." in (tmp_path / f"{name}.log").read_text()
        assert start("server", "again.log").wait(60) == 0, "what has ended ends at once"
        assert subprocess.run(check, capture_output=True, timeout=20).returncode != 0, "nobody is there"
        assert list((tmp_path / "own/runs/first").glob("*.json"))
        assert (tmp_path / "own/keys/status-token.txt").read_text().strip() not in said(), "who reads a log reads no more"
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
