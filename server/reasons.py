"""Why a job is where it is: one table of reason codes.

A code gives the status in which the job ends, whether a failure of that kind is tried again, and the sentence a person
reads. Failures are classified by this table, by type, never by matching text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from server.states import Status

RetryClass = Literal["none", "user", "infrastructure", "free"]  # free: requeued without counting


@dataclass(frozen=True)
class Reason:
    """Why a job is where it is. `sentence` is a `str.format` template over the reason's data."""

    code: str
    status: Status  # where the job ends with this reason, when it is not retried
    retry: RetryClass
    sentence: str


_REASONS: tuple[Reason, ...] = (
    # waiting
    Reason("submitted", Status.QUEUED, "none", "Waiting for the controller's next look."),
    Reason("resumed", Status.QUEUED, "none", "Resumed; waiting to start."),
    Reason(
        "no_capacity",
        Status.QUEUED,
        "free",
        "Needs {ranks} {device} slots at once; the cluster has {total} in all.",
    ),
    Reason(
        "waiting_for_slots",
        Status.QUEUED,
        "free",
        "Needs {ranks} {device} slots at once; {free} of {total} are free.",
    ),
    Reason("reserved", Status.QUEUED, "free", "Waiting in line: free {device} slots are kept for the jobs ahead."),
    Reason("quota", Status.QUEUED, "free", "Needs {ranks} slots; the quota of {quota} has {used} in use."),
    Reason("backoff", Status.QUEUED, "free", "Trying again at {until} after: {message}"),
    Reason(
        "being_planned", Status.QUEUED, "free", "Its model is being built to plan it, since its stage is automatic."
    ),
    Reason("cluster_unavailable", Status.QUEUED, "free", "The cluster does not answer: {message}"),
    Reason("preempted", Status.QUEUED, "free", "Stopped to make room for job {ahead}; it goes on by itself."),
    Reason("retrying", Status.QUEUED, "none", "Trying again after: {message}"),
    Reason("launch_lost", Status.QUEUED, "free", "The launch was interrupted before anything ran; it starts again."),
    Reason("no_room", Status.QUEUED, "free", "The slots were gone when it wanted to start: {message}"),
    Reason("orphaned", Status.QUEUED, "free", "The ranks left because no server was there; it goes on by itself."),
    Reason("starting", Status.STARTING, "none", "Starting {ranks} ranks on {device}."),
    Reason("running", Status.RUNNING, "none", "Training."),
    Reason("unreachable", Status.RUNNING, "none", "No sign of life of rank {rank} on {node}; waiting for it."),
    # asked for
    Reason("paused_by_user", Status.PAUSED, "none", "Paused by {actor}."),
    Reason("server_stopped", Status.PAUSED, "none", "The server was stopped; the next start resumes it."),
    Reason("cancelled_by_user", Status.CANCELLED, "none", "Cancelled by {actor}."),
    Reason(
        "recovered",
        Status.CANCELLED,
        "none",
        "Found in the store when the database was new; a resume goes on from step {step}.",
    ),
    Reason("killed", Status.CANCELLED, "none", "Killed by {actor}."),
    Reason(
        "grace_expired",
        Status.CANCELLED,
        "none",
        "Did not reach a step boundary within {seconds:g} s of the stop; it was killed.",
    ),
    Reason("finished", Status.SUCCEEDED, "none", "All {steps} steps are done."),
    Reason("delete_requested", Status.DELETING, "none", "Its files and rows are being removed."),
    Reason("delete_failed", Status.DELETE_FAILED, "none", "Not everything could be removed: {message}"),
    # the user's failures
    Reason("user_error", Status.FAILED, "user", "Rank {rank} raised {type}: {message}"),
    Reason(
        "entry_failed",
        Status.FAILED,
        "none",
        "The entry point could not be built on rank {rank}: {type}: {message}",
    ),
    Reason("data_invalid", Status.FAILED, "none", "The data cannot be used: {message}"),
    Reason("spec_invalid", Status.FAILED, "none", "The spec cannot be run: {message}"),
    Reason("rank_exited", Status.FAILED, "user", "Rank {rank} left with exit code {exit_code} and no result."),
    Reason(
        "out_of_memory",
        Status.FAILED,
        "none",
        "Rank {rank} ran out of memory: peak {peak_bytes} bytes, planned {planned_bytes}.",
    ),
    Reason("checkpoint_unreadable", Status.FAILED, "none", "No checkpoint of this job can be read: {message}"),
    Reason(
        "no_progress",
        Status.FAILED,
        "user",
        "No step was completed for {seconds:g} s; rank {rank} was the last to move.",
    ),
    # infrastructure
    Reason("rank_died", Status.FAILED, "infrastructure", "Rank {rank} was ended by signal {signal}."),
    Reason("rank_lost", Status.FAILED, "infrastructure", "Rank {rank} and its actor on {node} are gone."),
    Reason(
        "rank_silent",
        Status.FAILED,
        "infrastructure",
        "Rank {rank} on {node} gives no sign of life, and no step was completed for {seconds:g} s.",
    ),
    Reason("node_lost", Status.FAILED, "infrastructure", "The attempt is gone from the cluster; its nodes were lost."),
    Reason(
        "start_deadline",
        Status.FAILED,
        "infrastructure",
        "Rank {rank} on {node} did not join within {seconds:g} s.",
    ),
    Reason("peer_lost", Status.FAILED, "infrastructure", "Rank {rank} lost its peers: {message}"),
    Reason("rendezvous_failed", Status.FAILED, "infrastructure", "The ranks could not join: {message}"),
    Reason("launch_failed", Status.FAILED, "infrastructure", "The ranks could not be started: {message}"),
    Reason("storage_failed", Status.FAILED, "infrastructure", "The checkpoint store failed: {message}"),
    Reason("requeue_failed", Status.FAILED, "none", "The job could not be put back in the queue: {message}"),
)

REASONS: dict[str, Reason] = {r.code: r for r in _REASONS}
FACT_CHARACTERS = 300  # of one fact in a sentence; the whole stands in the reason's data and the job's error
_ESCAPES = re.compile(r"\x1b(\][^\x07\x1b]*(\x07|\x1b\\)?|\[[0-?]*[ -/]*[@-~]?|.)?")
_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")


class _Shown(dict[str, object]):
    """Data of a sentence; a fact that is not known reads "?"."""

    def __missing__(self, key: str) -> object:
        return _Unknown()


class _Unknown:
    def __format__(self, spec: str) -> str:
        return "?"


def sentence(code: str, data: Mapping[str, object] | None = None) -> str:
    """What a person reads for a reason: its template filled with `data`.

    One line, whatever other programs put into the facts. A fact that is not known reads "?"; an unknown code (a newer
    server wrote it) is shown as it is.
    """
    reason = REASONS.get(code)
    if reason is None:
        return code
    shown = {k: one_line(v) if isinstance(v, str) else v for k, v in (data or {}).items() if v is not None}
    try:
        return reason.sentence.format_map(_Shown(shown))
    except (ValueError, TypeError):  # a datum of another type than the template wants
        return reason.sentence.format_map(_Shown())


def one_line(text: str) -> str:
    """A message of other programs as a part of a sentence: no colours, line ends or direction marks, and not long."""
    flat = " ".join(_DIRECTIONS.sub("", _ESCAPES.sub("", text)).split())
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in flat)
    return shown if len(shown) <= FACT_CHARACTERS else shown[: FACT_CHARACTERS - 1].rstrip() + "…"
