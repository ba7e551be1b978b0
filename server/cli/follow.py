"""Watching one job to its end: a progress bar on a terminal, one JSON object per change elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from server.cli.client import Json
from server.cli.connection import Session
from server.cli.errors import FAILED, ServerUnreachable
from server.cli.output import STATUS_STYLE, counted_in, number_text, plain, seconds_text, short_id

ENDED = ("succeeded", "failed", "cancelled", "paused", "deleting", "delete_failed")
WATCHED = ("id", "name", "status", "step", "steps", "loss", "tokens_per_second", "eta_seconds", "attempt", "digest")
INTERRUPTED = 130


def follow(session: Session, job_id: str) -> None:
    """Show the job until it rests. Exits 1 when it rests anywhere but in `succeeded`.

    Ctrl-C leaves the job alone, says so and exits 130.
    """
    show = _as_bar if session.output.terminal and not session.output.as_json else _as_lines
    try:
        job = show(session, job_id)
    except KeyboardInterrupt:
        session.output.say(f"The job goes on. `shardyard watch {short_id(job_id)}` shows it again.")
        raise typer.Exit(INTERRUPTED) from None
    if job["status"] != "succeeded":
        raise typer.Exit(FAILED)


def wait_for(session: Session, job_id: str, done: Callable[[Json], bool]) -> Json:
    """The job once `done` holds for it; a server that restarts meanwhile is waited for, as `Client.changes` says."""
    for _ in session.client.changes(job_id):
        try:
            job: Json = session.client.get(f"/v1/jobs/{job_id}")
        except ServerUnreachable:
            continue
        if done(job):
            return job
    raise AssertionError("changes() never ends")


def is_at_rest(job: Json) -> bool:
    """No rank runs and nothing will start by itself; a job that waits for the next `serve` is not at rest."""
    reason = job["reason"] or {}
    return job["status"] in ENDED and reason.get("code") != "server_stopped"


def _as_lines(session: Session, job_id: str) -> Json:
    last: dict[str, Any] = {}

    def seen(job: Json) -> bool:
        nonlocal last
        shown = {name: job.get(name) for name in WATCHED} | {"reason": job.get("reason")}
        if shown != last:
            session.output.line(shown)
        last = shown
        return is_at_rest(job)

    return wait_for(session, job_id, seen)


def _as_bar(session: Session, job_id: str) -> Json:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=session.output.console, expand=True) as progress:
        task = progress.add_task("", total=1, numbers="")

        def seen(job: Json) -> bool:
            style = STATUS_STYLE.get(job["status"], "white")
            progress.update(
                task,
                description=f"[{style}]{job['status']}[/]",
                completed=job["step"],
                total=job["steps"],
                numbers=_numbers(job),
            )
            return is_at_rest(job)

        job = wait_for(session, job_id, seen)
    session.output.say(_ending(job))
    return job


def _numbers(job: Json) -> str:
    if job["status"] in ("queued", "starting"):
        return str((job.get("reason") or {}).get("sentence") or job.get("phase") or "")
    parts = [f"loss {number_text(job.get('loss'))}"]
    if job.get("tokens_per_second") is not None:
        parts.append(f"{number_text(job['tokens_per_second'], 3)} {counted_in(job)}/s")
    if job["status"] == "running" and job.get("eta_seconds") is not None:
        parts.append(f"ETA {seconds_text(job['eta_seconds'])}")
    return "  ".join(parts)


def _ending(job: Json) -> str:
    lines = [f"{job['name']} {job['status']} at step {job['step']} of {job['steps']}."]
    if job.get("reason"):
        lines.append(job["reason"]["sentence"])
    if job.get("error"):
        lines.append(job["error"]["traceback"].rstrip())
    if job.get("digest"):
        lines.append(f"Digest {job['digest']}.")
    return plain("\n".join(lines))
