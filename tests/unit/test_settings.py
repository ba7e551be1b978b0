"""One frozen Settings, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.settings import SettingError, Settings, read_settings


def test_the_command_line_wins_over_the_environment_and_both_over_the_defaults(tmp_path: Path) -> None:
    """None on the command line means: not given."""
    env = {"SHARDYARD_PORT": "9000", "SHARDYARD_MAX_RANKS": "8", "SHARDYARD_DATA_DIR": str(tmp_path)}
    settings = read_settings({"port": 9100, "host": None}, env)
    assert (settings.port, settings.max_ranks, settings.host) == (9100, 8, "127.0.0.1")
    assert settings.data_dir == tmp_path


def test_every_field_can_be_read_from_its_variable() -> None:
    """The name is the field's in capitals; the text of its default, where there is one, is accepted."""
    defaults = read_settings({}, {})
    for name, value in vars(defaults).items():
        if isinstance(value, bool | int | float | str):
            assert getattr(read_settings({}, {f"SHARDYARD_{name.upper()}": str(value)}), name) == value


@pytest.mark.parametrize(
    "variable",
    [
        {"SHARDYARD_PORT": "http"},
        {"SHARDYARD_PORT": "70000"},
        {"SHARDYARD_FAKE_CLUSTER": "perhaps"},
        {"SHARDYARD_CPU_SLOTS_PER_NODE": "0"},
        {"SHARDYARD_STORE_URL": "relative/folder"},
    ],
)
def test_a_setting_that_cannot_be_used_is_named(variable: dict[str, str]) -> None:
    """The error says which one, so that the one line of `serve` does."""
    (name,) = variable
    field = name.removeprefix("SHARDYARD_").lower()
    with pytest.raises(SettingError, match=f"(?i){field}"):
        read_settings({}, variable)


def test_paths_derive_from_the_data_folder(tmp_path: Path) -> None:
    """One folder holds everything unless a database or a store is named."""
    settings = Settings(data_dir=tmp_path)
    assert str(tmp_path) in settings.database
    assert settings.job_store("j") == f"{tmp_path}/checkpoints/j"
    assert Settings(store_url="s3://bucket/a/").job_store("j") == "s3://bucket/a/j"
