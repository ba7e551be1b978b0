"""`doctor`: tries what Shardyard needs of this machine and says how to mend what fails.

The server's needs are checked here; those of training, with torch and Ray, by `python -m workers.doctor`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli.connection import AsJson, DataDir
from server.cli.errors import FAILED, BadInput
from server.cli.output import Output, bytes_text, plain
from server.settings import FIRST_PORT, SettingError, Settings, read_settings

Finding = Mapping[str, Any]  # as `workers.doctor.Finding`: name, status, detail, remedy

TRAINING_SECONDS = 120.0
LEAST_FREE_BYTES = 2 * 2**30
LEAST_MEMORY_BYTES = 2 * 2**30  # the service with its Ray head and two small ranks
MARKS = {"ok": ("ok", "green"), "warn": ("note", "yellow"), "fail": ("FAIL", "bold red")}


def doctor(
    data_dir: DataDir = None,
    database_url: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    store_url: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this check; may be given again.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check Python, torch, Ray, ports, disk, database, store and more; exit code 1 when something has to be mended."""
    try:
        settings = read_settings({"data_dir": data_dir, "database_url": database_url, "store_url": store_url})
    except SettingError as error:
        raise BadInput(str(error)) from error
    output = Output(as_json)
    findings = list(_shown(output, _findings(settings, only)))
    if not findings:
        raise BadInput(f"There is no check {', '.join(only or [])!r}.")
    if output.as_json:
        print(json.dumps(findings, ensure_ascii=False, indent=2))
    if any(finding["status"] == "fail" for finding in findings):
        raise typer.Exit(FAILED)


def _findings(settings: Settings, only: list[str] | None) -> Iterator[Finding]:
    for name, check in CHECKS.items():
        if not only or name in only:
            yield _tried(name, check, settings)
    if not only or not set(only) <= set(CHECKS):
        yield from (finding for finding in training_findings() if not only or finding["name"] in only)


def _shown(output: Output, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Hand the findings on, each drawn as soon as it is there."""
    from rich.text import Text

    for finding in findings:
        if not output.as_json:
            mark, style = MARKS[finding["status"]]
            line = Text.assemble((f"{mark:<5}", style), (f"{finding['name']:<10}", "bold"), plain(finding["detail"]))
            output.draw(line)
            if finding["remedy"]:
                output.say(f"{'':15}-> {plain(finding['remedy'])}")
        yield finding


def _tried(name: str, check: Callable[[Settings], Finding], settings: Settings) -> Finding:
    try:
        return check(settings)
    except Exception as error:
        return _found(name, "fail", f"{type(error).__name__}: {error}", "see the message")


def _found(name: str, status: str, detail: str, remedy: str = "") -> Finding:
    return {"name": name, "status": status, "detail": detail, "remedy": remedy}


def training_findings() -> list[Finding]:
    """What `python -m workers.doctor` says, or that it said nothing."""
    command = [sys.executable, "-P", "-m", "workers.doctor"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TRAINING_SECONDS)
    except subprocess.TimeoutExpired:
        remedy = "a GPU driver or a network mount that hangs? try: " + " ".join(command[1:])
        return [_found("training", "fail", f"no answer in {TRAINING_SECONDS:.0f} s", remedy)]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode != 0:
        found.append(_found("training", "fail", run.stderr.strip()[-500:], "the process of the checks died"))
    return found


def check_folder(settings: Settings) -> Finding:
    """The data folder can be written, by nobody else read, and has room."""
    folder = settings.data_dir
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return _found("folder", "fail", f"{existing} cannot be written", "mend its owner, or give --data-dir")
    free = shutil.disk_usage(existing).free
    detail = f"{folder}, {bytes_text(free)} free"
    if free < LEAST_FREE_BYTES:
        return _found("folder", "warn", detail, "checkpoints need room: free some, or give --store-url")
    return _found("folder", "ok", detail if folder.exists() else f"{detail}; made at first start")


def check_memory(_: Settings) -> Finding:
    """There is memory for the service and small ranks."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    detail = f"{bytes_text(available)} available, {os.cpu_count()} cores"
    if available < LEAST_MEMORY_BYTES:
        return _found("memory", "warn", detail, "the service takes about 1.8 GiB; end something else")
    return _found("memory", "ok", detail)


def check_ports(settings: Settings) -> Finding:
    """The server's port is ours, or one is free."""
    if settings.port_file.is_file():
        return _found("ports", "ok", f"a server of this folder is at port {settings.port_file.read_text().strip()}")
    wanted = [settings.port] if settings.port else list(range(FIRST_PORT, FIRST_PORT + 20))
    for port in wanted:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return _found("ports", "ok", f"port {port} is free")
    return _found("ports", "fail", f"ports {wanted[0]} to {wanted[-1]} are in use", "give another one: serve --port")


def check_database(settings: Settings) -> Finding:
    """The database answers."""
    from server.migrations import current

    shown = _without_password(settings.database)
    path = settings.data_dir / "shardyard.db"
    if not settings.database_url and not path.exists():
        return _found("database", "ok", f"SQLite at {path}; made at first start")
    try:
        revision = current(settings.database)
    except Exception as error:
        remedy = "is it running, and are user, password and name right? the URL is --database-url"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return _found("database", "fail", f"{shown}: {_without_password(reason)}", remedy)
    return _found("database", "ok", f"{shown}, schema {revision or 'made at first start'}")


def _without_password(text: str) -> str:
    """A database URL, or a text with one, fit to be shown."""
    return re.sub(r"(://[^:/@\s]+):[^@\s]+@", r"\1:***@", text)


def check_store(settings: Settings) -> Finding:
    """A small object can be put, read and removed where checkpoints go."""
    from workers.object_store import open_store

    if "://" not in settings.store and not Path(settings.store).exists():
        return _found("store", "ok", f"{settings.store}; made at first start")
    store = open_store(settings.store)
    key, data = f"doctor-{uuid.uuid4().hex}/probe", b"Is anybody there?"
    try:
        store.put(key, data)
        same = store.get(key) == data
        store.delete(key)
    except Exception as error:
        remedy = "may this user write there, and are the store's credentials in the environment?"
        return _found("store", "fail", f"{store.url}: {error}", remedy)
    if not same:
        return _found("store", "fail", f"{store.url} gave back other bytes than were put", "do not use this store")
    return _found("store", "ok", f"{store.url}: put, read and removed an object")


def check_pages(_: Settings) -> Finding:
    """The built dashboard is part of this installation."""
    from server.routes.pages import STATIC

    if (STATIC / "index.html").is_file():
        return _found("dashboard", "ok", "built")
    return _found("dashboard", "fail", f"{STATIC} holds no pages", "in a checkout: make web")


CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "folder": check_folder,
    "memory": check_memory,
    "ports": check_ports,
    "database": check_database,
    "store": check_store,
    "dashboard": check_pages,
}
