"""Pages of the site that are made as it is built: all commands, and the changelog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHIM = "https://unpkg.com/iframe-worker/shim"  # of the theme's plugin ``offline``
KINDS = {"int": "N", "float": "N", "Path": "PATH"}
INTRODUCTION = """# Commands

Made from the code. Exit code 0: fine; 1: failed, or stopped; 2: bad input, in one line on stderr.
Answers go to stdout, progress and warnings to stderr. `--help` says the same in a terminal;
`itercast --install-completion` completes names in a shell.
"""


def on_files(files: Any, config: Any) -> Any:
    """Add both pages, in place of one that stands for it off the site (mkdocs calls this)."""
    from mkdocs.structure.files import File  # only there where the site is built

    for name, text in (("commands.md", commands()), ("changelog.md", changelog())):
        if (stands := files.get_file_from_path(name)) is not None:
            files.remove(stands)
        files.append(File.generated(config, name, content=text))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the script by which pages from disk search from beside the pages, not from a host."""
    from mkdocs.utils import get_relative_url

    return output.replace(SHIM, get_relative_url("search-from-disk.js", page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same of the page for addresses that do not exist."""
    return output_content.replace(SHIM, "search-from-disk.js")


def changelog() -> str:
    """The changelog, with links that hold among the pages."""
    return (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")


def commands() -> str:
    """Every command in its group, with its arguments and options."""
    import typer

    from itercast.command_line import app

    known: Any = typer.main.get_command(app)
    parts, group = [INTRODUCTION], ""
    for name, command in known.commands.items():
        if command.rich_help_panel != group:
            group = command.rich_help_panel
            parts.append(f"## {group}\n")
        parts.append(_command(name, command))
    return "\n".join(parts)


def _command(name: str, command: Any) -> str:
    """The text for a command: what it does, how it is called, a table of its options."""
    shown = [param for param in command.params if param.name != "help" and not param.hidden]
    given = [param for param in shown if param.param_type_name == "argument"]
    words = " ".join(_metavar(param) for param in given)
    rows = ["| argument or option | default | meaning |", "| --- | --- | --- |"]
    rows += [f"| {_name(param)} | {_default(param)} | {_cell(param.help)} |" for param in shown]
    call = f"    itercast {name} {words} [OPTIONS]".replace("  [", " [")
    return "\n".join([f"### {name}\n", command.help.strip(), "", call, "", *rows, ""])


def _metavar(param: Any) -> str:
    text = param.metavar or param.name.upper()
    return text if param.required or text.startswith("[") else f"[{text}]"


def _name(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{_metavar(param)}`".replace("|", "\\|")
    kind = getattr(param.type_descriptor.annotation, "__name__", "text")
    value = "" if param.is_flag else f" {param.metavar or KINDS.get(kind, 'TEXT')}"
    return ", ".join(f"`{option}{value}`" for option in param.opts).replace("|", "\\|")


def _default(param: Any) -> str:
    value = param.default
    plain = isinstance(value, int | float | str | Path) and not isinstance(value, bool)
    return f"`{value}`" if plain and str(value) else ""


def _cell(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|")
