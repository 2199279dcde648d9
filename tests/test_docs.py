"""Documentation names only modules, files, commands and options that exist; its examples run."""

import ast
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer
import yaml
from browser import browser
from typed_commands import typed
from typer.testing import CliRunner

from itercast.anchors import BESIDE, TIMES
from itercast.capture.base.assumptions import all_assumptions
from itercast.capture.plan import ParallelPlan
from itercast.command_line import app
from itercast.compose.machines.factors import NAMES
from itercast.compose.machines.file import KEYS
from itercast.compose.machines.typical import REST
from itercast.extras.campaign.stages import PLANS
from itercast.extras.nccl import nccl_tests
from itercast.learners.bundle import SCHEMA_VERSION, SHIPPED
from itercast.microbench.hardware.host import HostMachine
from itercast.microbench.hardware.node import Node
from itercast.microbench.hardware.spec import Gpu

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PACKAGES = ("capture", "microbench", "learners", "compose", "eval", "itercast", "extras")
FOLDERS = (*PACKAGES, "tests", "docs", "examples", "datasets")
COMMANDS = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
EXAMPLE = re.compile(r'^```python title="([^"]+)"\n(.*?)^```', re.M | re.S)


def spans(page: Path) -> Iterator[str]:
    """Text between backticks, and the lines of code blocks."""
    text = EXAMPLE.sub("", page.read_text())
    for block in re.findall(r"^```.*?\n(.*?)^```|((?:^    \S.*\n)+)", text, re.M | re.S):
        yield from (line.strip() for part in block for line in part.splitlines())
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def examples() -> dict[str, str]:
    """Files shown in full in extending.md."""
    return dict(EXAMPLE.findall((ROOT / "docs/extending.md").read_text()))


def resolves(name: str) -> bool:
    """Whether a dotted name is a module of ours, or a name that one defines."""
    parts = name.split(".")
    parts = parts[1:] if len(parts) > 1 and parts[1] in PACKAGES else parts
    for cut in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:cut])
        module = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path
        if module.is_dir():
            module = module / "__init__.py"
        if module.is_file():
            return cut == len(parts) or (
                cut == len(parts) - 1 and parts[-1] in defined(ast.parse(module.read_text()))
            )
    return False


def defined(tree: ast.Module) -> set[str]:
    """Names at the top of a module: classes, functions, values."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def wrong_command(text: str) -> str:
    """What is wrong with a command line; empty where it is right, or none of ours."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return ""
    if words[:1] == ["make"] and len(words) > 1:
        return "" if words[1] in TARGETS else f"no target {words[1]}"
    if len(words) > 2 and words[0] in ("python", "python3") and words[1] == "-m":
        words = words[2:]
        if words[0] in ("pytest", "venv"):
            return ""
        return "" if resolves(words[0]) else f"no module {words[0]}"
    if words[:1] != ["itercast"] or len(words) < 2:
        return ""
    known: dict[str, click.Command] = COMMANDS.commands  # type: ignore[attr-defined]
    command: Any = COMMANDS if words[1].startswith("-") else known.get(words[1])
    if words[1].isupper() or words[1] == "<command>":
        return ""
    if command is None:
        return f"no command {words[1]}"
    allowed = {"--help", *(name for p in command.params for name in p.opts)}
    own = takewhile(lambda word: not word.endswith(".py"), words[1:])  # others are a script's
    options = [w for w in own if w.startswith("--")]
    return next((f"no option {w}" for w in options if w not in allowed), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_on_a_page_exist(page: Path) -> None:
    """Paths of the repository, dotted names of modules and what they define, commands."""
    shown = examples()
    for text in spans(page):
        if re.fullmatch(r"[\w./-]+/[\w./-]*", text) and text.split("/")[0] in FOLDERS:
            assert text in shown or (ROOT / text).exists(), (page.name, text)
        if re.fullmatch(r"\w+(\.\w+)+", text) and text.split(".")[0] in PACKAGES:
            assert resolves(text), (page.name, text)
        assert not wrong_command(text), (page.name, text, wrong_command(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_are_in_the_file_that_is_stated(page: Path) -> None:
    """Written as `name` in `folder/file.py`."""
    for name, path in re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", page.read_text()):
        assert name in defined(ast.parse((ROOT / path).read_text())), (page.name, name, path)


def headings(page: Path) -> set[str]:
    """The headings of a page as forges and the site write them behind ``#``."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"^#+ +(.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", one.lower()).strip().replace(" ", "-") for one in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_a_reader_of_the_repository_finds(page: Path) -> None:
    """Not pages that only a built site has."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)", text):
        name, _, heading = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), (page.name, link)
        assert not heading or heading in headings(target), (page.name, link)


OWN_OPTIONS = ("anchor", "bundle", "case", "engine", "host", "machine", "node", "plan", "stack")


@pytest.mark.parametrize("word", OWN_OPTIONS)
def test_what_options_name_is_in_the_glossary(word: str) -> None:
    """In the sense of the option, which is named there or whose class is."""
    text = (ROOT / "docs/glossary.md").read_text().lower()
    entries = dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, re.M))
    assert f"`--{word}`" in text or word in entries or f"{word} file" in entries, word
    assert "`--anchor" in entries["anchor"]


def pages_of(entries: Any) -> Iterator[str]:
    """The pages below entries of the navigation."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, list):
                yield from pages_of(value)
            else:
                yield value


def test_every_page_is_in_the_navigation() -> None:
    """In groups; the changelog is copied as the site is built."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    files = {p.relative_to(ROOT / "docs").as_posix() for p in ROOT.glob("docs/**/*.md")}
    assert {*pages_of(nav)} == files | {"changelog.md"}
    assert all(isinstance(value, list) for group in nav for value in group.values())


