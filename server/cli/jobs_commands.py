"""Commands on jobs: submit, jobs, show, logs, watch, and what a person may ask of one."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Any

import typer

from server.cli import preflight
from server.cli.client import Json
from server.cli.connection import Session
from server.cli.errors import FAILED, ServerProblem, SomeRefused
from server.cli.follow import follow, is_at_rest, wait_for
from server.cli.output import age_text, bytes_text, counted_in, number_text, plain, seconds_text, short_id, status_text
from server.cli.spec_file import SetOption, SpecArgument, as_body, read_spec

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id, end of an id, name, or `latest`.")]
JobsArgument = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids, ends of ids, names, or `latest`.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show the job until it ends.")]
Key = Annotated[
    str | None, typer.Option("--idempotency-key", help="The same key again gives the same job instead of a second one.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Come back when every process of it is gone.")]


def submit(
    session: Session, spec: SpecArgument, follow_it: Follow = False, changes: SetOption = None, key: Key = None
) -> None:
    """Submit a job spec to the server."""
    body = as_body(read_spec(spec, changes or []))
    job = session.client.post_once("/v1/jobs", body, key or uuid.uuid4().hex)
    if not follow_it:
        session.output.result(job, lambda: _say_submitted(session, job))
        return
    session.output.say(f"Submitted {plain(job['name'])} as {job['id']}.")
    follow(session, job["id"])


def _say_submitted(session: Session, job: Json) -> None:
    session.output.say(f"Submitted {plain(job['name'])} as {job['id']}.")
    session.output.say(
        f"See it: {session.client.address.url}/jobs/{job['id']}  or: shardyard watch {short_id(job['id'])}"
    )


def jobs(
    session: Session,
    status: Annotated[list[str] | None, typer.Option("--status", help="Only these states.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only with this tag.")] = None,
    search: Annotated[str | None, typer.Option("--search", "-q", help="Only with this in the name.")] = None,
    sort: Annotated[str | None, typer.Option("--sort", help="-created_at, name, status, loss, ...")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 50,
) -> None:
    """List jobs, newest first."""
    chosen = ",".join(status) if status else None
    items = session.client.items("/v1/jobs", limit, status=chosen, tag=tag, q=search, sort=sort)
    session.output.result(items, lambda: _draw_jobs(session, items, chosen or tag or search))


def _draw_jobs(session: Session, items: list[Json], filtered: str | None) -> None:
    if not items:
        none = "No jobs. Submit one: shardyard submit examples/gpt_stdlib.yaml"
        session.output.say("No job is like that; `shardyard jobs` lists all." if filtered else none)
        return
    session.output.table(
        ("Id", "~Name", "Status", ">Step", ">Loss", "N x stage", ">Age", "~Reason"),
        (
            (
                short_id(job["id"]),
                job["name"],
                status_text(job["status"]),
                f"{job['step']}/{job['steps']}",
                number_text(job["loss"]),
                f"{job['ranks']} x {_stage(job['stage'])}",
                age_text(job["created_at"]),
                job["reason"]["sentence"] if job["reason"] else "",
            )
            for job in items
        ),
    )


def _stage(stage: int | None) -> str:
    return "auto" if stage is None else str(stage)


def show(session: Session, job: JobArgument) -> None:
    """Show one job: state, progress, attempts."""
    job_id = session.job(job)
    view = session.client.get(f"/v1/jobs/{job_id}")
    attempts = session.client.get(f"/v1/jobs/{job_id}/attempts")
    attempts = attempts["items"] if isinstance(attempts, dict) else attempts
    plan = session.client.get(f"/v1/jobs/{job_id}/plan")
    shown = {**view, "attempts": attempts, "plan": plan}
    session.output.result(shown, lambda: _draw_job(session, view, attempts, plan))


def _draw_job(session: Session, job: Json, attempts: list[Json], plan: Json) -> None:
    from rich.table import Table

    facts: list[tuple[str, Any]] = [
        ("Name", plain(job["name"])),
        ("Id", job["id"]),
        ("Status", status_text(job["status"])),
        ("Reason", plain(job["reason"]["sentence"]) if job["reason"] else "-"),
        ("Phase", job["phase"] or "-"),
        *_saving(job),
        ("Step", f"{job['step']} of {job['steps']}"),
        ("Loss", number_text(job["loss"], 6)),
        (f"{counted_in(job).capitalize()}/s", number_text(job["tokens_per_second"])),
        ("ETA", seconds_text(job["eta_seconds"])),
        ("Ranks x stage", f"{job['ranks']} x {_stage(job['stage'])}"),
        ("Plan", plain(_plan(plan))),
        ("V, C", f"{job['micro_batches']} micro-batches, chunks of {job['chunk']}"),
        ("Digest", job["digest"] or "-"),
        ("Age", age_text(job["created_at"])),
        ("Possible now", ", ".join(job["allowed_actions"]) or "-"),
        ("Page", f"{session.client.address.url}/jobs/{job['id']}"),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(name, value)
    session.output.draw(grid)
    if attempts:
        session.output.table(
            (">Attempt", "Status", "N x stage", ">From", ">To step", "~Reason"),
            (
                (
                    str(attempt["number"]),
                    attempt["status"],
                    f"{attempt['ranks']} x {attempt['stage']}",
                    number_text(attempt["resumed_from_step"] or 0),
                    number_text(attempt["last_step"]),
                    attempt["reason"]["sentence"] if attempt["reason"] else "",
                )
                for attempt in attempts
            ),
        )
    if job.get("error"):
        session.output.say(plain(job["error"]["traceback"]))


def _plan(plan: Json) -> str:
    """What a rank holds and sends at the job's stage, or how far its plan is."""
    if plan["predicted"] is None:
        failed = f"cannot be made: {(plan['failure'] or '').strip().rpartition(chr(10))[2]}"
        return {"pending": "being made: the model is built first", "failed": failed}.get(plan["status"], "-")
    made = plan["predicted"]
    stage = made["stages"][made["advised_stage"] if plan["stage"] is None else plan["stage"]]
    seconds = "" if plan["predicted_seconds"] is None else f", {seconds_text(plan['predicted_seconds'])} a step"
    fits = "" if stage["fits"] else "; it does not fit the device"
    sent = bytes_text(stage["total_traffic_bytes"])
    return f"{bytes_text(stage['total_bytes'])} a rank, {sent} sent a step{seconds}{fits}"


