"""A rank as a fork of the zygote: where its output goes, and how it ended. No torch, no pydantic, as its actor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workers.forked_process import ExitStatus, ForkedProcess

OUTPUT_FILE = "output.log"  # contract.OUTPUT_FILE; a test compares them
RESULT_FILE = "result.json"  # contract.RESULT_FILE
SPOOL_FILE = "spool.jsonl"  # contract.SPOOL_FILE


def fork_rank(
    zygote: str, order: Path, mark: Mapping[str, str], environment: Mapping[str, str], listener: int | None
) -> ForkedProcess:
    """A rank for this order file; its output goes to OUTPUT_FILE beside it. Raises ZygoteGone."""
    output = os.open(order.parent / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return ForkedProcess.fork(zygote, order, mark, environment, output, listener)
    finally:
        os.close(output)


def conclude(folder: Path, status: ExitStatus) -> dict[str, Any]:
    """How the rank in this folder ended, as a ResultRecord.

    The rank's own file decides; exit code, signal and peak memory are added from the zygote. No file means that it
    died: by the signal named, or, when the zygote was gone too, by one that nobody saw.
    """
    path = folder / RESULT_FILE
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        result = {"kind": "result", "at": datetime.now(UTC).isoformat(), "outcome": "died"}
    for name in ("exit_code", "signal", "peak_rss"):
        value = getattr(status, name)
        if value is not None and result.get(name) is None:
            result[name] = value
    if result["outcome"] == "died" and result.get("exit_code") is None and result.get("signal") is None:
        result["signal"] = int(signal.SIGKILL)
    return dict(result)


def end_of(folder: Path, status: ExitStatus) -> dict[str, Any]:
    """`conclude`, kept in RESULT_FILE; a death goes the way of the rank's own records too, since nobody else says so.

    A disk that takes nothing any more does not hide the end.
    """
    result = conclude(folder, status)
    with contextlib.suppress(OSError):
        write_atomically(folder / RESULT_FILE, json.dumps(result))
        if result["outcome"] == "died":
            with (folder / SPOOL_FILE).open("a") as spool:
                spool.write("\n" + json.dumps(result) + "\n")
    return result


def write_atomically(path: Path, text: str) -> None:
    """Replace a small private file as a whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
