"""Every code block of README and of the pages that needs no GPU runs as it stands.

A block that is none for a shell or for Python is text; all others are run, or are in ``NOT_RUN``
with the reason.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typed_commands import typed

ROOT = Path(__file__).parents[1]
FILES = ROOT / "tests/doc_files"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
IMPORTS = re.compile(r"^(from|import) ")
TITLE = re.compile(r'title="([\w./-]+)"')
WORDS = ("itercast ", "make ", "pip ", "python", "source ", "git ")  # that commands begin with
NOT_RUN = {  # patterns of commands, and why no test runs them here
    r"^make (demo|test)": "minutes; CI runs them",
    r"^(git|pip|source|python3 -m venv)": "tests/test_wheel.py installs the wheel",
    r"^python3 -m itercast\.extras\.campaign|gpu-report|datasets-gpu|bundles/h100": "a GPU",
    r"s3://|postgresql://": "a bucket and a database that nobody has",
    r"^itercast fleet (?!plan.yaml --dry-run)": "a Ray cluster; tests/extras/fleet starts one",
    r"bench-public": "published measurements, which are not in this repository",
    r"^itercast (collect|check|evaluate|demo|ui|import)": "minutes, a server, logs; own tests",
    r"^itercast (train|compare|price|calibrate)": "a minute; tests of their own run them",
    r"sage-papers|dlrm-|ppo-atari --gpu.*--envs|jobs.trace": "minutes of capture; own tests",
}
SLOW = re.compile(
    r"^itercast (plan|explain|input|rl|throughput|run|shard)|gpt2-xl|llama-1b|resnet-50|bert-l"
)


@dataclass(frozen=True)
class Block:
    """A block of a page: its language with what follows it, and its text."""

    page: str
    kind: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, and indented ones that no list holds."""
    kind, lines, listed, blank = None, list[str](), False, True
    for line in [*page.read_text().splitlines(), "end"]:
        if kind is not None and kind != "indented":
            if line.startswith("```"):
                yield Block(page.name, kind, "\n".join(lines))
                kind, lines = None, []
            else:
                lines.append(line)
            continue
        if line.startswith("    ") and (kind or (blank and not listed)):
            kind = "indented"
            lines.append(line[4:])
        elif not line.strip() and kind:
            lines.append("")
        elif line.strip():
            if kind:
                yield Block(page.name, "", "\n".join(lines).rstrip())
                kind, lines = None, []
            listed = bool(re.match(r"[-*] |\d+\. ", line)) or (listed and line.startswith(" "))
            kind = line[3:].strip() if line.startswith("```") else None
        blank = not line.strip()


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[str]:
    """The command lines of a block, without comments; none where it is no block of commands."""
    if block.kind not in ("", "sh") or not block.text.startswith(WORDS):
        return []
    joined = re.sub(r"\\\n\s*", " ", block.text)
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def run_here(block: Block) -> list[str]:
    """Those of them that a test can run here."""
    return [c for c in commands(block) if not any(re.search(reason, c) for reason in NOT_RUN)]


COMMANDS = [command for block in all_blocks() for command in commands(block)]
SHELL = [block for block in all_blocks() if run_here(block)]
PYTHON = [
    b for b in all_blocks() if b.kind in ("", "python") and re.search("^(from|import) ", b.text)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages show, and those that they name and readers have."""
    made = tmp_path_factory.mktemp("pages")
    shutil.copytree(FILES, made, dirs_exist_ok=True)
    (made / "examples").mkdir()
    shutil.copy(ROOT / "examples/train_gpt.py", made / "examples")
    for block in all_blocks():
        if (title := TITLE.search(block.kind)) and "/" not in title[1]:
            (made / title[1]).write_text(block.text + "\n")
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "lengths.txt").write_text("100 200 300 1024")
    for block in all_blocks():  # shown without a name
        if block.kind == "yaml" and block.text.startswith("batch:"):
            (made / "tables.yaml").write_text(block.text)
        if block.kind == "yaml" and block.text.startswith("root:"):
            plan = yaml.safe_load(block.text)
            (made / "plan.yaml").write_text(yaml.safe_dump({**plan, "root": str(made / "rows")}))
    prices = yaml.safe_load((made / "prices.yaml").read_text())
    (made / "prices.yaml").write_text(yaml.safe_dump({**prices, "v100-sxm-16gb": 0.5}))
    return made


CONFIG = {"architectures": ["GPT2LMHeadModel"], "n_layer": 4, "n_embd": 64, "n_head": 8}
CONFIG |= {"vocab_size": 1000, "n_positions": 2048}


def test_every_block_is_text_or_is_run_or_says_why_not() -> None:
    """Each pattern of ``NOT_RUN`` is of a command that is there; there are enough others."""
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line) for line in COMMANDS), pattern
    assert sum(len(run_here(block)) for block in SHELL) >= 40 and len(PYTHON) >= 4
    assert {block.page for block in SHELL} >= {"README.md", "quickstart.md", "howto.md"}


def marked(block: Block) -> Any:
    slow = (pytest.mark.pages,) if any(map(SLOW.search, run_here(block))) else ()
    return pytest.param(block, id=f"{block.page}: {run_here(block)[0][:60]}", marks=slow)


@pytest.mark.parametrize("block", map(marked, SHELL))
def test_the_commands_of_a_block_are_answered(
    block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order: later ones read what earlier ones wrote."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    for command in run_here(block):
        measures = re.match(r"itercast (input|rl) \w+:", command)
        words = shlex.split(f"{command} --budget 2s" if measures else command)[1:]
        done = typed(*words)
        assert done.stdout.strip()


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page}: {block.text[:40]}")
def test_a_python_block_runs(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small model where the page says ``model``; files of their own are only compiled."""
    code = compile(block.text, block.page, "exec")
    if "train:" in block.text or "build_and_parallelise" in block.text:
        pytest.skip("measures for a minute, or needs a process group: own tests")
    monkeypatch.chdir(folder)
    from torch import nn, ones

    names: dict[str, Any] = {"model": nn.Linear(8, 2), "inputs": ones(4, 8)}
    exec(code, {**names, "loss": lambda out: out.sum()})
