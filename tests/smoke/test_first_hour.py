"""What a user does in the first hour, through the console script, HTTP and Ray, to a finished job."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gated import STANDS_AFTER, STEPS, Gate, told_to_stop
from tests.running_service import RUN_SECONDS, SHARDYARD, Service, processes_naming
from tests.smoke.specs import digits_spec
from tests.waiting import PATIENCE_SECONDS, wait_for


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def run_here(spec: str, *words: str) -> list[dict[str, object]]:
    """`shardyard run --json`: one object per step and the summary."""
    run = subprocess.run(
        [SHARDYARD, "run", spec, "--json", *words], capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_job_goes_through_http_and_ray_to_its_end(service: Service) -> None:
    """Submitted, planned, queued, launched, trained, evaluated, saved; every view of it answers."""
    job_id = service.submit(digits_spec("first", steps=30))
    job = service.wait(job_id, lambda job: job["status"] == "succeeded")
    assert job["step"] == 30 and len(job["digest"]) == 16 and job["loss"] < 2.0
    metrics = service.client.get(f"/v1/jobs/{job_id}/metrics", names="loss", width=1000)
    assert [point["step"] for point in metrics["series"][0]["points"]] == list(range(1, 31))
    steps = {item["step"] for item in service.client.items(f"/v1/jobs/{job_id}/checkpoints", 100)}
    assert 30 in steps
    for view in ("events", "attempts", "memory", "ledger", "logs", "plan", "explain"):
        assert service.client.get(f"/v1/jobs/{job_id}/{view}")


@pytest.fixture(scope="module")
def whole(service: Service) -> str:
    """The digest of an undisturbed run of the gated job."""
    gate = Gate(service.folder / "whole.gate")
    job_id = service.submit(gate.spec("whole"))
    gate.open()
    return str(service.wait(job_id, lambda job: job["status"] == "succeeded")["digest"])


@dataclass(frozen=True)
class Standing:
    """A job that stands at its gate in mid-training."""

    service: Service
    job_id: str
    attempt_id: str
    gate: Gate

    def stop(self) -> None:
        """Open the gate once every rank was told to leave at its next step boundary."""
        told = lambda: told_to_stop(self.service.folder, self.attempt_id)  # noqa: E731
        wait_for(told, "the ranks were told", self.service.log_tail)
        self.gate.open()


def standing(service: Service, name: str) -> Standing:
    """Submit a gated job and wait until it stands."""
    gate = Gate(service.folder / f"{name}.gate")
    job_id = service.submit(gate.spec(name))
    job = service.wait(job_id, lambda job: job["step"] >= STANDS_AFTER - 2)
    return Standing(service, job_id, job["current_attempt"]["id"], gate)


def test_cancelled_and_resumed_on_one_rank_at_stage_3_it_ends_with_the_same_bits(service: Service, whole: str) -> None:
    """The first promise, as a user meets it: equal digests, whatever happened in between."""
    broken = standing(service, "broken")
    job_id = broken.job_id
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    broken.stop()
    cancelled = service.wait(job_id, lambda job: job["status"] == "cancelled")
    assert STANDS_AFTER - 2 <= cancelled["step"] < STEPS
    assert service.run("resume", job_id, "--ranks", "1", "--stage", "3").returncode == 0
    resumed = service.wait(job_id, lambda job: job["status"] == "succeeded")
    assert resumed["attempt"] == 2 and resumed["digest"] == whole


def test_the_command_line_follows_a_job_and_takes_its_weights_out(service: Service, tmp_path: Path) -> None:
    """submit --follow, show, logs, checkpoints, export: piped, so JSON."""
    spec = write(tmp_path / "spec.yaml", digits_spec("followed"))
    followed = service.run("submit", spec, "--follow")
    assert followed.returncode == 0, followed.stderr
    last = json.loads(followed.stdout.splitlines()[-1])
    assert last["status"] == "succeeded" and last["step"] == 30
    job_id = last["id"]
    assert json.loads(service.run("show", job_id).stdout)["attempts"][0]["number"] == 1
    assert service.run("logs", job_id).returncode == 0
    assert json.loads(service.run("checkpoints", job_id).stdout)
    target = tmp_path / "model.safetensors"
    exported = service.run("export", job_id, "-o", str(target))
    assert exported.returncode == 0, exported.stderr
    (length,) = struct.unpack("<Q", target.read_bytes()[:8])
    names = set(json.loads(target.read_bytes()[8 : 8 + length])) - {"__metadata__"}
    assert names == {f"layers.{n}.{part}" for n in range(3) for part in ("weight", "bias")}


def test_run_without_a_service_gives_the_same_bits(service: Service, tmp_path: Path) -> None:
    """`shardyard run` is the same engine on the same order of sums: stage and ranks make no difference."""
    text = digits_spec("local", steps=20)
    digest = service.wait(service.submit(text), lambda job: job["status"] == "succeeded")["digest"]
    spec = write(tmp_path / "spec.yaml", text)
    lines = run_here(spec, "--ranks", "1", "--set", "zero.stage=0")
    assert [line["step"] for line in lines[:-1]] == list(range(1, 21)) and "summary" in lines[-1]
    assert lines[-2]["digest"] == digest


def test_a_second_server_on_the_same_folder_or_port_is_refused_in_one_line(service: Service, tmp_path: Path) -> None:
    """Exit code 2, which one it is, and what to do."""
    port = service.client.address.url.rpartition(":")[2]
    for words in (["--data-dir", str(service.folder)], ["--data-dir", str(tmp_path), "--port", port]):
        run = subprocess.run([SHARDYARD, "serve", *words], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert run.returncode == 2 and len(run.stderr.splitlines()) == 1, run.stderr
        assert "in use" in run.stderr


def test_ctrl_c_pauses_what_runs_and_the_next_serve_ends_it_with_the_same_bits(service: Service, whole: str) -> None:
    """What a person paused stays paused; what the stop paused resumes by itself; no process is left in between."""
    held, running = standing(service, "held"), standing(service, "running")
    service.client.post(f"/v1/jobs/{held.job_id}/pause")
    held.stop()
    service.wait(held.job_id, lambda job: job["status"] == "paused")
    service.process.send_signal(signal.SIGINT)
    running.stop()
    assert service.process.wait(PATIENCE_SECONDS) == 0
    assert processes_naming(service.folder) == []
    service.start_again()
    job = service.wait(running.job_id, lambda job: job["status"] == "succeeded")
    assert job["attempt"] == 2 and job["digest"] == whole
    assert service.job(held.job_id)["status"] == "paused"
