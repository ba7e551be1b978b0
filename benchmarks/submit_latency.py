"""How fast the service is at what it is for: submit, cancel, adopt, stay small. Prints tables, writes JSON on request.

    python benchmarks/submit_latency.py [--repeats 11] [--peers [--ray-train-python PYTHON]] [--json FILE]

Starts a service of its own in a temporary folder (its own Ray head, SQLite, a free port) and measures, on 2 CPU ranks:
    submit     from before POST /v1/jobs to the end of the first optimizer step, `mlp` on `digits`, warm node
               (idle Ray workers had time to be filled up again), and back to back (they had not)
    cancel     from before POST .../cancel to the status `cancelled`, which is set after the release was seen
    adoption   kill -9 of the server: from the restarted API's first answer to the event `attempt.adopted`
    recovery   kill -9 of a rank that trains: to each phase and the first step of the next attempt, from a checkpoint
    memory     PSS by process with nothing running
    peers      the same model under torchrun and Ray Train, from the start of the command; Ray Train on a warm head of
               its own, in an interpreter of its own (without one the commands that make it are printed)
All times are seconds of one wall clock: everything runs on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from server.controller import ray_head
from server.controller.ray_head import HEAD_MARK, find_head, ray_environment, stop_head
from workers.process_table import PROC, marked, proportional_bytes

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"submit, warm": 1.0, "cancel to released": 2.0, "restart to adopted": 3.0}
PHASES = ("decided", "started", "joining", "building", "training", "first step")
WARM_SECONDS = 5.0  # the agent fills the idle workers up 2 s after a launch
MiB = 2**20


def spec(steps: int, **train: Any) -> dict[str, Any]:
    """The measured job: two ranks, one micro-batch each."""
    return {
        "name": "latency",
        "model": {"kind": "mlp"},
        "data": {"kind": "digits"},
        "train": {"steps": steps, "global_batch": 16, "micro_batch": 8, **train},
        "resources": {"ranks": 2, "device": "cpu"},
        "checkpoint": {"every": 0},
    }


def until(look: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The first true value of `look`, asked every 10 ms."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {value!r} after {seconds} s")
        time.sleep(0.01)
    return value


@dataclass
class Service:
    """A service of our own in a folder."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    client: httpx.Client = field(default_factory=httpx.Client)

    def start(self) -> float:
        """Start it; returns when (time.time) it first answered /healthz."""
        (self.folder / "port").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from server.cli import main; main()", "serve", "--data-dir", str(self.folder)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        port = until(lambda: (self.folder / "port").exists() and (self.folder / "port").read_text().strip())
        token = (self.folder / "token").read_text().strip()
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {token}"}, timeout=60
        )
        until(self._answers)
        return time.time()

    def _answers(self) -> bool:
        try:
            return self.client.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def wait_for_nodes(self) -> None:
        """Until the cluster shows a node: Ray is up and connected."""
        until(lambda: self.client.get("/v1/nodes").json().get("items"), 180.0)

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        answer = self.client.post(path, json=body if body is not None else {})
        answer.raise_for_status()
        return dict(answer.json())

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.client.get(f"/v1/jobs/{job_id}").json())

    def wait_status(self, job_id: str, *statuses: str) -> dict[str, Any]:
        return dict(until(lambda: (job := self.job(job_id))["status"] in statuses and job))

    def spool(self, job_id: str) -> list[dict[str, Any]]:
        """Records that rank 0 of the newest attempt wrote."""
        items = self.client.get(f"/v1/jobs/{job_id}/attempts").json()["items"]
        attempt = max(items, key=lambda item: int(item["number"]))["id"]
        lines = (self.folder / "ranks" / attempt / "0" / "spool.jsonl").read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]  # the last one may be half written

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(120)


@contextlib.contextmanager
def running_service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="sy-bench-") as folder:
        service = Service(Path(folder))
        try:
            service.start()
            service.wait_for_nodes()
            yield service
        finally:
            service.stop()


def seconds_since(moment: float, text: str) -> float:
    return datetime.fromisoformat(text).timestamp() - moment


def submit_once(service: Service) -> dict[str, float]:
    """Seconds from before the POST to each phase of rank 0 and to the end of the first step."""
    begun = time.time()
    job_id = service.post("/v1/jobs", spec(steps=1_000_000, eval={"every": 0}))["id"]
    job = until(lambda: (job := service.job(job_id))["step"] >= 1 and job)
    seen = {"decided": seconds_since(begun, job["started_at"])}
    records = service.spool(job_id)  # it is removed once all of it was applied
    service.post(f"/v1/jobs/{job_id}/kill")
    service.wait_status(job_id, "cancelled")
    for record in records:
        if record["kind"] == "phase":
            seen.setdefault(record["phase"], seconds_since(begun, record["at"]))
        elif record["kind"] == "points" and record["step"] == 1:
            seen["first step"] = seconds_since(begun, record["at"])
    return {phase: seen[phase] for phase in PHASES}


