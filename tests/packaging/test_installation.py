"""The wheel in an empty environment, with what it declares and nothing more.

In `make slow` the environment has links to the declared packages of this one, so an import that is not declared fails.
`make install-test` does the same with pip (about two minutes).
"""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


class Environment:
    """A virtual environment of its own into which requirements are put by links."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.bin, self.folder, self._there = folder / "bin", folder, set[str]()
        [self.site] = folder.glob("lib/python*/site-packages")

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, run beside it and without this one's paths."""
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        variables["PATH"] = f"{self.bin}{os.pathsep}{variables['PATH']}"
        return subprocess.run(
            [self.bin / command[0], *command[1:]],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env={**variables, "COLUMNS": "200", "MPLBACKEND": "agg"},
        )

    def add_wheel(self, wheel: Path) -> None:
        """Install a wheel with what it declares, its extras left out."""
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--no-index", str(wheel)], check=True)
        [about] = self.site.glob("dualdelay-*.dist-info")
        self._add(PathDistribution(about), set())

    def add(self, requirement: str) -> None:
        """Install what a requirement names."""
        wanted = Requirement(requirement)
        found = distribution(wanted.name)
        assert wanted.specifier.contains(found.version, prereleases=True), f"{requirement}, and here is {found.version}"
        if str(found.name) not in self._there:
            self._there.add(str(found.name))
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (self.site / top).exists():
                    (self.site / top).symlink_to(found.locate_file(top))
        self._add(found, wanted.extras)

    def _add(self, found: Distribution, extras: set[str]) -> None:
        """Install what a distribution declares."""
        for text in found.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                self.add(text.split(";")[0])


class PipEnvironment(Environment):
    """A virtual environment into which pip installs, from wherever it is set up to."""

    def _pip(self, *words: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet", "--no-compile"]
        subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *words], check=True)

    def add_wheel(self, wheel: Path, extras: str = "") -> None:
        """Install a wheel with what it declares, and with extras such as [all]."""
        self._pip(f"{wheel}{extras}")

    def add(self, requirement: str) -> None:
        """Install what a requirement names."""
        self._pip(requirement)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    [path] = folder.iterdir()
    return path


@pytest.fixture(
    params=[
        pytest.param(Environment, marks=pytest.mark.slow, id="links"),
        pytest.param(PipEnvironment, marks=pytest.mark.install, id="pip"),
    ]
)
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    made: Environment = request.param(tmp_path / "environment")
    return made


RUNS = """
import json, sys
from pathlib import Path
import dualdelay as dd
from dualdelay.analysis.figures import pyplot
from dualdelay.analysis.loggers import TensorBoard
from dualdelay.workers.ray_fleet import RayTransport
from dualdelay.workers.sites import keys
from dualdelay.workers.sites.hub import Hub
from dualdelay.workers.sites.serving import Served


def workers():
    if "--real" in sys.argv:
        dd.train(dd.DuDe(lr=0.1), dd.Quadratic([[0.0]]), updates=2)
    else:
        try:
            RayTransport(None, None, None)
        except AttributeError:  # Ray is there, and None has no workers to start
            pass


def enrolled():
    keys.enroll("a", Path(f"{sys.argv[1]}.txt"), Path(f"{sys.argv[1]}.key"))


def served():
    Served(Hub(keys.Roster(Path("sites.txt")), [], 1, {}), "127.0.0.1:0", None, None).close()


def tried(what):
    try:
        what()
    except dd.BadInput as error:
        return str(error)
    return "works"


run = dd.simulate(dd.DuDe(lr=0.05), dd.Digits(workers=2), dd.FixedSpeeds([1.0, 2.0]), updates=20, folder=sys.argv[1])
dd.resume(sys.argv[1], updates=30)
assert dd.replay(sys.argv[1]).version == 30
print(json.dumps({"matplotlib": tried(pyplot), "tensorboard": tried(lambda: TensorBoard("board")), "ray": tried(workers),
                  "cryptography": tried(enrolled), "uvicorn": tried(served)}))
"""
COMPARE = "compare dude[lr=0.05] --problem digits[workers=2] --speeds truncated_normal[std=5] --updates 5 --folder compared"


def seen(environment: Environment, folder: str) -> dict[str, str]:
    """What works in an environment, and what is said of what does not."""
    real = ["--real"] if isinstance(environment, PipEnvironment) else []  # two Rays of two tests would find each other
    done = environment.call("python", "-c", RUNS, folder, *real)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_without_extras_it_trains_and_each_message_names_a_command_that_works(environment, wheel):
    environment.add_wheel(wheel)
    assert environment.call("dualdelay", "--version").stdout == f"dualdelay {wheel.name.split('-')[1]}\n"
    messages = seen(environment, "first")
    for package, message in messages.items():
        found = re.search(rf"not installed.*: pip install ('{package}>=[^']*'( '[^']*')*)\.$", message)
        assert found, message
        for requirement in shlex.split(found[1]):
            environment.add(requirement)
    assert seen(environment, "second") == dict.fromkeys(messages, "works")


@pytest.mark.install
def test_with_all_extras_nothing_is_missing_and_the_shell_draws_figures(tmp_path, wheel):
    environment = PipEnvironment(tmp_path / "environment")
    environment.add_wheel(wheel, "[all]")
    assert set(seen(environment, "first").values()) == {"works"}
    done = environment.call("dualdelay", *COMPARE.split())
    assert done.returncode == 0, done.stderr
    assert list((environment.folder / "compared").glob("*.png")), done.stdout
