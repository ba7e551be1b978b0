"""Output becomes lines: the same lines however it was cut, nothing of the terminal left in them."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server import logtext
from server.logtext import LINE_CHARACTERS, Line, OpenLine, finish, read_piece

ALPHABET = "ab\r\n\x1b[];m0\x07\\é ]P\x00"


def _lines(*pieces: str) -> list[Line]:
    state, lines = OpenLine(), []
    for piece in pieces:
        state, more = read_piece(state, piece)
        lines += more
    return lines + finish(state)


@settings(max_examples=300)
@given(st.text(ALPHABET, max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_the_lines_do_not_depend_on_where_the_output_was_cut(text: str, cuts: list[int]) -> None:
    """Half an escape sequence, half a line, a return at the very end: one result."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logtext, "LINE_CHARACTERS", 7)
        whole = _lines(text)
        assert _lines(*(text[a:b] for a, b in itertools.pairwise(places))) == whole


@given(st.text(ALPHABET, max_size=60))
def test_no_control_character_reaches_a_page(text: str) -> None:
    """Whatever was printed."""
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(line.text for line in _lines(text)))


def test_a_progress_bar_collapses_to_its_last_state() -> None:
    """Ten thousand returns are one line; `\\r\\n` is an ordinary end of line."""
    bar = "".join(f"\r{i:5d}/10000" for i in range(10_000))
    assert _lines(bar + "\n", "done\r\n") == [Line(" 9999/10000"), Line("done")]
    assert _lines("50%\r", "100%\r", "\n") == [Line("100%")]


def test_a_long_line_is_split_with_a_mark() -> None:
    """256 KB without a newline come as pieces, the last one unmarked, nothing lost."""
    lines = _lines("x" * 256_000)
    assert all(line.split for line in lines[:-1]) and not lines[-1].split
    assert sum(len(line.text) for line in lines) == 256_000
    assert max(len(line.text) for line in lines) == LINE_CHARACTERS


def test_colours_titles_and_links_are_dropped_and_markup_is_text() -> None:
    """CSI, OSC with BEL and with ST, cursor moves; HTML stays what it is: characters."""
    text = "\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \x1b[2K<b>&amp;\n"
    assert _lines(text) == [Line("red link <b>&amp;")]


def test_an_escape_that_never_ends_does_not_swallow_the_log() -> None:
    """After 4096 characters it is no escape sequence."""
    assert "x" * 100 in "".join(line.text for line in _lines("\x1b]" + "x" * 5000 + "\n"))
