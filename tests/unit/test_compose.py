"""docker-compose.yml and Dockerfile as data: no container engine is needed to see that they fit the code."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from ruamel.yaml import YAML

from server.cli.app import app
from server.settings import PREFIX, Settings, read_settings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())
OWN = {name: service for name, service in COMPOSE["services"].items() if service["image"].startswith("shardyard")}
SCRIPTS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]) | {"ray", "python"}
RAY_VARIABLES = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}


def test_every_named_service_of_the_design_is_there() -> None:
    """PostgreSQL, API, controller, Ray head, and GPU workers as a profile."""
    assert set(COMPOSE["services"]) == {"database", "api", "controller", "ray-head", "gpu-worker"}
    assert COMPOSE["services"]["gpu-worker"]["profiles"] == ["gpu"]


@pytest.mark.parametrize("name", sorted(OWN))
def test_every_command_is_a_console_script_with_options_that_exist(name: str) -> None:
    """The command line itself parses what compose writes."""
    script, command, *arguments = OWN[name]["command"]
    assert script in SCRIPTS
    group = typer.main.get_command(app)
    parser = group.commands[command]  # type: ignore[attr-defined]
    parser.make_context(command, list(arguments))


@pytest.mark.parametrize("name", sorted(OWN))
def test_every_variable_is_a_setting(name: str) -> None:
    """A misspelt variable would be ignored in silence."""
    settings = {PREFIX + field.name.upper() for field in dataclasses.fields(Settings)}
    assert set(OWN[name]["environment"]) <= settings | RAY_VARIABLES


def test_the_settings_can_be_read() -> None:
    """The values of the variables are values that the settings take."""
    environment = {name: str(value) for name, value in OWN["api"]["environment"].items()}
    settings = read_settings({}, environment)
    assert settings.store == "/checkpoints" and settings.roots == (Path("/inputs"),)


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_every_service_has_a_health_check_that_names_an_existing_program(name: str) -> None:
    """Dependants wait for health, so each must be able to say it."""
    kind, program, *_ = COMPOSE["services"][name]["healthcheck"]["test"]
    assert kind == "CMD" and program in SCRIPTS | {"pg_isready"}


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_whom_a_service_waits_for_exists_and_every_named_volume_is_declared(name: str) -> None:
    """Compose would refuse the file otherwise."""
    service = COMPOSE["services"][name]
    assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])
    named = {mount.split(":")[0] for mount in service["volumes"] if not mount.startswith((".", "/"))}
    assert named <= set(COMPOSE["volumes"])


def test_all_who_touch_checkpoints_share_one_volume() -> None:
    """A rank writes what the API exports and the controller counts."""
    assert all("checkpoints:/checkpoints" in service["volumes"] for service in OWN.values())


def test_nothing_is_published_beyond_loopback() -> None:
    """Who wants the API on a network says so."""
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_no_password_stands_in_the_file() -> None:
    """Secrets come from the environment and their absence is an error."""
    text = (ROOT / "docker-compose.yml").read_text()
    assert re.findall(r"(?:PASSWORD|TOKEN): (?!\$\{)", text) == []


def test_the_image_starts_an_existing_command_and_copies_existing_files() -> None:
    """One Dockerfile serves every service."""
    text = (ROOT / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    assert '"shardyard", "serve"' in text
