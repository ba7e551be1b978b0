"""Ids made by us: UUIDv7 (RFC 9562), so that they sort by the time they were made."""

from __future__ import annotations

import os
import re
import threading
import time

_PATTERN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_lock = threading.Lock()
_last_ms = 0
_counter = 0


def new_id() -> str:
    """A fresh UUIDv7; ids of one process strictly grow (RFC 9562, method 1: a counter within a millisecond)."""
    milliseconds, counter = _tick()
    random = int.from_bytes(os.urandom(8)) & (2**62 - 1)
    value = milliseconds << 80 | 7 << 76 | counter << 64 | 2 << 62 | random
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def is_id(text: str) -> bool:
    """Whether `text` is one of our ids, in the one spelling that we write."""
    return _PATTERN.fullmatch(text) is not None


def _tick() -> tuple[int, int]:
    global _last_ms, _counter
    with _lock:
        now = time.time_ns() // 1_000_000
        if now > _last_ms:
            _last_ms, _counter = now, int.from_bytes(os.urandom(1))
        elif _counter == 0xFFF:
            _last_ms, _counter = _last_ms + 1, 0
        else:
            _counter += 1
        return _last_ms, _counter
