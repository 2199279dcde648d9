"""The layout holds: packages and their rooms import one way, small rooms, datasets without code."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("capture", "microbench", "learners", "compose", "eval", "itercast", "extras")
ROOMS = {  # "." are the package's own files; each may import those before it
    package: tuple("" if room == "." else room for room in rooms.split())
    for package, rooms in (
        ("capture", "base . recorder input programs cases"),
        ("microbench", "hardware . ops timing processes sweep iterations"),
        ("learners", "features models transfer ."),
        ("compose", "graph machines parallel pricing simulate . plan_search programs"),
        ("eval", "tracking ."),
        ("itercast", ". commands"),
        ("extras", ". anchors optimizers checkpoints roots imports pages lengths lookups"
                   " kineto trace calibration campaign measured_plans benchmarks clusters"
                   " drift explain explore fleet graphs images input kinds nccl noise priced"
                   " published recommenders rl schedulers ui"),
    )
}  # fmt: skip
FILES_IN_A_ROOM = 14
LINES_OF_A_FILE = 400


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name, without the common ``itercast.``."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def without_prefix(name: str) -> str:
    """``itercast.compose.x`` as ``compose.x``; the face's own modules keep their name."""
    _, _, rest = name.partition(".")
    return rest if rest.split(".")[0] in PACKAGES else name


@cache
def imported(path: Path) -> set[str]:
    """Dotted names of all that a file imports, wherever in it, functions as well as modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {without_prefix(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {without_prefix(f"{node.module}.{alias.name}") for alias in node.names}
    return found


def modules_imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Our own modules among them."""
    found = imported(path)
    return (found | {name.rpartition(".")[0] for name in found}) & known.keys()


def room(module: str, path: Path) -> str:
    """The room of a module within its package; "" for the package's own files."""
    parts = module.split(".")
    inside = len(parts) > 2 or (len(parts) == 2 and path.name == "__init__.py")
    return parts[1] if inside else ""


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way_only(package: str) -> None:
    """capture <- microbench <- learners <- compose <- eval <- itercast <- extras."""
    later = set(PACKAGES[PACKAGES.index(package) + 1 :])
    for path in (ROOT / package).rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & later, path


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_one_way_only(package: str) -> None:
    """In the order of ``ROOMS``; the start of the command line collects the commands."""
    known, order = modules(), ROOMS[package]
    assert {room(m, p) for m, p in known.items() if m.split(".")[0] == package} <= set(order)
    for module, path in known.items():
        if module.split(".")[0] != package or path.name in ("__main__.py", "command_line.py"):
            continue
        own = order.index(room(module, path))
        for other in modules_imported(path, known):
            if other.startswith(f"{package}."):
                assert order.index(room(other, known[other])) <= own, (module, other)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Take away modules that import none of the rest until nothing is left."""
    known = modules()
    left = {name: modules_imported(path, known) - {name} for name, path in known.items()}
    while leaves := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in leaves}
    assert not left, sorted(left)


def strings(path: Path) -> set[str]:
    """Lines of a file's strings that are no docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    texts = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docstrings)
    return {line for n in texts if isinstance(n.value, str) for line in n.value.splitlines()}


def test_no_code_is_run_from_strings() -> None:
    """Imports in such code would be hidden from the tests above."""
    for path in modules().values():
        for line in strings(path):
            words = line.split()
            if len(words) > 1 and words[0] in ("from", "import"):
                assert words[1].split(".")[0] != "itercast", (path, line)


def test_rooms_are_small() -> None:
    """So many files side by side at most, and so many lines in a file."""
    known = modules()
    for folder, count in Counter(path.parent for path in known.values()).items():
        assert count <= FILES_IN_A_ROOM, (folder, count)
    for path in known.values():
        assert len(path.read_text().splitlines()) <= LINES_OF_A_FILE, path


def test_only_tracking_and_the_ui_import_mlflow_and_no_data_is_pickled() -> None:
    """predict must not pay for MLflow; data files are never executed.

    What a script saves it loads in the same forecast, and results of its models are copied there:
    no file of another one is unpickled.
    """
    for path in modules().values():
        found = {name.split(".")[0] for name in imported(path)}
        assert "mlflow" not in found or path.parent.name in ("tracking", "ui"), path
        assert "pickle" not in found or path.stem in ("saved", "forms"), path


def test_datasets_hold_no_python() -> None:
    """With an __init__.py it would shadow Hugging Face's datasets package."""
    assert not list((ROOT / "datasets").rglob("*.py"))
