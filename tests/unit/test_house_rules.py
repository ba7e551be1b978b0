"""House rules of the whole tree. Each of them is stated in `docs/architecture.md`; a fault names the file to mend."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("server", "workers", "zero_engine")

# What server/ may take from the other packages: torch-free files only.
SERVER_MAY_IMPORT = {
    "workers.built_plan",
    "workers.calibrations",
    "workers.contract",
    "workers.data.errors",
    "workers.model_builder",
    "workers.planner",
    "workers.step_time",
    "workers.object_store",
    "workers.spec",
    "workers.process_table",
    "workers.spool_sender",
    "workers.transformers_folder",
    "zero_engine.config",
    "zero_engine.layout",
    "zero_engine.plan",
    "zero_engine.reshard",
    "zero_engine.manifest",
    "zero_engine.store",
    "zero_engine.catalog",
    "zero_engine.shard",
    "zero_engine.export",
    "zero_engine.compare",
}
RAY_RUNS_IN = {  # in the driver's process, with what of the workers it makes actors of
    "server/controller/ray_cluster.py": {"workers.rank_actor"},
    "server/controller/ray_agents.py": {"workers.agent"},
    "server/controller/ray_calls.py": set[str](),
}
RAY_ONLY_IN = {*RAY_RUNS_IN, "workers/idle_workers.py", "workers/doctor.py"}
ENGINE_MAY_IMPORT = {"torch", "zero_engine"}
ENGINE_FILES_MAY_IMPORT = {"safetensors", "xxhash"}  # the checkpoint files
TORCH_FREE_ENGINE = ("config", "layout", "fold", "blueprint", "plan", "advice", "reshard", "manifest", "store")
TORCH_FREE_ENGINE += ("catalog", "shard", "export", "compare", "tensorfile", "writer", "appender", "fetcher")
TORCH_FREE_ENGINE += ("file_calls", "shard_reader")
SLEEPS_ON_PURPOSE = {"tests/distributed/delayed_comm.py"}  # being late is what it is for
FORBIDDEN_NAMES = re.compile(r"(^|/)_?(utils?|helpers?|common|misc|base|managers?)(\.py|/)")


def tracked(*patterns: str) -> list[str]:
    """Files that git knows, or would add: what a clone of the next commit holds."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({name for name in names if (ROOT / name).is_file()})


@functools.cache
def parsed(name: str) -> ast.Module:
    """The syntax tree of a file, what stands there for the type checker alone left out."""
    tree = ast.parse((ROOT / name).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    return tree


def modules(package: str) -> Iterator[tuple[str, ast.Module]]:
    """(path, syntax tree) of each Python file of a package."""
    for name in tracked(f"{package}/*.py"):
        yield name, parsed(name)


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module in PACKAGES)


def top(name: str) -> str:
    return name.split(".")[0]


def within(name: str, allowed: set[str]) -> bool:
    """Whether a dotted name is one of the allowed modules or stands inside one."""
    return any(name == module or name.startswith(module + ".") for module in allowed)


def test_the_server_imports_only_torch_free_files_of_the_other_packages() -> None:
    """web -> server -> the named files of workers and zero_engine; the arrow ends there."""
    faults = [
        f"{path}: {name}"
        for path, tree in modules("server")
        for name in imports(tree)
        if top(name) in ("workers", "zero_engine") and name not in ("workers", "zero_engine")
        if not within(name, SERVER_MAY_IMPORT)
        if not within(name, RAY_RUNS_IN.get(path, set()))
    ]
    assert not faults


def test_the_server_never_imports_torch() -> None:
    """Owning the truth about jobs needs no tensor."""
    assert not [path for path, tree in modules("server") if any(top(name) == "torch" for name in imports(tree))]


def test_ray_is_imported_only_where_ranks_are_started() -> None:
    """The seam to Ray is `Cluster`; everybody else works without it."""
    users = {path for package in PACKAGES for path, tree in modules(package) if "ray" in map(top, imports(tree))}
    assert users <= RAY_ONLY_IN


def test_workers_never_import_the_server() -> None:
    """A rank's machine need not hold the service."""
    assert not [path for path, tree in modules("workers") if any(top(name) == "server" for name in imports(tree))]


def test_the_engine_runs_on_a_bare_gpu_image() -> None:
    """zero_engine imports torch, its own files and the standard library; safetensors and xxhash for checkpoints."""
    faults = [
        f"{path}: {name}"
        for path, tree in modules("zero_engine")
        for name in imports(tree)
        if top(name) not in ENGINE_MAY_IMPORT | ENGINE_FILES_MAY_IMPORT | set(sys.stdlib_module_names)
    ]
    assert not faults


