"""Every way to do harm that we know of, many times over, with a table of what was not survived.

    python benchmarks/torture.py --minutes 5 --seed 0 --jobs 2 --out table.txt
    python benchmarks/torture.py --only kills,fails --trials 500
    python benchmarks/torture.py --only kills --trial 17 --seed 0

| attack | what it does | where |
| --- | --- | --- |
| kills | SIGKILL before, after or in the middle of every call that touches a run's folder | torture_storage.py |
| fails | such a call ends with an error, once or for ever | torture_storage.py |
| power | the power goes; only what was synced is sure to be there | torture_power.py |
| damage | a file is damaged, exchanged, lost, or changed with care | torture_damage.py |
| config | a configuration that somebody made, with a digest that is right | torture_damage.py |
| grammar | names with settings, many of them nonsense | torture_words.py |
| flags | command lines | torture_words.py |
| csv | files of recorded times and absences | torture_words.py |
| messages | replies of workers that make no sense | torture_messages.py |
| workers | real workers that freeze, are mute or die, and a server that is paused | torture_workers.py |

A trial is named by attack, seed and number, and with the same sources it is the same trial: the last line above repeats
one alone and shows where it failed. Failures are a ``lost run`` (what was saved cannot be used), a ``wrong bit`` (the end
is not that of a run that nobody disturbed), ``silent damage`` (wrong values without a word), a ``raw traceback`` (an
exception that is not the package's own), a ``hang``, ``leftovers`` (half-written files that stay) and ``joined`` (a folder
that somebody else may have made opened or joined a network). Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torture_core import Attack, Plan, Pool, Tally, table
from torture_damage import Config, Damage
from torture_messages import Messages
from torture_power import Power
from torture_storage import Fails, Kills
from torture_words import Flags, Grammar, Tables
from torture_workers import Workers

ATTACKS: dict[str, type[Attack]] = {
    kind.name: kind for kind in (Kills, Fails, Power, Damage, Config, Grammar, Flags, Tables, Messages, Workers)
}
USUAL = [name for name in ATTACKS if name != "workers"]  # the others start no Ray
_LONG = 5.0  # minutes from which on a run has time for real workers


def prepared(names: Sequence[str], seed: int, place: Path) -> list[Attack]:
    """The attacks of these names, ready for their trials."""
    made = [ATTACKS[name]() for name in names]
    for attack in made:
        (place / attack.name).mkdir()
        attack.prepare(place / attack.name, seed)
    return made


def torture(
    names: Sequence[str],
    *,
    seed: int = 0,
    trials: int | None = None,
    trial: int | None = None,
    seconds: float | None = None,
    jobs: int = 1,
) -> Tally:
    """Attack in these ways: so many trials of each, or that trial alone, or as many as fit into the time."""
    torch.set_num_threads(1)
    begun = time.monotonic()

    def report(tally: Tally) -> None:
        counts = ", ".join(f"{name} {tally.trials[name]}" for name in names)
        print(f"{time.monotonic() - begun:5.0f} s: {counts}; {len(tally.failures)} failed", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        place = Path(folder).resolve()
        attacks = prepared(names, seed, place)
        (place / "trials").mkdir()
        plans = [Plan(attack, iter([trial] if trial is not None else _numbers(trials))) for attack in attacks]
        return Pool(plans, seed, place / "trials", jobs, loud=trial is not None).run(seconds, report)


def _numbers(trials: int | None) -> range | itertools.count[int]:
    return itertools.count() if trials is None else range(trials)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long trials are begun; by default 5, or until --trials are done")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", help=f"attacks, with commas between them; by default all, workers from {_LONG:g} minutes on"
    )
    parser.add_argument("--trials", type=int, help="at most so many of each attack")
    parser.add_argument("--trial", type=int, help="this one alone, with its traceback")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--every", action="store_true", help="a line for every failure, also where many are alike")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    bounded = options.trials is not None or options.trial is not None
    minutes = options.minutes if options.minutes is not None else None if bounded else _LONG
    usual = USUAL if minutes is None or minutes < _LONG else list(ATTACKS)
    names = usual if options.only is None else options.only.split(",")
    if unknown := set(names) - set(ATTACKS):
        parser.error(f"there is no attack {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    tally = torture(
        names,
        seed=options.seed,
        trials=options.trials,
        trial=options.trial,
        seconds=None if minutes is None else 60 * minutes,
        jobs=options.jobs,
    )
    text = table(tally, names, options.seed, every=options.every)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
