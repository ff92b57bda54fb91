"""The tree shows the architecture: rooms, and imports between them that go down only."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import dualdelay as dd

SOURCE = Path(dd.__file__).parent

# each room may import those of earlier rows, and its own modules; rooms of one row do not know one another
ROOMS = [
    ["core"],
    ["kernels", "algorithms"],
    ["problems"],
    ["engine"],
    ["simulation", "workers"],
    ["batching", "storage"],
    ["runs"],
    ["theory"],
    ["analysis"],
    ["paper"],
    ["cli"],
]
ROW = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module that lies in a room, with its dotted name."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if len(parts) > 1:
            yield ".".join(parts).removesuffix(".__init__"), path


# methods by which a value shows itself to a person: they alone may import a room above their own, when they are called
SHOWING = {"plot", "plot_split", "report", "_repr_html_", "to_csv", "__str__"}


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything in a syntax tree but for the methods by which a value shows itself."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.FunctionDef) and node.name in SHOWING):
            yield node
            yield from nodes(node)


@cache
def imports(path: Path) -> frozenset[str]:
    """What a module imports, by absolute name; of the package by module, wherever in the file the import stands."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["dualdelay", *path.relative_to(SOURCE).parts[:-1]]
            base = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = SOURCE.parent / f"{name}.{alias.name}".replace(".", "/")
                yield f"{name}.{alias.name}" if inner.with_suffix(".py").exists() or inner.is_dir() else name


def test_the_rooms_are_the_folders_and_hardly_anything_lies_outside() -> None:
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ROW)
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_imports_between_rooms_go_down_only() -> None:
    for name, path in modules():
        room = name.split(".")[0]
        for other in imports(path):
            if other.startswith("dualdelay"):
                assert other != "dualdelay", f"{name} imports the package itself"
                target = other.split(".")[1]
                assert target == room or ROW[target] < ROW[room], f"{name} imports {other}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = {f"dualdelay.{name}": path for name, path in modules()}
    reached = {name: {other for other in imports(path) if other in known} for name, path in known.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for other in reached[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in known:
        visit(name, ())


def test_an_algorithm_knows_only_the_core() -> None:
    for name, path in modules():
        if name.startswith("algorithms."):
            ours = {other.split(".")[1] for other in imports(path) if other.startswith("dualdelay.")}
            assert ours <= {"core", "algorithms"}, name


def test_matplotlib_and_cloudpickle_are_imported_in_one_file_each_ray_in_two_and_pickle_in_none() -> None:
    homes = {"matplotlib": {"analysis.figures"}, "cloudpickle": {"runs.processes"}}
    homes["ray"] = {"workers.ray_fleet", "workers.ray_shards"}  # workers, and the shards of a server
    for library, files in {**homes, "pickle": set()}.items():
        users = {name for name, path in modules() if any(other.split(".")[0] == library for other in imports(path))}
        assert users == files


def test_dude_fits_on_a_screen() -> None:
    assert len((SOURCE / "algorithms" / "dude.py").read_text().splitlines()) <= 80


def test_a_machine_with_torch_and_numpy_alone_can_simulate_and_without_ray_it_is_said_how_to_get_it():
    """The kernels for a GPU are not loaded until they are needed."""
    script = """
import sys
allowed_missing = ["safetensors", "pyarrow", "rich", "tyro", "sklearn", "matplotlib", "scipy", "ray"]
for name in allowed_missing:
    sys.modules[name] = None  # any import of it fails
import dualdelay as dd
assert "triton" not in sys.modules and "dualdelay.kernels.convolution" not in sys.modules
run = dd.simulate(dd.DuDe(lr=0.1), dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1.0, 2.0]), updates=50)
assert run.version == 50
import torch
pair = torch.ones(4, 2), torch.ones(4, 1)
problem = dd.Network(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, [pair, pair], 2)
dd.simulate(dd.DuDe(lr=0.1), problem, dd.FixedSpeeds([1.0, 2.0]), updates=5)
assert "torch._dynamo" not in sys.modules  # which takes seconds to import
try:
    dd.train(dd.DuDe(lr=0.1), dd.Quadratic([[0.0]]), updates=1)
except dd.BadInput as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "real workers need Ray, which is not installed: pip install" in done.stdout, done.stderr


def test_public_names_have_docstrings():
    assert sorted(dd.__all__) == sorted(set(dd.__all__))
    for name in dd.__all__:
        thing = getattr(dd, name)
        assert isinstance(thing, dict) or (thing.__doc__ or "").strip(), f"{name} has no docstring"
