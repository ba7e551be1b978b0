"""How far a rank has come, as its supervisor reads it from the spool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import wait_for
from workers import rank, reporter
from workers.contract import SPOOL_FILE, AliveRecord
from workers.reporter import Reporter
from workers.spool_progress import SpoolProgress


def test_a_rank_gives_signs_of_life_as_long_as_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it only waits for its peers: of a group that stands still, the stopped rank alone is silent."""

    def wait_in_an_exchange(*_: Any) -> Any:
        wait_for(lambda: (tmp_path / SPOOL_FILE).read_text().count('"alive"') >= 3)
        raise ValueError("heard")

    monkeypatch.setattr(reporter, "ALIVE_SECONDS", 0.005)
    monkeypatch.setattr(rank, "_live", wait_in_an_exchange)
    order: Any = SimpleNamespace(rank_folder=str(tmp_path))
    assert rank.main(order, None) == rank.FAILED_EXIT
    assert "heard" in (tmp_path / SPOOL_FILE).read_text()


def test_a_sign_of_life_is_no_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that lives and gets nothing done is heard, and still leaves its stacks when it is killed."""
    clock = [0.0]
    monkeypatch.setattr("workers.spool_progress.time.monotonic", lambda: clock[0])
    spool, progress = Reporter(tmp_path), SpoolProgress(tmp_path / SPOOL_FILE)
    clock[0] = 1.0
    spool.phase("training")
    progress.look()
    assert (progress.phase, progress.age_seconds(), progress.idle_seconds()) == ("training", 0.0, 0.0)
    clock[0] = 9.0
    spool.add(AliveRecord(at=spool.time()))
    progress.look()
    assert (progress.age_seconds(), progress.idle_seconds()) == (0.0, 8.0)
    spool.close()
