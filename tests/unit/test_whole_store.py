"""The mark of a store: a new one gets it, one that was used is known by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.whole_store import MARK_FILE, WholeStore
from zero_engine.store import LocalStore, StoreAway


@pytest.mark.parametrize(
    ("found", "known", "outcome"),
    [
        (None, {}, "written"),  # really new
        (None, {"others": True, "used": True}, "written"),  # the setting names another place than before
        ("old", {}, "old"),  # the database is new
        ("old", {"mark": "old"}, "old"),
        ("", {"mark": "old"}, "old"),  # a person says that it is the one
        (None, {"used": True}, "there were checkpoints"),  # used before stores had marks
        (None, {"mark": "old"}, "is it mounted"),
        ("other", {"mark": "old"}, "another store"),
    ],
)
def test_a_store_is_taken_when_it_is_new_or_the_one_it_was(
    tmp_path: Path, found: str | None, known: dict[str, str | bool], outcome: str
) -> None:
    """Whatever is taken carries its mark from then on; what is not is left as it was."""
    top = LocalStore(tmp_path / "store")
    if found is not None:
        top.put(MARK_FILE, found.encode())
    whole = WholeStore(top, **known)  # type: ignore[arg-type]
    if " " in outcome:
        with pytest.raises(StoreAway, match=outcome):
            whole.settle()
        assert list(top.list()) == ([MARK_FILE] if found else [])
        return
    mark = whole.settle()
    assert outcome in ("written", mark) and top.get(MARK_FILE).decode().strip() == mark
    assert WholeStore(top, mark).is_there() and not WholeStore(top, mark, others=True).is_there()
