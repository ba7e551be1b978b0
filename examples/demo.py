"""What `make demo` runs: a server, a GPT on the standard library's source, its progress, and a check of the result.

A program that uses Shardyard as any other could: it starts `shardyard serve`, talks to the REST API through
`server.cli.client` and stops the server again. Everything it makes lies in `.demo/` inside the checkout.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.cli.client import Client, Json, find_server
from server.cli.errors import CommandError
from server.cli.follow import is_at_rest
from server.cli.output import number_text

ROOT = Path(__file__).resolve().parent.parent
SHARDYARD = [sys.executable, "-c", "from server.cli import main; main()"]

START_SECONDS = 120.0
STOP_SECONDS = 120.0


def main() -> int:
    """Run the demo; 0 when the job succeeded, learned, and nothing is left running."""
    given = arguments()
    on_terminal = sys.stdout.isatty()
    given.data_dir.mkdir(exist_ok=True)
    try:
        with server(given.data_dir) as client:
            passed = train(client, given, on_terminal)
            if on_terminal:
                stay_up(client)
    except CommandError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return error.exit_code
    left = processes_left(given.data_dir)
    for line in left:
        print(f"still running: {line}", file=sys.stderr)
    return 0 if passed and not left else 1


def arguments() -> argparse.Namespace:
    """What to train, where, and how much it has to learn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, default=ROOT / "examples" / "gpt_stdlib.yaml")
    parser.add_argument("--data-dir", type=Path, default=ROOT / ".demo")
    parser.add_argument("--least-drop", type=float, default=2.5, help="nats that the validation loss has to fall")
    return parser.parse_args()


@contextmanager
def server(data_dir: Path) -> Iterator[Client]:
    """A server of our own on a free port, stopped with its Ray head at the end."""
    (data_dir / "port").unlink(missing_ok=True)
    with (data_dir / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*SHARDYARD, "serve", "--data-dir", str(data_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,  # a Ctrl-C of ours is not one of its own: we stop it in order
        )
    try:
        with connect(process, data_dir) as client:
            yield client
    finally:
        print("Stopping the server ...", flush=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        subprocess.run([*SHARDYARD, "stop", "--data-dir", str(data_dir)], stdout=subprocess.DEVNULL, check=False)


def connect(process: subprocess.Popen[bytes], data_dir: Path) -> Client:
    """A client of the server once it is ready."""
    print(f"Starting a server on {data_dir} (its log: serve.log in it) ...", flush=True)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if (data_dir / "port").exists():
            client = Client(find_server(None, None, data_dir))
            try:
                client.get("/readyz")
                return client
            except CommandError:
                client.close()
        time.sleep(0.05)
    said = (data_dir / "serve.log").read_text(errors="replace")[-2000:]
    raise CommandError(f"The server did not come up; the end of its log:\n{said}")


def train(client: Client, given: argparse.Namespace, on_terminal: bool) -> bool:
    """Submit the job, show it to its end and check what came out."""
    from server.cli.spec_file import as_body, read_spec

    job = client.post("/v1/jobs", as_body(read_spec(given.spec, [])))
    if on_terminal:
        print(f"Watch it in a browser: {login_link(client)}")
        show_bar(client, job["id"])
    else:
        show_lines(client, job["id"])
    return check(client, client.get(f"/v1/jobs/{job['id']}"), given.least_drop)


def login_link(client: Client) -> str:
    """The dashboard's address with the token in it, as `shardyard token` prints it."""
    return f"{client.address.url}/login?token={client.address.token}"


def show_bar(client: Client, job_id: str) -> None:
    """The progress bar of `shardyard watch`."""
    import typer

    from server.cli.connection import Session
    from server.cli.follow import follow
    from server.cli.output import Output

    try:
        follow(Session(client, Output()), job_id)
    except typer.Exit as ended:
        if ended.exit_code == 130:
            raise CommandError("Interrupted.", 130) from None


def show_lines(client: Client, job_id: str) -> None:
    """A line per tenth of the way and per change of state or of what it waits for."""
    shown: tuple[str, str, int] | None = None
    for _ in client.changes(job_id):
        job = client.get(f"/v1/jobs/{job_id}")
        waiting = job["reason"]["sentence"] if job["reason"] and job["status"] in ("queued", "starting") else ""
        mark = (job["status"], waiting, 10 * job["step"] // max(job["steps"], 1))
        if mark != shown:
            progress = waiting or f"step {job['step']}/{job['steps']}  loss {number_text(job['loss'])}"
            print(f"{job['status']:>10}  {progress}", flush=True)
        shown = mark
        if is_at_rest(job):
            return


def check(client: Client, job: Json, least_drop: float) -> bool:
    """Say what came out; whether it is what a working Shardyard gives."""
    if job["status"] != "succeeded":
        error = job.get("error") or {}
        print(f"The job {job['status']}: {(job['reason'] or {}).get('sentence', '')}\n{error.get('traceback', '')}")
        return False
    losses = evaluations(client, job["id"])
    drop = losses[0] - losses[-1]
    print(f"Trained {job['step']} steps on {job['ranks']} ranks at ZeRO stage {job['stage']}; digest {job['digest']}.")
    print(f"Validation loss {losses[0]:.3f} -> {losses[-1]:.3f}, {drop:.2f} nats lower.")
    if drop < least_drop:
        print(f"That is less than the {least_drop} nats expected.")
    return drop >= least_drop


def evaluations(client: Client, job_id: str) -> list[float]:
    """The validation loss before the first step, ..., after the last."""
    metrics = client.get(f"/v1/jobs/{job_id}/metrics", names="eval_loss", width=1000)
    points = [point for series in metrics["series"] if not series["branch"] for point in series["points"]]
    return [point["value"] for point in sorted(points, key=lambda point: point["step"])]


def stay_up(client: Client) -> None:
    """Keep the dashboard up until Ctrl-C."""
    print(f"\nThe dashboard stays up: {login_link(client)}")
    print("Try there: resume the job with more steps on one rank at stage 3. Press Ctrl-C here to stop the server.")
    try:
        signal.pause()
    except KeyboardInterrupt:
        print()


def processes_left(data_dir: Path) -> list[str]:
    """Processes that carry the demo's folder in their command line or environment."""
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:  # it ended meanwhile, or it is somebody else's
            continue
        if int(entry.name) != os.getpid() and command and os.fsencode(data_dir.resolve()) in command + environment:
            left.append(f"{entry.name} {command.replace(bytes(1), b' ').decode(errors='replace')[:100]}")
    return left


if __name__ == "__main__":
    sys.exit(main())
