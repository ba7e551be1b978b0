"""How an attempt ended, from how its ranks ended. Pure.

Note: who is the culprit. When one rank fails, the others soon fail too: their exchange with it breaks. Those say
`peer_lost` and are never the reason while another failure is known. Among the rest the earliest wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.controller.actions import Data
from server.reasons import REASONS
from server.states import STOP_REASONS, Desired
from workers.contract import DISK_EXIT, ResultRecord

PEER_LOST = "peer_lost"
REASON_OF = {  # codes of the engine's errors that are no reasons themselves; the rest of what is raised is the user's
    "config_invalid": "spec_invalid",
    "model_unsupported": "spec_invalid",
    "writer_died": "storage_failed",
}


@dataclass(frozen=True)
class Outcome:
    """A reason code with the facts of its sentence."""

    reason: str
    data: Data = field(default_factory=dict)
    error: Data | None = None  # rank, type, message, traceback, code of the exception
    suspect: bool = False  # only victims have spoken so far: wait a little for the culprit


def outcome_of(
    results: Mapping[int, ResultRecord], lost: Mapping[int, str], num_ranks: int, desired: Desired, steps: int
) -> Outcome | None:
    """The attempt's end by `results` (rank to result) and `lost` (rank to node); None while it goes on."""
    failed = {rank: r for rank, r in results.items() if r.outcome in ("failed", "died")}
    culprits = {rank: r for rank, r in failed.items() if not _is_victim(r)}
    if culprits:
        rank = min(culprits, key=lambda r: (culprits[r].at, r))
        return _failure(rank, culprits[rank])
    if lost:
        rank = min(lost)
        return Outcome("rank_lost", {"rank": rank, "node": lost[rank]})
    if failed:
        rank = min(failed, key=lambda r: (failed[r].at, r))
        return _failure(rank, failed[rank], suspect=True)
    if len(results) < num_ranks:
        return None
    if all(r.outcome == "finished" for r in results.values()):
        return Outcome("finished", {"steps": steps})
    return Outcome(STOP_REASONS.get(desired, "orphaned"))


def _is_victim(result: ResultRecord) -> bool:
    return result.error is not None and result.error.code == PEER_LOST


def _failure(rank: int, result: ResultRecord, suspect: bool = False) -> Outcome:
    error = result.error
    shown: Data | None = {"rank": rank, **error.model_dump()} if error is not None else None
    data: Data = {"rank": rank, "signal": result.signal, "exit_code": result.exit_code, "peak_bytes": result.peak_rss}
    if error is not None:
        data |= {"type": error.type, "message": error.message}
    elif result.exit_code == DISK_EXIT:
        data["message"] = f"rank {rank} could not write into its folder; is its disk full?"
    return Outcome(_code(result), {k: v for k, v in data.items() if v is not None}, shown, suspect)


def _code(result: ResultRecord) -> str:
    if result.error is not None:
        code = REASON_OF.get(result.error.code or "", result.error.code)
        return code if code in REASONS else "user_error"
    if result.exit_code == DISK_EXIT:
        return "storage_failed"
    return "rank_died" if result.signal else "rank_exited"
