"""The mistakes a person can make with data: each names the field and says what to change."""

from __future__ import annotations


class DataError(Exception):
    """Data that cannot be trained on. `code` never changes once released, `pointer` is the field of the spec."""

    code = "data_invalid"

    def __init__(self, message: str, pointer: str = "/data/path") -> None:
        super().__init__(message)
        self.pointer = pointer
