"""`shardyard doctor`: each check can fail, and a failing one says how to mend it."""

from __future__ import annotations

import json
import socket
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from server.cli import doctor_command
from server.cli.doctor_command import check_database, check_folder, check_memory, check_pages, check_ports, check_store
from server.settings import Settings, read_settings
from tests.unit.test_cli_commands import shardyard
from workers import doctor


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A data folder that is not there yet."""
    return read_settings({"data_dir": tmp_path / "data"}, {})


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training half answers at once: torch is another test's matter."""
    monkeypatch.setattr(doctor_command, "training_findings", lambda: [{**OK, "name": "torch"}])


OK = {"name": "", "status": "ok", "detail": "", "remedy": ""}


def test_a_machine_where_nothing_was_started_yet_is_well(settings: Settings) -> None:
    """What the first start makes is not missing."""
    findings = [check(settings) for check in (check_folder, check_memory, check_database, check_store)]
    assert {finding["status"] for finding in findings} == {"ok"}
    assert not settings.data_dir.exists()


def test_a_folder_that_cannot_be_made_is_named(settings: Settings) -> None:
    """Here a file is in its way, which stops root too."""
    settings.data_dir.parent.joinpath("file").write_text("")
    finding = check_folder(replace(settings, data_dir=settings.data_dir.parent / "file" / "data"))
    assert finding["status"] == "fail" and "--data-dir" in finding["remedy"]


def test_a_port_in_use_is_found_and_a_running_server_is_not_mistaken_for_a_stranger(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        held = replace(settings, port=taken.getsockname()[1])
        assert check_ports(held)["status"] == "fail" and "--port" in check_ports(held)["remedy"]
        settings.data_dir.mkdir()
        held.port_file.write_text(f"{held.port}\n")
        assert check_ports(held)["status"] == "ok"


def test_a_database_that_does_not_answer_is_named_without_its_password(settings: Settings) -> None:
    """The output of doctor is what people paste into reports."""
    finding = check_database(replace(settings, database_url="postgresql://me:secret@127.0.0.1:1/x"))
    assert finding["status"] == "fail" and finding["remedy"]
    assert "secret" not in json.dumps(finding) and "me:***@127.0.0.1:1" in finding["detail"]


def test_a_file_that_is_no_database_is_found(settings: Settings) -> None:
    settings.data_dir.mkdir()
    path = settings.data_dir / "shardyard.db"
    path.write_bytes(b"this is not a database" * 100)
    assert check_database(settings)["status"] == "fail"
    path.unlink()
    sqlite3.connect(path).close()
    assert check_database(settings)["status"] == "ok"


def test_a_store_is_tried_with_an_object_that_is_gone_afterwards(settings: Settings) -> None:
    folder = settings.data_dir / "checkpoints"
    folder.mkdir(parents=True)
    assert check_store(settings)["status"] == "ok"
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_an_installation_without_pages_says_how_to_build_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("server.routes.pages.STATIC", tmp_path)
    assert check_pages(settings)["status"] == "fail" and "make web" in check_pages(settings)["remedy"]


@pytest.mark.usefixtures("without_torch")
def test_the_command_prints_every_finding_and_its_exit_code_tells_whether_one_failed(tmp_path: Path) -> None:
    """Piped, so JSON: a script can ask."""
    well = shardyard(None, "doctor", "--data-dir", str(tmp_path), "--only", "database", "--only", "torch")
    assert well.returncode == 0 and [item["name"] for item in json.loads(well.stdout)] == ["database", "torch"]
    words = ("--only", "database", "--database-url", "postgresql://127.0.0.1:1/x")
    ill = shardyard(None, "doctor", "--data-dir", str(tmp_path), *words)
    assert ill.returncode == 1 and json.loads(ill.stdout)[0]["status"] == "fail"


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("words", [("--only", "nothing"), ("--store-url", "relative/folder")])
def test_a_check_or_setting_that_does_not_exist_is_bad_input(tmp_path: Path, words: tuple[str, str]) -> None:
    run = shardyard(None, "doctor", "--data-dir", str(tmp_path), *words)
    assert run.returncode == 2 and run.stderr


def test_a_check_of_training_that_raises_is_a_finding_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken torch must not hide what else is wrong."""

    def broken() -> doctor.Finding:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor, "CHECKS", {"torch": broken, "python": doctor.check_python})
    torch, python = doctor.examine()
    assert torch.status == "fail" and "libcudart" in torch.detail and "install it again" in torch.remedy
    assert python.status == "ok"


def test_training_is_examined_for_real_in_a_process_of_its_own() -> None:
    """torch multiplies, gloo sums, Ray loads, the kill pipe kills: on this very machine."""
    found = {finding["name"]: finding for finding in doctor_command.training_findings()}
    assert set(found) == {"python", "linux", "kill pipe", "torch", "gloo", "cuda", "ray"}
    assert not [finding for finding in found.values() if finding["status"] == "fail"]
