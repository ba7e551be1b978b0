"""Commands on a server itself: serve, stop, node, token."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from server.cli.connection import AsJson, DataDir, data_folder
from server.cli.errors import BadInput, CommandError
from server.cli.output import Output


def serve(
    data_dir: DataDir = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port; without it the first free one from 8470 on.")] = None,
    database_url: Annotated[str | None, typer.Option(help="Instead of SQLite in the data folder.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="A Ray cluster instead of a head of our own.")] = None,
    store_url: Annotated[str | None, typer.Option(help="Checkpoints elsewhere: a folder or s3://...")] = None,
    public_url: Annotated[str | None, typer.Option(help="Where ranks on other machines reach this API.")] = None,
    only: Annotated[Literal["api", "controller"] | None, typer.Option(help="Only this half of the service.")] = None,
) -> None:
    """Start the whole service for this machine: API, dashboard, controller, Ray head. Ctrl-C pauses jobs and stops."""
    from server.claims import CannotServe
    from server.serve import serve as start
    from server.settings import SettingError, read_settings

    given = {
        "data_dir": data_dir,
        "host": host,
        "port": port,
        "database_url": database_url,
        "ray_address": ray_address,
        "store_url": store_url,
        "public_url": public_url,
    }
    try:
        start(read_settings(given), only=only)
    except (SettingError, CannotServe) as error:
        raise BadInput(str(error)) from error


def stop(data_dir: DataDir = None) -> None:
    """End what a killed server left behind: its Ray head and the jobs on it; the next serve resumes them."""
    from server.controller.ray_head import HeadFailed, stop_head

    folder = data_folder(data_dir)
    try:
        stopped = stop_head(folder)
    except HeadFailed as error:
        raise CommandError(str(error)) from error
    Output().say(f"Stopped the Ray head of {folder}." if stopped else f"Nothing of {folder} was running.")


def node(
    address: Annotated[str | None, typer.Option(help="Join the cluster whose head is at HOST:PORT.")] = None,
    head: Annotated[bool, typer.Option("--head", help="Be the head of a new cluster of several machines.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the head.")] = 6379,
    slots: Annotated[int | None, typer.Option(min=1, help="CPU ranks this machine may hold.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to offer; without it all there are.")] = None,
    own_address: Annotated[str | None, typer.Option(help="Address of this machine that the others reach.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the cluster's token; else RAY_AUTH_TOKEN.")] = None,
) -> None:
    """Add this machine to a cluster, or begin one, and stay in the foreground."""
    from server.cli.ray_node import NodeOrder, node_command, node_environment
    from server.controller.ray_head import ray_environment
    from server.settings import CPU_SLOTS

    if head == (address is not None):
        raise BadInput("Say either --address HOST:PORT, to join a cluster, or --head, to begin one.")
    if token_file is None and not os.environ.get("RAY_AUTH_TOKEN"):
        raise BadInput("The machines of a cluster share a secret: set RAY_AUTH_TOKEN, or give --token-file.")
    if token_file is not None and not token_file.is_file():
        raise BadInput(f"{token_file} is not there.")
    order = NodeOrder(head, address, port, slots or CPU_SLOTS, gpus, own_address)
    command = node_command(order)
    os.execve(command[0], command, node_environment(os.environ, ray_environment("", local=False), token_file))


def token(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Print the admin token and the login link of the server here."""
    folder = data_folder(data_dir)
    path = folder / "token"
    if not path.is_file():
        raise CommandError(f"{path} is not there: the first `shardyard serve` makes it.")
    text = path.read_text().strip()
    port = _read_port(folder / "port")
    link = f"http://127.0.0.1:{port}/login?token={text}" if port else None
    output = Output(as_json)
    if as_json:
        output.line({"token": text, "link": link})
        return
    print(text)  # alone on stdout, so that $(shardyard token) works
    if link and output.terminal:
        output.say(f"Log in: {link}")


def _read_port(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