def _saving(job: Json) -> list[tuple[str, str]]:
    saving = (job.get("current_attempt") or {}).get("saving")
    return [] if saving is None else [("Saving", f"step {saving['step']}, for {age_text(saving['since'])}")]


def logs(
    session: Session,
    job: JobArgument,
    follow_it: Follow = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    search: Annotated[str | None, typer.Option("--search", "-q", help="Only lines with this text.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Begin so many lines before the end.")] = 100,
) -> None:
    """Print what the ranks of a job wrote: text, also when piped; --json gives an object per line."""
    job_id = session.job(job)
    query = {"rank": rank, "q": search}
    path = f"/v1/jobs/{job_id}/logs"
    window = session.client.get(path, limit=max(lines, 1), **query)
    _print_lines(session, window["items"][-lines:] if lines else [])
    after = window["next_after"]
    if not follow_it:
        if lines and not window["items"]:
            session.output.say("No line matches." if search else "Nothing was printed so far.")
        return
    at_rest = False
    for _ in session.client.changes(job_id, at_least_every_seconds=2.0):
        while True:
            window = session.client.get(path, after=after, limit=1000, **query)
            after = window["next_after"] if window["next_after"] is not None else after
            if not window["items"]:
                break
            _print_lines(session, window["items"])
        if at_rest:
            return
        at_rest = is_at_rest(session.client.get(f"/v1/jobs/{job_id}"))


def _print_lines(session: Session, items: list[Json]) -> None:
    for item in items:
        if session.output.asked_for_json:
            session.output.line(item)
            continue
        text = item["text"].rstrip("\n") + (" ↩" if item.get("split") else "")  # it goes on in the next line
        print(f"{item['rank']}| {plain(text) if session.output.terminal else text}", flush=True)