def test_the_zygote_needs_only_torch_and_the_standard_library() -> None:
    """It is forked from for every launch: nothing may start threads or open connections in it."""
    (tree,) = [tree for path, tree in modules("workers") if path == "workers/zygote.py"]
    others = {name for name in imports(tree) if top(name) not in {"torch", "workers"} | set(sys.stdlib_module_names)}
    assert not others


def test_every_third_party_import_is_a_declared_dependency() -> None:
    """What the packages import, pyproject names; `pip install shardyard` gives all of it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[\[<>=~! ;]", line)[0].lower().replace("-", "_") for line in declared}
    module_of = {"ruamel.yaml": "ruamel", "scikit_learn": "sklearn", "prometheus_client": "prometheus_client"}
    available = {module_of.get(name, name) for name in names} | set(PACKAGES) | set(sys.stdlib_module_names)
    available |= {"click", "starlette", "pydantic_core"}  # parts of typer, fastapi and pydantic that they hand on
    faults = [
        f"{path}: {name}"
        for package in PACKAGES
        for path, tree in modules(package)
        for name in imports(tree)
        if top(name) not in available
    ]
    assert not faults


FRESH = [
    "server.app",
    "server.cli.app",
    "server.serve",
    "workers.contract",
    "workers.spec",
    "workers.planner",
    "workers.built_plan",
    "workers.calibrations",
    "workers.model_builder",
    "workers.object_store",
    "workers.process_table",
    "workers.transformers_folder",
    *(f"zero_engine.{name}" for name in TORCH_FREE_ENGINE),
]


LOOK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *sorted({"torch", "ray", "numpy.testing"} & sys.modules.keys()))
"""


def test_importing_them_in_a_fresh_interpreter_loads_neither_torch_nor_ray() -> None:
    """Imports that stand inside functions of other modules are seen too: the interpreter itself is asked.

    One interpreter imports them one after the other: the first that loads something is the one that does.
    """
    run = subprocess.run([sys.executable, "-c", LOOK, *FRESH], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == FRESH


def test_importing_workers_imports_nothing() -> None:
    """Every rank's process pays for what stands in `workers/__init__`."""
    (tree,) = [tree for path, tree in modules("workers") if path == "workers/__init__.py"]
    assert not list(imports(tree))


def test_no_file_is_a_drawer() -> None:
    """utils, helpers, common: a function without a home is a missing noun."""
    assert not [name for name in tracked() if FORBIDDEN_NAMES.search(name)]


def test_no_error_is_swallowed() -> None:
    """An `except` whose whole body is `pass` hides what happened; say why with contextlib.suppress, or act."""
    faults = [
        f"{name}:{node.lineno}"
        for name in tracked("*.py")
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.ExceptHandler) and all(isinstance(item, ast.Pass) for item in node.body)
    ]
    assert not faults


def test_nothing_is_left_to_do() -> None:
    """A note to self is an issue, not a comment."""
    word = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
    faults = [
        f"{name}:{number}"
        for name in tracked("*.py", "*.ts", "*.tsx", "*.css", "*.toml", "*.yml", "*.yaml", "Makefile", ".ci")
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if word.search(line)
    ]
    assert not faults


def test_every_package_says_what_it_is() -> None:
    """Each `__init__` has a docstring: what the package is, what to read first, what it must not import."""
    faults = [
        name
        for package in PACKAGES
        for name, tree in modules(package)
        if name.endswith("__init__.py") and len(ast.get_docstring(tree) or "") < 40
    ]
    assert not faults


def test_only_db_commits() -> None:
    """One place decides what a transaction is."""
    faults = [
        f"{path}:{node.lineno}"
        for path, tree in modules("server")
        if path != "server/db.py" and not path.startswith("server/migrations/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "commit"
    ]
    assert not faults


def test_no_test_sleeps() -> None:
    """Tests wait for conditions; a sleep is either too short or too long."""
    faults = [
        f"{name}:{number}"
        for name in set(tracked("tests/*.py")) - SLEEPS_ON_PURPOSE
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if re.search(r"\btime\.sleep\((?!0\.0)", line) and "test_house_rules" not in name
    ]
    assert not faults


def test_no_file_names_a_machine_or_a_registry() -> None:
    """A clone works anywhere: no path of the machine it was written on, no host of a package registry."""
    words = [
        "/" + "work/",
        "/" + "tmp/brief",
        "/" + "opt/pypi",
        "/" + "opt/wheels",
        "regist" + "ry.npmjs",
        "py" + "pi.org",
        "pythonhost" + "ed.org",
        "download.py" + "torch.org",
        "deb.deb" + "ian.org",
    ]
    faults = []
    for name in tracked():
        data = (ROOT / name).read_bytes()
        faults += [f"{name}: {word}" for word in words if word.encode() in data]
    assert not faults
