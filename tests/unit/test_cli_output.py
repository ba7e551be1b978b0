"""What is printed: safe on a terminal, exact in its numbers."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from server.cli.output import age_text, bytes_text, number_text, plain, seconds_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("日本語 العربية 😀", "日本語 العربية 😀"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x07b\x9bc", "a\ufffdb\ufffdc"),
        ("safe\u202egnp.exe", "safe\ufffdgnp.exe"),
        ("tab\tand\nnewline stay", "tab\tand\nnewline stay"),
        ("[bold]markup is text[/bold]", "[bold]markup is text[/bold]"),
    ],
)
def test_text_of_others_cannot_act_on_the_terminal(text: str, shown: str) -> None:
    """Names and logs come from anybody; escape sequences, controls and direction overrides are dropped or marked."""
    assert plain(text) == shown


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1010 * 2**20, "1010 MiB"), (16 * 2**40, "16 TiB")],
)
def test_bytes_have_the_units_of_the_pages(count: float | None, text: str) -> None:
    """The same plan is read in the terminal and in the browser."""
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0123, "12.3 ms"),
        (1.25, "1.2 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_clock_ahead_of_the_server_gives_no_negative_age() -> None:
    assert age_text("2026-01-01T00:00:10+00:00", datetime(2026, 1, 1, tzinfo=UTC)) == "0 s"


def test_non_finite_numbers_are_shown_by_name() -> None:
    """The API writes them as strings."""
    assert [number_text(value) for value in ("NaN", "-Infinity", None, 0.12345)] == ["NaN", "-Infinity", "-", "0.1235"]