def watch(session: Session, job: JobArgument = "latest") -> None:
    """Show a job's progress until it ends; Ctrl-C leaves the job running."""
    follow(session, session.job(job))


def cancel(session: Session, jobs: JobsArgument, wait: Wait = False) -> None:
    """Stop jobs at the next step, after a checkpoint."""
    _ask(session, "cancel", jobs, wait)


def kill(session: Session, jobs: JobsArgument, wait: Wait = False) -> None:
    """End jobs at once, without a checkpoint."""
    _ask(session, "kill", jobs, wait)


def pause(session: Session, jobs: JobsArgument, wait: Wait = False) -> None:
    """Stop jobs after a checkpoint that is kept until they are resumed."""
    _ask(session, "pause", jobs, wait)


def delete(
    session: Session,
    jobs: JobsArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Come back when all of it is gone.")] = False,
) -> None:
    """Remove ended jobs with their checkpoints, metrics and logs."""
    results = _each(session, jobs, lambda job_id: session.client.delete(f"/v1/jobs/{job_id}"), _gone if wait else None)
    if any(job["status"] == "delete_failed" for job in results):
        raise typer.Exit(FAILED)


def _gone(session: Session, job: Json) -> Json:
    """The job once the server does not know it any more, or as it stands when not everything could be removed."""
    try:
        return wait_for(session, job["id"], lambda seen: bool(seen["status"] == "delete_failed"))
    except ServerProblem as problem:
        if problem.status != 404:
            raise
        return {**job, "status": "gone", "reason": None}


def _ask(session: Session, action: str, named: list[str], wait: bool) -> None:
    ended = _at_rest if wait else None
    _each(session, named, lambda job_id: session.client.post(f"/v1/jobs/{job_id}/{action}"), ended)


def _at_rest(session: Session, job: Json) -> Json:
    return wait_for(session, job["id"], is_at_rest)


def _each(
    session: Session,
    named: list[str],
    ask: Callable[[str], Json],
    wait: Callable[[Session, Json], Json] | None,
) -> list[Json]:
    """Ask every named job, wait for those that agreed, and say how each stands. Raises SomeRefused after that."""
    asked, refused = list[Json](), dict[str, ServerProblem]()
    for job_id in [session.job(name) for name in named]:
        try:
            asked.append(ask(job_id))
        except ServerProblem as problem:
            if len(named) == 1:
                raise
            refused[short_id(job_id)] = problem
    results = asked if wait is None else [wait(session, job) for job in asked]
    session.output.result(results, lambda: _say_states(session, results))
    if refused:
        raise SomeRefused(refused)
    return results


def _say_states(session: Session, results: list[Json]) -> None:
    for job in results:
        reason = f": {job['reason']['sentence']}" if job["reason"] else ""
        session.output.say(plain(f"{short_id(job['id'])} {job['name']} is {job['status']}{reason}"))


def resume(
    session: Session,
    job: JobArgument,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Go on with so many ranks.")] = None,
    stage: Annotated[int | None, typer.Option("--stage", min=0, max=3, help="Go on at this ZeRO stage.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Train to this step.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Id, or the end of one; default: the newest usable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would read and need.")] = False,
    follow_it: Follow = False,
) -> None:
    """Go on from a checkpoint, also with other ranks, stage or more steps: the bits stay the same."""
    job_id = session.job(job)
    body = {
        "ranks": ranks,
        "zero": None if stage is None else {"stage": stage},
        "train": None if steps is None else {"steps": steps},
        "checkpoint": None if checkpoint is None else session.checkpoint(job_id, checkpoint)["id"],
    }
    asked = {name: value for name, value in body.items() if value is not None}
    found = preflight.ask(session, job_id, asked)
    if dry_run:
        session.output.result(found, lambda: _say_preflight(session, found))
        return
    if session.output.terminal:
        _say_preflight(session, found)
    answer = session.client.post(f"/v1/jobs/{job_id}/resume", asked)
    if follow_it:
        follow(session, job_id)
        return
    session.output.result(answer, lambda: _say_states(session, [answer]))


def _say_preflight(session: Session, found: Json | None) -> None:
    for line in ["Its model is not known before it is built."] if found is None else preflight.lines(found):
        session.output.say(line)
