"""One real Ray head for all tests of the process path, ranks with a scripted body, and a sink for their reports."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

from server.controller.cluster import AttemptState, ClusterState, Launch
from server.controller.ray_driver import RayDriver, connect_local
from server.controller.ray_head import find_head, stop_head
from server.controller.ray_target import RayOptions
from tests.service.report_sink import ReportSink
from tests.waiting import wait_for
from workers.contract import AttemptId, JobId, LaunchOrder, Rank
from workers.process_table import PROC, marked
from workers.spec import JobSpec

SLOTS = 4
BODY = RayOptions(
    entry="ray_rank_body:start",
    preload="workers.contract,torch.distributed",
    warm_workers=2,
    path=(str(Path(__file__).parent),),
)


def abandoned_shared_memory() -> set[str]:
    """Files of /dev/shm that no living process maps or holds open: what somebody left behind.

    Not what sessions of tests beside this one have there: their own folders, and segments of their databases.
    """
    held = ""
    for process in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            held += process.joinpath("maps").read_text()
            held += "".join(os.readlink(link) for link in process.joinpath("fd").iterdir())
    others = re.compile(r"sy-t-\w+-memory|PostgreSQL\.\d+")
    return {name for name in os.listdir("/dev/shm") if f"/dev/shm/{name}" not in held and not others.fullmatch(name)}


class Harness:
    """A head, a driver, a sink, and a way to launch scripted ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster: RayDriver = connect_local(folder, SLOTS, options=BODY)
        self.sink = ReportSink()
        self.cluster.open()

    @property
    def scratch(self) -> str:
        """Ray's temp folder, where the agent's folder stands too."""
        head = find_head(self.folder)
        assert head is not None, "the head is gone"
        return head.temp

    def order(
        self, ranks: int = 2, steps: int = 5, tags: tuple[str, ...] = (), orphan_seconds: float = 600.0
    ) -> Launch:
        """A launch of the scripted body; see `ray_rank_body` for the tags."""
        attempt, job = AttemptId(str(uuid.uuid4())), JobId(str(uuid.uuid4()))
        folder = self.folder / "ranks" / attempt
        spec = JobSpec.model_validate(
            {
                "name": "scripted",
                "tags": list(tags),
                "model": {"kind": "mlp"},
                "data": {"kind": "digits"},
                "train": {"steps": steps, "global_batch": 4 * max(ranks, 4)},
                "resources": {"ranks": ranks},
            }
        )
        orders = tuple(
            LaunchOrder(
                job_id=job,
                attempt_id=attempt,
                fence=1,
                rank=Rank(rank),
                world_size=ranks,
                master_addr="",
                master_port=0,
                device="cpu",
                spec=spec,
                chunk=1,
                rank_folder=str(folder / str(rank)),
                cache_folder=str(self.folder / "cache"),
                store_url=str(self.folder / "store"),
            )
            for rank in range(ranks)
        )
        return Launch(job, attempt, 1, orders, self.sink.url, f"token-{attempt}", orphan_seconds)

    def launch(self, ranks: int = 2, steps: int = 5, tags: tuple[str, ...] = ()) -> Launch:
        launch = self.order(ranks, steps, tags)
        self.cluster.launch(launch)
        return launch

    def observe(self) -> ClusterState:
        return self.cluster.observe()

    def attempt(self, launch: Launch) -> AttemptState | None:
        """The attempt as the cluster sees it now."""
        found = [a for a in self.observe().attempts if a.attempt_id == launch.attempt_id]
        return found[0] if found else None

    def until(self, launch: Launch, condition: Callable[[AttemptState], bool]) -> AttemptState:
        """The attempt once it meets the condition."""

        def look() -> AttemptState | None:
            state = self.attempt(launch)
            return state if state is not None and condition(state) else None

        state = wait_for(look, "the attempt", lambda: self.attempt(launch))
        assert state is not None
        return state

    def until_step(self, launch: Launch, step: int) -> AttemptState:
        """The attempt once every rank has made a step."""
        return self.until(launch, lambda state: all(rank.step >= step for rank in state.ranks))

    def until_exited(self, launch: Launch) -> AttemptState:
        return self.until(launch, lambda state: all(rank.status == "exited" for rank in state.ranks))

    def until_closed(self, launch: Launch) -> None:
        """All reports of all ranks are in the sink."""
        keys = {(str(launch.attempt_id), rank) for rank in range(len(launch.orders))}
        wait_for(lambda: keys <= self.sink.closed, what=f"{keys} of {self.sink.closed}")

    def processes(self, launch: Launch) -> list[int]:
        """Pids that carry the attempt's mark."""
        return [process.pid for process in marked({"SHARDYARD_ATTEMPT": launch.attempt_id})]

    def free_slots(self) -> int:
        return sum(node.free_slots for node in self.observe().nodes)

    def released(self, launch: Launch) -> None:
        """Release, and hold what the protocol promises: not listed, no process, all slots free again."""
        self.cluster.release(launch.attempt_id)
        assert self.attempt(launch) is None
        assert self.processes(launch) == []
        wait_for(lambda: self.free_slots() == SLOTS, what="slots are free again")

    def close(self) -> None:
        self.cluster.close()
        self.sink.close()
        stop_head(self.folder)
