import ast
import subprocess
import sys
from pathlib import Path

import dualdelay as dd

SOURCE = Path(dd.__file__).parent

# imports go to the left only; parts of one layer do not know one another
LAYERS = [
    {"errors"},
    {"draws", "state", "devices", "compression", "together", "columns", "links", "environment", "output"},
    {"core", "memory"},
    {"trace", "speeds", "algorithms", "problems", "ray_fleet", "security", "messages", "gradients", "progress"},
    {"clocks", "delays", "evaluation", "cores", "naming", "paces", "showing"},
    {"fleet", "availability"},
    {"local_fleet", "worker", "desk"},
    {"loop", "post"},
    {"replicas"},
    {"sharing"},
    {"staff", "monitor"},
    {"crew"},
    {"files", "config", "locks"},
    {"result", "optimizer", "grid", "downloads"},
    {"folder"},
    {"drive"},
    {"setup"},
    {"plan"},
    {"recorded"},
    {"run", "groups"},
    {"theory"},
    {"advice"},
    {"portions"},
    {"sweep"},
    {"comparison"},
    {"reports", "figures", "loggers", "options"},
    {"shell"},
    {"paper", "advise"},
    {"cli"},
]
KNOWN = (
    "core",
    "draws",
    "errors",
    "state",
    "memory",
    "compression",
    "algorithms.dude",
    "algorithms.uniform",
    "algorithms.siag",
)
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name not in ("__main__.py",) and path != SOURCE / "__init__.py":
            yield path.relative_to(SOURCE).parts[0].removesuffix(".py"), path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["dualdelay", *path.relative_to(SOURCE).parts[:-1]]
            base = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names) if name == "dualdelay" else (name,)


def test_imports_go_down_only():
    seen = set()
    for module, path in modules():
        seen.add(module)
        for name in imports(path):
            other = name.split(".")[1] if name.startswith("dualdelay.") else None
            if other is None or other == module or other == "__version__":
                continue
            assert LEVEL[other] < LEVEL[module], f"{module} imports {other}"
    assert seen == set(LEVEL)


def test_algorithms_know_only_the_core():
    for path in (SOURCE / "algorithms").glob("[a-z]*.py"):
        ours = {name for name in imports(path) if name.startswith("dualdelay.")}
        assert ours <= {f"dualdelay.{name}" for name in KNOWN}, path.name


def test_matplotlib_and_ray_are_imported_in_one_file_each_and_pickle_in_none():
    for library, file in (("matplotlib", "figures.py"), ("ray", "post.py")):
        users = {path.name for _, path in modules() if any(name.split(".")[0] == library for name in imports(path))}
        assert users == {file}
    assert not [path for _, path in modules() if any(name.split(".")[0] == "pickle" for name in imports(path))]


def test_a_method_fits_on_a_screen():
    algorithms = {path.name: len(path.read_text().splitlines()) for path in (SOURCE / "algorithms").glob("[a-z]*.py")}
    assert max(algorithms.values()) <= 80


def test_a_machine_with_torch_and_numpy_alone_can_simulate_and_without_ray_it_is_said_how_to_get_it():
    """The kernels for a GPU are not loaded until they are needed."""
    script = """
import sys
allowed_missing = ["safetensors", "pyarrow", "rich", "tyro", "sklearn", "matplotlib", "scipy", "ray"]
for name in allowed_missing:
    sys.modules[name] = None  # any import of it fails
import dualdelay as dd
assert "triton" not in sys.modules and "dualdelay.problems.convolution" not in sys.modules
run = dd.simulate(dd.DuDe(lr=0.1), dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1.0, 2.0]), updates=50)
assert run.version == 50
try:
    dd.train(dd.DuDe(lr=0.1), dd.Quadratic([[0.0]]), updates=1)
except dd.BadInput as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "real workers need Ray, which is not installed: pip install" in done.stdout, done.stderr


def test_public_names_are_documented_and_listed():
    assert sorted(dd.__all__) == sorted(set(dd.__all__))
    reference = (SOURCE.parents[1] / "docs" / "reference.md").read_text()
    for name in dd.__all__:
        thing = getattr(dd, name)
        assert isinstance(thing, dict) or (thing.__doc__ or "").strip(), f"{name} has no docstring"
        assert f"`{name}`" in reference or f"`{name}(" in reference, f"docs/reference.md does not mention {name}"
