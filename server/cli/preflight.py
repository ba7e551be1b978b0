"""What a resume would read and need, in a few lines before it is asked for."""

from __future__ import annotations

from server.cli.client import Json
from server.cli.connection import Session
from server.cli.errors import ServerProblem
from server.cli.output import bytes_text, plain


def ask(session: Session, job_id: str, body: Json) -> Json | None:
    """The preflight; None from a server that has none, or of a model that nobody knows before it is built."""
    try:
        return dict(session.client.post(f"/v1/jobs/{job_id}/preflight", body))
    except ServerProblem as problem:
        if problem.status == 404 or problem.body.get("code") == "plan_unknown":
            return None
        raise


def lines(found: Json) -> list[str]:
    """Where it begins, what each rank reads, what the largest needs, and what was passed over."""
    to = f"{found['ranks']} x stage {found['stage']}"
    if found["checkpoint"] is None:
        begins = f"Begins at step 0 on {to}."
    else:
        written = f"{found['from_ranks']} x stage {found['from_stage']}"
        begins = f"Begins at step {found['step']}, written by {written}, on {to}."
    read, needed = found["read_bytes"], bytes_text(found["plan"]["total_bytes"])
    each = " to ".join(dict.fromkeys(map(bytes_text, (min(read), max(read)))))
    room = found["device_memory_bytes"]
    holds = "its device's memory is not known" if room is None else f"of {bytes_text(room)}"
    fits = "it fits" if found["fits"] else "IT DOES NOT FIT"
    shown = [
        begins,
        f"Each rank reads {each}, {bytes_text(sum(read))} in all.",
        f"The largest rank needs {needed}, {holds}: {fits}.",
    ]
    passed = [f"Passed over: step {each['step']}, {plain(each['why'])}" for each in found["passed_over"]]
    return [*shown, *passed, *([found["note"]] if found["note"] else [])]
