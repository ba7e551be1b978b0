"""Writes the pages that are made from the code: `make docs`. With --check it writes nothing and names stale pages.

Add a page here when its content can be derived; `tests/unit/test_house_rules_pages.py` holds every one of them current.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EVERYWHERE = ("help", "as_json", "server", "token")  # options that the page explains once
NOTE = "<!-- Made by `make docs` from the code; edit there. -->"


def command_line_page() -> str:
    """`docs/cli.md`: every command with its arguments and options."""
    import typer.main

    from server.cli.app import app

    lines = [
        NOTE,
        "",
        "# Command line",
        "",
        "Tables become JSON with `--json` or when piped. Exit codes: 0 done, 1 it was tried and failed (so does a",
        "followed job that did not succeed), 2 bad input, 130 interrupted. `--server` and `--token` (or",
        "SHARDYARD_SERVER and SHARDYARD_TOKEN) name a server elsewhere; without them a command finds the server of the",
        "data folder.",
        "",
    ]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        lines += [f"## shardyard {name}", "", command.help.strip(), ""]
        rows = [_option_row(parameter) for parameter in command.params if parameter.name not in EVERYWHERE]
        if rows:
            lines += ["| argument or option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines).rstrip() + "\n"


def _option_row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        name = ", ".join(parameter.opts) + value
    text = (parameter.help or "").replace("|", "\\|")
    default = parameter.default
    if not parameter.required and default not in (None, False, [], ()) and not callable(default):
        text = f"{text} Default: {default}."
    return f"| `{name}` | {text.strip()} |"


def settings_page() -> str:
    """`docs/settings.md`: every setting, its variable and its default, from `server/settings.py`."""
    from server.settings import PREFIX, Settings

    comments = _comments(inspect.getsource(Settings))
    lines = [
        NOTE,
        "",
        "# Settings",
        "",
        "Each is a variable in the environment of `shardyard serve`; those that are options of `serve` may be given",
        "there too, and the command line wins.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for field in fields(Settings):
        default = "the number of cores, at least 4" if field.name == "cpu_slots_per_node" else _shown(field.default)
        lines.append(f"| `{PREFIX}{field.name.upper()}` | {default} | {comments.get(field.name, '')} |")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return "" if value in ("", None, ()) else f"`{value}`"


def _comments(source: str) -> dict[str, str]:
    found = re.findall(r"^    (\w+): [^\n]*?  # (.+)$", source, re.MULTILINE)
    return {name: text.replace("|", "\\|") for name, text in found}


def job_spec_page() -> str:
    """`docs/job-spec.md`: every field of a spec, from its models."""
    from workers.spec.reference import reference

    return reference()


def engine_api_page() -> str:
    """`docs/engine_api.md`: every public name of the engine."""
    from engine_reference import engine_page

    return f"{NOTE}\n\n{engine_page()}"


def openapi_document() -> str:
    """`web/openapi.json`, from which `npm run generate` makes the dashboard's types."""
    from server.openapi import text

    return text()


PAGES: dict[str, Callable[[], str]] = {
    "docs/cli.md": command_line_page,
    "docs/engine_api.md": engine_api_page,
    "docs/job-spec.md": job_spec_page,
    "docs/settings.md": settings_page,
    "web/openapi.json": openapi_document,
}


def current_text(page: str) -> str:
    """What a page should hold now."""
    return PAGES[page]()


def main(arguments: list[str]) -> int:
    """Write every page, or with --check report the stale ones and return 1."""
    stale = [page for page in PAGES if not _is_current(page)]
    if "--check" in arguments:
        for page in stale:
            print(f"{page} is not current: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for page in stale:
        (ROOT / page).write_text(current_text(page))
        print(f"wrote {page}")
    return 0


def _is_current(page: str) -> bool:
    path = ROOT / page
    return path.is_file() and path.read_text() == current_text(page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
