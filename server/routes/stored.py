"""What a request reads from the store: its errors as problems that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import ApiError
from zero_engine.manifest import CheckpointError
from zero_engine.store import StoreError


@contextmanager
def store_answers() -> Iterator[None]:
    """Raises ApiError 409 in place of CheckpointError, 503 in place of StoreError."""
    try:
        yield
    except CheckpointError as error:
        raise ApiError(409, f"The checkpoint cannot be read: {error}", code="checkpoint_unreadable") from error
    except StoreError as error:
        raise ApiError(503, f"The store does not answer: {error}", code="store_unavailable") from error