def measure_submit(service: Service, repeats: int, pause: float) -> list[dict[str, float]]:
    waiter, seen = threading.Event(), []
    for _ in range(repeats):
        waiter.wait(pause)
        seen.append(submit_once(service))
    return seen


def train_for_ever(service: Service) -> str:
    """A job whose steps take a few milliseconds, once it trains."""
    job = service.post("/v1/jobs", spec(steps=1_000_000, eval={"every": 0}))
    until(lambda: service.job(job["id"])["step"] >= 5)
    return str(job["id"])


def cancel_once(service: Service) -> float:
    job_id = train_for_ever(service)
    begun = time.time()
    service.post(f"/v1/jobs/{job_id}/cancel")
    service.wait_status(job_id, "cancelled")
    return time.time() - begun


def adopt_once(service: Service) -> float:
    """From the restarted API's first answer to the adoption, as the event's time says (0 when it came before)."""
    job_id = train_for_ever(service)
    service.kill9()
    answered = service.start()

    def adopted() -> str | None:
        events = service.client.get(f"/v1/jobs/{job_id}/events").json()["items"]
        return next((event["at"] for event in events if event["action"] == "attempt.adopted"), None)

    seconds = max(seconds_since(answered, until(adopted)), 0.0)
    service.post(f"/v1/jobs/{job_id}/kill")
    service.wait_status(job_id, "cancelled")
    return seconds