def test_the_command_reference_has_every_command_and_option() -> None:
    page = runpy.run_path(str(ROOT / "docs/generated.py"))
    text: str = page["commands"]()
    known: dict[str, click.Command] = COMMANDS.commands  # type: ignore[attr-defined]
    for name, command in known.items():
        section = text.split(f"### {name}\n")[1].split("\n### ")[0]
        options = [opt for param in command.params for opt in param.opts if opt.startswith("--")]
        assert all(f"`{option}" in section for option in options if option != "--help"), name
    assert "](docs/" not in page["changelog"]() and "## 0.15.0" in page["changelog"]()


def test_every_field_of_a_format_is_described() -> None:
    text = (ROOT / "docs/formats.md").read_text()
    others = (
        "name virtual overlap imbalance recomputed shard_group cached halo sends sampled"  # parts
    )
    names = {f.name for kind in (Gpu, Node, ParallelPlan) for f in fields(kind)}
    missing = [n for n in sorted(names - {*others.split(), "more"}) if f"`{n}`" not in text]
    assert not missing
    assert f"`schema_version` ({SCHEMA_VERSION})" in text
    keys = {
        "Measured steps": (*TIMES, *BESIDE, "source"),
        "Machine file": (*KEYS, *NAMES, *REST),
        "Host file": {f.name for f in fields(HostMachine)} - {"name"},
        "Logs of nccl-tests": re.findall(r'stated\.get\("(\w+)"', inspect.getsource(nccl_tests)),
    }
    for title, of_file in keys.items():
        section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
        assert [name for name in of_file if f"`{name}`" not in section] == [], title


def test_the_campaigns_stages_are_stated() -> None:
    text = (ROOT / "docs/gpu-campaign.md").read_text()
    for plan, stages in PLANS.items():
        times = ", ".join(f"{stage.name} {stage.seconds:g}" for stage in stages)
        assert f"| `{plan}` | {times} |" in text


def test_sources_that_numbers_were_fitted_on_are_stated() -> None:
    """Errors on these sources are not blind."""
    text = " ".join((ROOT / "docs/accuracy-published.md").read_text().split())
    for one in all_assumptions(ROOT):
        for source in one.fitted_on:
            assert source.removeprefix("datasets of ") in text, (one.module, one.name, source)


def load(name: str, folder: Path) -> ModuleType:
    """A file shown in extending.md as a module."""
    path = folder / Path(name).name
    path.write_text(examples()[name])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", ["fft.py", "bucket.py"])
def test_what_is_shown_is_what_the_example_package_adds(file: str) -> None:
    """``tests/test_own_package.py`` installs and uses it."""
    name = f"examples/own-package/itercast_fft/{file}"
    assert examples()[name] == (ROOT / name).read_text()


def test_the_importer_shown_counts_what_it_leaves_out(tmp_path: Path) -> None:
    mylab = load("extras/published/sources/mylab.py", tmp_path)
    (tmp_path / "h100.csv").write_text("M,N,K,ms\n128,128,128,0.02\n5,x,2,0.1\n")
    found = mylab.read(tmp_path)
    assert found.rows["gemm"]["time_us"].tolist() == [20.0]
    assert found.dropped == {"n is not a positive whole number": 1}


GPT2 = "predict gpt2-small --gpu h100-sxm-80gb --dtype bf16 --plan"
LENGTHS = f"{GPT2} dp=8 --lengths lognormal:300:0.8"
PRINTED: list[tuple[str, str, Callable[[Any], str]]] = [
    (
        "spread.md",
        f"{GPT2} dp=64 --spread",
        lambda found: (
            f"forecast of {found['iteration_us'] / 1e3:.2f} ms, `slowest of 64 ranks`: "
            f"median {found['spread']['median_us'] / 1e3:.2f} ms"
        ),
    ),
    ("lengths.md", LENGTHS, lambda found: f"{found['tokens_per_s'] / 1e6:.2f} million tokens/s"),
    ("lengths.md", f"{LENGTHS} --packed", lambda found: f" {found['tokens_per_s'] / 1e6:.2f}\n"),
]


@pytest.mark.parametrize(("page", "words", "told"), PRINTED)
def test_forecasts_on_a_page_are_printed_there(
    page: str, words: str, told: Callable[[Any], str]
) -> None:
    """By the shipped models; several learnings old, they were 7 % off."""
    done = CliRunner().invoke(app, [*words.split(), "--bundle", str(SHIPPED), "--json"])
    assert told(json.loads(done.stdout)) in (ROOT / "docs" / page).read_text()


def test_versions_agree() -> None:
    """The changelog's newest version is the package's; ``--version`` prints the installed one."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == version
    shown = typed("--version")
    assert re.fullmatch(r"itercast \d+\.\d+\.\d+\n", shown.output)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, where the extra ``docs`` is installed; else the folder in ITERCAST_SITE."""
    if built := os.environ.get("ITERCAST_SITE"):
        return Path(built)
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    """A diagram in mermaid would load its library."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(
            r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="(https?:[^"]*)"', text
        )
        assert not loaded and 'class="mermaid"' not in text, (page, loaded)


@pytest.mark.slow
def test_pages_opened_from_disk_are_searched(site: Path, tmp_path: Path) -> None:
    """A word of the how-tos finds them, in a real browser, without a server."""
    with browser(tmp_path) as driver:
        driver.get((site / "index.html").as_uri())
        typed = "const box = document.querySelector('.md-search__input');"
        typed += "box.focus(); box.value = arguments[0]; box.dispatchEvent(new Event('keyup'))"
        driver.execute_script(typed, "Which GPU")
        found = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        end = time.monotonic() + 20
        while not (links := driver.execute_script(found)) and time.monotonic() < end:
            time.sleep(0.2)
    assert any("howto.html" in link for link in links)
