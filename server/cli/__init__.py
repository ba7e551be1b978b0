"""The command line: a thin client of the REST API, and the doors to `serve`, `run` and `doctor`.

Read `app.py` (the list of commands), `client.py` (how a command reaches the server), then any `*_commands.py`.
It must never import torch or ray: what needs them runs as a process of its own.
"""


def main() -> None:
    """The console script `shardyard`."""
    from server.cli.app import run

    run()