def recover_once(service: Service) -> dict[str, float]:
    """Seconds from the kill of rank 1 to each phase of the next attempt and to its first step."""
    wish = spec(steps=1_000_000, eval={"every": 0})
    job_id = service.post("/v1/jobs", {**wish, "checkpoint": {"every": 200}})["id"]
    attempts = f"/v1/jobs/{job_id}/attempts"
    until(lambda: service.client.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"])
    victim = service.job(job_id)["current_attempt"]["rank_states"][1]["pid"]
    begun = time.time()
    os.kill(victim, signal.SIGKILL)
    until(lambda: (first := service.client.get(attempts).json()["items"][0])["number"] == 2 and first["last_step"])
    records = service.spool(job_id)
    service.post(f"/v1/jobs/{job_id}/kill")
    service.wait_status(job_id, "cancelled")
    seen: dict[str, float] = {}
    for record in records:
        if record["kind"] == "phase":
            seen.setdefault(record["phase"], seconds_since(begun, record["at"]))
        elif record["kind"] == "points":
            seen.setdefault("first step", seconds_since(begun, record["at"]))
    return {phase: seen[phase] for phase in (*PHASES[1:-1], "restoring", "first step") if phase in seen}


def idle_memory(service: Service) -> dict[str, int]:
    """PSS in bytes by kind of process: the head and all below it, the driver, the server."""
    head = find_head(service.folder)
    assert head is not None and service.process is not None
    pids = {process.pid for process in marked({HEAD_MARK: head.mark})}
    pids |= {process.pid for process in marked({"RAY_AUTH_TOKEN_PATH": head.token_path})} | {service.process.pid}
    sizes: dict[str, int] = {}
    for pid in sorted(pids):
        size = proportional_bytes(pid)
        if size:
            kind = kind_of(pid)
            sizes[kind] = sizes.get(kind, 0) + size
    return sizes


def kind_of(pid: int) -> str:
    """What a process is, from its command line."""
    line = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    known = {
        "workers.zygote": "zygote",
        "server.controller.ray_driver": "Ray driver",
        "from server.cli": "server (API and controller)",
        "ray::IDLE": "idle Ray workers",
        "ray::NodeAgent": "node agent",
        "gcs_server": "Ray GCS",
        "raylet/raylet": "raylet",
    }
    return next((name for part, name in known.items() if part in line), "other processes of Ray")


def peer_torchrun() -> float | str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return run_peer(command, [], dict(os.environ))


def ray_train_wish() -> str:
    """How to get Ray Train: it needs packages that the service does not, so it has an environment of its own."""
    return (
        "Ray Train: not measured. In the folder of the checkout:\n"
        f"    {sys.executable} -m venv .venv/ray-train\n"
        "    .venv/ray-train/bin/python -m pip install -c constraints.txt 'ray[train]' torch scikit-learn\n"
        "    python benchmarks/submit_latency.py --peers --ray-train-python .venv/ray-train/bin/python"
    )


@contextlib.contextmanager
def ray_train_head(python: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A warm head of that interpreter, on loopback: its address and what a driver needs in its environment."""
    with tempfile.TemporaryDirectory(prefix="sy-bench-") as name:
        folder = Path(name)
        program = f"from pathlib import Path; from {ray_head.__name__} import start_head as s; s(Path({name!r}), 4)"
        subprocess.run([python, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        head = find_head(folder)
        assert head is not None, f"{folder}: no head came up"
        try:
            yield head.address, os.environ | ray_environment(head.token_path, local=True)
        finally:
            stop_head(folder)


def measure_ray_train(python: Path, repeats: int) -> list[float | str]:
    with ray_train_head(python) as (address, environment):
        return [run_peer([str(python)], ["ray", address], environment) for _ in range(repeats)]


def run_peer(command: list[str], arguments: list[str], environment: dict[str, str]) -> float | str:
    """Seconds from the start of the command to its first step; its last words when it took none."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        done = subprocess.run(
            [*command, str(ROOT / "benchmarks" / "submit_peers.py"), *arguments],
            capture_output=True,
            text=True,
            env=environment | {"PEER_FOLDER": folder},
        )
        step = Path(folder, "first-step")
        if step.exists():
            return float(step.read_text()) - begun
    words = [line for line in done.stderr.splitlines() if line.strip()]
    return words[-1] if words else f"exit code {done.returncode}"


def show_peer(name: str, runs: list[float | str]) -> dict[str, float] | None:
    measured = [seconds for seconds in runs if isinstance(seconds, float)]
    if measured:
        return show(name, measured)
    print(f"{name}: {runs[0]}")
    return None


def show(name: str, seconds: list[float]) -> dict[str, float]:
    """Print a row: median, least, greatest; and whether the target is met."""
    row = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "n": float(len(seconds))}
    target = TARGETS.get(name)
    verdict = "" if target is None else f"   target {target} s: {'met' if row['median'] <= target else 'MISSED'}"
    print(f"{name:24} {row['median']:7.3f} {row['min']:7.3f} {row['max']:7.3f}  n={len(seconds)}{verdict}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--peers", action="store_true", help="torchrun too, and Ray Train where it is")
    parser.add_argument("--ray-train-python", type=Path, help="with --peers: an interpreter that has ray[train]")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    repeats = options.repeats
    numbers: dict[str, Any] = {"load_before": os.getloadavg()[0], "cpus": os.cpu_count()}
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n{'seconds':24}  median     min     max")
    with running_service() as service:
        measure_submit(service, 2, WARM_SECONDS)  # the first launch waits for the zygote
        warm = measure_submit(service, repeats, WARM_SECONDS)
        numbers["submit"] = show("submit, warm", [row["first step"] for row in warm])
        numbers["phases"] = {phase: statistics.median(row[phase] for row in warm) for phase in PHASES}
        print("   by phase: " + ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in numbers["phases"].items()))
        in_a_row = measure_submit(service, max(repeats // 2, 1), 0.0)
        numbers["in_a_row"] = show("submit, back to back", [row["first step"] for row in in_a_row])
        numbers["cancel"] = show("cancel to released", [cancel_once(service) for _ in range(max(repeats // 2, 1))])
        numbers["adopt"] = show("restart to adopted", [adopt_once(service) for _ in range(3)])
        recovered = [recover_once(service) for _ in range(3)]
        numbers["recovery"] = show("killed rank to first step", [row["first step"] for row in recovered])
        numbers["recovery_phases"] = {name: statistics.median(row[name] for row in recovered) for name in recovered[0]}
        print("   by phase: " + ", ".join(f"{name} {s:.3f}" for name, s in numbers["recovery_phases"].items()))
        threading.Event().wait(2 * WARM_SECONDS)
        numbers["idle"] = idle_memory(service)
    if options.peers:
        numbers["torchrun"] = show_peer("torchrun", [peer_torchrun() for _ in range(3)])
    if options.peers and options.ray_train_python is not None:
        python = options.ray_train_python.absolute()  # not resolved: a venv's python is a link
        numbers["ray_train"] = show_peer("Ray Train", measure_ray_train(python, 2))
    elif options.peers:
        print(ray_train_wish())
    print("\nidle, MiB of PSS by process")
    for kind, size in sorted(numbers["idle"].items(), key=lambda item: -item[1]):
        print(f"{kind:30} {size / MiB:8.0f}")
    print(f"{'in all':30} {sum(numbers['idle'].values()) / MiB:8.0f}   (aim: under 1800)")
    if options.json is not None:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
