"""The list of commands, and how a failing one ends.

Commands load what they need when they run: `shardyard --help` and `shardyard jobs` import no database, torch or Ray.
"""

from __future__ import annotations

import sys

import typer

from server.cli import checkpoint_commands, jobs_commands, local_commands, plan_command, service_commands
from server.cli.connection import connected
from server.cli.errors import CommandError

app = typer.Typer(
    name="shardyard",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train PyTorch models that do not fit one GPU, as a service.",
)

_SERVER = "On a server"
_JOBS = "On jobs"
_HERE = "On this machine"

for command in (service_commands.serve, service_commands.stop, service_commands.node, service_commands.token):
    app.command(rich_help_panel=_SERVER)(command)

for command in (
    jobs_commands.submit,
    jobs_commands.jobs,
    jobs_commands.show,
    jobs_commands.logs,
    jobs_commands.watch,
    jobs_commands.cancel,
    jobs_commands.kill,
    jobs_commands.pause,
    jobs_commands.resume,
    checkpoint_commands.checkpoints,
    checkpoint_commands.export,
):
    app.command(rich_help_panel=_JOBS)(connected(command))

app.command(rich_help_panel=_HERE)(plan_command.plan)
for command in (local_commands.run, local_commands.doctor):
    app.command(
        rich_help_panel=_HERE,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(command)


def run() -> None:
    """Run the command line; every CommandError ends it with its lines on stderr and its exit code."""
    try:
        app()
    except CommandError as error:
        for line in error.lines():
            print(line, file=sys.stderr)
        sys.exit(error.exit_code)
