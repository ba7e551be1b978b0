"""Our own Ray head: on loopback alone, closed to strangers, found again, and gone when it is stopped."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from server.controller.cluster import ClusterUnavailable
from server.controller.ray_driver import RayDriver, connect_local
from server.controller.ray_head import HEAD_MARK, Head, find_head, start_head, stop_head
from tests.service.ray_harness import BODY, SLOTS, Harness, abandoned_shared_memory
from tests.waiting import PATIENCE_SECONDS, wait_for
from workers.process_table import PROC, marked, send_signal, wait_gone

LISTENING = "0A"  # state of a socket in /proc/net/tcp
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listening(pids: list[int]) -> dict[str, set[str]]:
    """Local addresses (hexadecimal, as the kernel shows them) on which these processes listen, by ":port"."""
    inodes = set()
    for pid in pids:
        for link in (PROC / str(pid) / "fd").glob("*"):
            try:
                inodes.add(os.readlink(link))
            except OSError:  # closed or gone meanwhile
                continue
    found: dict[str, set[str]] = {}
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes:
                found.setdefault(port, set()).add(address)
    return found


def pids_below(folder: Path) -> list[int]:
    """Processes of this data folder's head: its parts, the driver, workers, agents, zygotes and ranks."""
    token = f"RAY_AUTH_TOKEN_PATH={folder}".encode()
    head = find_head(folder)
    assert head is not None
    found = [process.pid for process in marked({HEAD_MARK: head.mark})]
    for entry in PROC.glob("[0-9]*"):
        try:
            if token in entry.joinpath("environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # another user's, or gone
            continue
    return found


def test_every_port_is_on_loopback(ray: Harness) -> None:
    """Head, workers, driver, agent and ranks of a running job listen on 127.0.0.1 and ::1 only, as the kernel says."""
    launch = ray.launch(ranks=2, steps=10_000)
    ray.until_step(launch, 1)
    pids = pids_below(ray.folder)
    assert set(ray.processes(launch)) <= set(pids)
    ports = listening(pids)
    assert len(ports) > 8, "GCS, raylet, agents, workers and the ranks' rendezvous were expected"
    assert {address for addresses in ports.values() for address in addresses} <= LOOPBACK


def test_socket_paths_stay_below_the_kernels_limit(ray: Harness) -> None:
    """A unix socket's path has at most 107 bytes, whatever the data folder is called."""
    paths = [str(path) for path in Path(ray.scratch).rglob("*") if path.is_socket()]
    assert paths and max(len(path.encode()) for path in paths) <= 107


def test_secrets_are_for_their_owner_alone(ray: Harness) -> None:
    """The token file has mode 0600; the temp folder, with the attempts' report tokens, 0700."""
    head = find_head(ray.folder)
    assert head is not None
    assert stat.S_IMODE(os.stat(head.token_path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(head.temp).st_mode) == 0o700
    launch = ray.launch(ranks=1, steps=10_000)
    (folder,) = Path(ray.scratch).glob("node-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    register = list((folder / "ranks").glob(f"{launch.attempt_id}.*"))
    assert register and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in register)


STRANGER = """
import sys, grpc, ray
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(grpc.insecure_channel(sys.argv[1]))
metadata = [("authorization", "Bearer " + sys.argv[2])] if len(sys.argv) > 2 else []
try:
    reply = stub.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), metadata=metadata, timeout=100)
    print("answered", len(reply.node_info_list))
except grpc.RpcError as error:
    print(error.code().name)
"""


def ask_head(*arguments: str) -> str:
    """What the head answers to somebody with this address and, maybe, this token."""
    command = [sys.executable, "-c", STRANGER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True).stdout.strip()


def test_a_stranger_without_the_token_is_refused(ray: Harness) -> None:
    """Who reaches the port but cannot read the token learns nothing; with it the same question is answered."""
    head = find_head(ray.folder)
    assert head is not None
    assert ask_head(head.address) == "UNAUTHENTICATED"
    assert ask_head(head.address, "0" * 64) == "UNAUTHENTICATED"
    assert ask_head(head.address, Path(head.token_path).read_text()) == "answered 1"


def test_a_head_is_adopted_replaced_when_dead_and_stopped_whole(tmp_path: Path) -> None:
    """One head per data folder. Killed with -9 it is replaced by the next calls; stopped, nothing of it is left."""
    shared = abandoned_shared_memory()
    cluster = connect_local(tmp_path, 2, options=BODY)
    try:
        cluster.open()
        head = find_head(tmp_path)
        assert head is not None and start_head(tmp_path, 2) == head
        assert os.getsid(head.pid) == head.pid
        assert send_signal(head.process, signal.SIGKILL) and wait_gone(head.process, PATIENCE_SECONDS)
        wait_for(lambda: replaced(cluster, tmp_path, head), "a new head answers")
        assert [node.slots for node in cluster.observe().nodes] == [2]
    finally:
        cluster.close()
        assert stop_head(tmp_path)
    assert find_head(tmp_path) is None and not stop_head(tmp_path)
    assert list(marked({HEAD_MARK: head.mark})) == []
    assert not Path(head.temp).exists()
    wait_for(lambda: abandoned_shared_memory() <= shared, "shared memory is back")


def replaced(cluster: RayDriver, folder: Path, old: Head) -> Head | None:
    """The new head once the cluster answers again; until then calls say ClusterUnavailable and end nothing."""
    try:
        cluster.observe()
    except ClusterUnavailable:
        return None
    head = find_head(folder)
    return head if head is not None and head != old else None


def test_a_temp_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who made the folder first could read our tokens: it is named and not used."""
    from server.controller import ray_head

    monkeypatch.setattr(ray_head, "_temp_path", lambda folder: tmp_path / "link")
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(ray_head.HeadFailed, match="link"):
        start_head(tmp_path, SLOTS)
