"""The list of commands, and how a failing one ends.

Commands load what they need when they run: `shardyard --help` and `shardyard jobs` import no database, torch or Ray.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from server.cli import (
    calibrate_command,
    checkpoint_commands,
    doctor_command,
    fork_commands,
    jobs_commands,
    plan_command,
    run_command,
    service_commands,
    verify_commands,
)
from server.cli.connection import connected
from server.cli.errors import CommandError

Command = Callable[..., None]

app = typer.Typer(
    name="shardyard",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"shardyard {version('shardyard')}")
        raise typer.Exit


_SERVER = "On a server"
_JOBS = "On jobs"
_HERE = "On this machine"


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Train PyTorch models that do not fit one GPU, as a service."""


_SERVER_COMMANDS: tuple[Command, ...] = (
    service_commands.serve,
    service_commands.stop,
    service_commands.node,
    service_commands.token,
)
_JOB_COMMANDS: tuple[Command, ...] = (
    jobs_commands.submit,
    jobs_commands.jobs,
    jobs_commands.show,
    jobs_commands.logs,
    jobs_commands.watch,
    jobs_commands.cancel,
    jobs_commands.kill,
    jobs_commands.pause,
    jobs_commands.resume,
    jobs_commands.delete,
    checkpoint_commands.checkpoints,
    checkpoint_commands.export,
    fork_commands.fork,
    fork_commands.clone,
    fork_commands.import_folder,
)
for command in _SERVER_COMMANDS:
    app.command(rich_help_panel=_SERVER)(command)
for command in _JOB_COMMANDS:
    app.command(rich_help_panel=_JOBS)(connected(command))
for prove in (verify_commands.verify, verify_commands.verify_resume):
    app.command(rich_help_panel=_JOBS)(prove)
app.command(rich_help_panel=_HERE)(plan_command.plan)
app.command(rich_help_panel=_HERE)(calibrate_command.calibrate)
app.command(
    rich_help_panel=_HERE,
    add_help_option=False,  # the program reads its own arguments
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(run_command.run)
app.command(rich_help_panel=_HERE)(doctor_command.doctor)


def run() -> None:
    """Run the command line; every CommandError ends it with its lines on stderr and its exit code."""
    try:
        app()
    except CommandError as error:
        for line in error.lines():
            print(line, file=sys.stderr)
        sys.exit(error.exit_code)
