"""The mistakes a person can make with data: each names the field and says what to change."""

from __future__ import annotations


class DataError(Exception):
    """Data that cannot be trained on. `code` never changes once released."""

    code = "data_invalid"
