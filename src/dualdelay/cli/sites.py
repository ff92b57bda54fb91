"""What the commands serve, site, enroll and revoke do: training across places that dial in over HTTPS."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core import Algorithm, Problem, own_code
from ..core.errors import BadInput
from ..engine.half import Half
from ..problems import exact
from ..runs import resume as resuming
from ..runs.names import label, parse, rebuild, slug
from ..runs.runner import interrupted_by_sigterm
from ..runs.seeds import ProblemOf, seeded_problem
from ..runs.settings import Reporting
from ..runs.simulate import run_one
from ..runs.spec import with_room
from ..storage.folder import Folder, is_empty
from ..storage.record import RunRecord
from ..workers.settings import FaultPolicy
from ..workers.sites import keys
from ..workers.sites.fleet import SiteFleet
from ..workers.sites.site import Site as SiteProcess
from ..workers.sites.status import StatusBoard
from . import commands, shared
from .flags import Enroll, Revoke, Serve, Site


def serve(flags: Serve) -> None:
    """Train with sites that dial in; the same command goes on with a run whose folder is there."""
    common = flags.common
    commands.require_real(common, "serve")
    shared.import_all(common.imports)
    algorithm, problem_of = _run_of(flags)
    problem = seeded_problem(problem_of, flags.seed)
    token = None if flags.status_token is None else _token(flags.status_token)
    folder = common.folder or shared.free_folder(f"{slug(label(algorithm))}-seed{flags.seed}")
    before = _begun(folder)
    fleet = SiteFleet(
        listen=flags.listen,
        certificate=None if flags.certificate is None else str(flags.certificate),
        certificate_key=None if flags.key is None else str(flags.key),
        roster=str(flags.sites),
        names=flags.names or _names(before, flags.sites),
        quorum=flags.quorum,
        silence=flags.silence,
        downloads=flags.downloads,
        threads=flags.site_threads,
        faults=FaultPolicy(deadline=flags.deadline, gone=flags.gone, minimum=flags.minimum),
        board=StatusBoard(token),
    )
    again = f"the same command and --folder {folder}"
    with commands.continued_by(again), commands.boards(common.tensorboard) as log, _told(shown=True):
        if before is not None:
            given: dict[str, Any] = {"algorithm": algorithm} if "name" not in before.algorithm else {}
            reporting = Reporting(log=log)
            run = resuming.resume(folder, common.updates, common.time, problem, fleet=fleet, watch=reporting, **given)
        else:
            run = run_one(commands.options_of(common, folder), algorithm, problem, fleet, flags.seed, Reporting(log=log))
    commands.print_run(run, common.json, "serve")


def _begun(folder: Path) -> RunRecord | None:
    """What a folder says of its run, if one has begun there; refuses one that is no run's, or cannot be written to."""
    if folder.exists() and not is_empty(folder):
        return Folder(folder).record()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"the folder {folder} cannot be written to ({error.strerror}); choose another: --folder") from None
    return None


def _names(before: RunRecord | None, roster: Path) -> tuple[str, ...]:
    """The sites of a run: those that it began with, however many were enrolled since, or all in the file."""
    recorded = tuple((before.fleet or {}).get("names", ())) if before is not None else ()
    return recorded or tuple(keys.Roster(roster).sites)


def _run_of(flags: Serve) -> tuple[Algorithm[Any], ProblemOf]:
    """The method and the problem: those that a file of the user's own defines, or those that texts name."""
    if not flags.run.endswith(".py"):
        return parse("algorithm", flags.run), parse("problem", flags.common.problem)
    module = own_code.load(flags.run)
    algorithm, problem = getattr(module, "algorithm", None), getattr(module, "problem", None)
    algorithm = algorithm() if callable(algorithm) and not isinstance(algorithm, Algorithm) else algorithm
    if not isinstance(algorithm, Algorithm) or problem is None:
        raise BadInput(
            f"{flags.run} defines no algorithm or no problem; expected both, such as algorithm = dd.DuDe(lr=0.05) and a "
            "function problem(seed) that returns a dd.Network."
        )
    return algorithm, parse("problem", f"{flags.run}:problem")


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the token's file {path} cannot be read ({error}).") from None
    if len(token) < 16:
        raise BadInput(f"the token in {path} has {len(token)} characters; expected 16 or more, which nobody can guess.")
    return token


@contextmanager
def _told(shown: bool = False) -> Iterator[None]:
    """What happens is told on standard error, line by line; where progress is ``shown``, that tells it."""
    log = logging.getLogger("dualdelay")
    handler, level, spread = logging.NullHandler() if shown else logging.StreamHandler(sys.stderr), log.level, log.propagate
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = spread


def site(flags: Site) -> None:
    """Work for a server until its run has ended."""
    shared.import_all(flags.imports)

    def prepare(run: Mapping[str, Any]) -> tuple[Problem, Half]:
        algorithm = _method(run["algorithm"], flags)
        problem = shared.make_problem(flags.problem, run["seed"])
        problem = with_room(exact(problem) if algorithm.exact else problem, run["room"])
        if problem.workers != run["workers"]:
            raise BadInput(
                f"{flags.problem} has {problem.workers} workers, and the server's run {run['workers']}; use the same file."
            )
        return problem, Half(algorithm, run["uplink"])

    with _told(), interrupted_by_sigterm():  # a site that is stopped says goodbye
        process = SiteProcess(flags.server, flags.name, flags.key, prepare, flags.certificate, flags.tell_errors)
        text = process.run()
    traffic = process.line.traffic
    if not flags.json:
        print(f"{flags.name}: {text} {traffic.up:,} bytes were sent and {traffic.down:,} received.", file=sys.stderr)
    shared.finish(flags.json, "site", name=flags.name, bytes_up=traffic.up, bytes_down=traffic.down, ended=text)


def _method(description: Mapping[str, Any], flags: Site) -> Algorithm[Any]:
    try:
        algorithm: Algorithm[Any] = rebuild("algorithm", description)
    except BadInput as error:
        if "name" in description:
            raise
        raise BadInput(
            f"the server's method is its own, a {description.get('class')}; the site needs its code as well: --import "
            f"FILE.py ({error})"
        ) from None
    return algorithm


def enroll(flags: Enroll) -> None:
    """Make a key for a site."""
    if flags.days is not None and flags.days < 1:
        raise BadInput(f"days is {flags.days}; expected one or more.")
    key = flags.key or Path(f"{flags.name}.key")
    site = keys.enroll(flags.name, flags.sites, key, flags.days)
    console = shared.make_console(flags.json)
    console.print(f"{key}: the key of {flags.name}. Bring it there by a safe way, and keep no copy.")
    console.print(f"{flags.sites}: the server's file has the line\n  {site.line}", soft_wrap=True)
    shared.finish(flags.json, "enroll", name=flags.name, key=str(key), sites=str(flags.sites), line=site.line)


def revoke(flags: Revoke) -> None:
    """A site's key is valid no more."""
    keys.revoke(flags.name, flags.sites)
    shared.make_console(flags.json).print(f"{flags.sites}: the key of {flags.name} opens nothing any more.")
    shared.finish(flags.json, "revoke", name=flags.name, sites=str(flags.sites))
