"""From an exception to what the server is told: classified by type, in one table. Torch-free.

The codes are those of the server's table of reasons; an exception of no known type is the user's.
"""

from __future__ import annotations

import traceback

from workers.contract import ErrorInfo

MESSAGE_CHARACTERS = 4000
TRACEBACK_CHARACTERS = 60_000

_CODES = {  # by the name of a class of the exception's type, so that this file imports none of them
    "workers.data.errors.DataError": "data_invalid",
    "workers.models.python.EntryError": "entry_failed",
    "workers.restoring.OtherDataError": "data_invalid",
    "workers.restoring.RestoreError": "checkpoint_unreadable",
    "workers.joining.RendezvousError": "rendezvous_failed",
    "zero_engine.errors.PeerError": "peer_lost",
    "zero_engine.manifest.CheckpointError": "storage_failed",
    "zero_engine.store.StoreError": "storage_failed",
    "torch.OutOfMemoryError": "out_of_memory",
    "torch.cuda.OutOfMemoryError": "out_of_memory",
    "torch.distributed.DistError": "peer_lost",
    "torch._C._DistError": "peer_lost",
    "builtins.MemoryError": "out_of_memory",
}


_COLLECTIVES = ("/torch/distributed/", "/zero_engine/comm")  # where a RuntimeError means that a connection broke


def code_of(error: BaseException) -> str | None:
    """The stable code of an exception, by its type; None for the user's own."""
    kinds = type(error).__mro__
    known = (_CODES.get(f"{kind.__module__}.{kind.__qualname__}") for kind in kinds)
    ours = (
        kind.__dict__.get("code") for kind in kinds if kind.__module__.partition(".")[0] in ("workers", "zero_engine")
    )
    for code in (*known, *ours):
        if isinstance(code, str):
            return code
    return "peer_lost" if type(error) is RuntimeError and _raised_in_collective(error) else None


def _raised_in_collective(error: BaseException) -> bool:
    """Whether the innermost Python frame is one that waits for other ranks; gloo's errors have no type of their own."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(place in frames[-1].filename for place in _COLLECTIVES)


def error_info(error: BaseException) -> ErrorInfo:
    """Type, message and traceback, cut to a size that a database row holds; the end of a traceback is what counts."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    lines = "".join(traceback.format_exception(error))
    shortened = lines if len(lines) <= TRACEBACK_CHARACTERS else "…" + lines[-TRACEBACK_CHARACTERS:]
    message = _message(error)
    return ErrorInfo(type=name, message=_stored(message), traceback=_stored(shortened), code=code_of(error))


def _message(error: BaseException) -> str:
    try:
        return (str(error) or type(error).__name__)[:MESSAGE_CHARACTERS]
    except Exception:  # the user's __str__ may raise
        return type(error).__name__


def _stored(text: str) -> str:
    """Without what no database or UTF-8 file can hold."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
