"""One rank's part of an attempt inside a standing rank: the loop, the saves and the reports of the real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from tests.distributed.checkpoint_faults import GatedStore
from tests.distributed.rank_pool import Rank
from workers.build import build_model, loss_of, optimizer_of
from workers.contract import SPOOL_FILE, AttemptId, JobId, LaunchOrder, ResumeFrom
from workers.contract import Rank as RankNumber
from workers.data.batches import Batch
from workers.data.opening import open_data
from workers.planner import engine_config
from workers.reporter import Phase, Reporter
from workers.restoring import Progressed, restore
from workers.saving import StoreSaving
from workers.spec import read_spec_file
from workers.training import Training
from zero_engine import Engine
from zero_engine.store import LocalStore, Store

SPEC = """\
name: mlp
model: {kind: mlp, hidden: [16, 12]}
data: {kind: digits}
train: {steps: 6, eval: {every: 0}, schedule: {kind: constant}}
zero: {stage: 2}
resources: {ranks: 2, device: cpu}
checkpoint: {every: 1, keep_latest: 9}
"""


class Attempt:
    """Training under the fence `fence` in folder `root`, with a store of the test's choice."""

    def __init__(
        self,
        rank: Rank,
        root: str,
        changes: list[str],
        store: Store | None = None,
        fence: int = 1,
        resume: ResumeFrom | None = None,
        until: int | None = None,
    ) -> None:
        self.folder = Path(root, f"rank-{rank.rank}-{fence}")
        self.folder.mkdir(parents=True)
        (self.folder / "spec.yaml").write_text(SPEC)
        spec = read_spec_file(self.folder / "spec.yaml", changes)
        self.order = LaunchOrder(
            job_id=JobId("j"), attempt_id=AttemptId("a"), fence=fence, rank=RankNumber(rank.rank),
            world_size=rank.ranks, master_addr="", master_port=0, device="cpu", spec=spec, chunk=spec.chunk,
            rank_folder=str(self.folder), cache_folder=str(self.folder), store_url=str(Path(root, "store")),
            resume=resume, until=until,
        )  # fmt: skip
        data = open_data(spec, self.folder, print)
        stage = spec.zero.stage
        assert stage != "auto"
        config = engine_config(spec, spec.chunk, stage)
        self.engine = Engine(build_model(spec, data), config, optimizer_of(spec.train.optimizer), rank.group)
        self.reporter = Reporter(self.folder)
        self.saving = StoreSaving(self.order, self.engine, data, self.reporter)
        self.saving._store = store or LocalStore(self.order.store_url)
        loss = loss_of(self.engine.module)
        self.samples: dict[tuple[int, int], str] = {}  # (step, micro-batch) -> hash of what was read
        self.training = Training(self.order, self.engine, data, loss, self.reporter, self.saving)
        micro_batch = data.micro_batch

        def noted(step: int, index: int) -> Batch:
            batch = micro_batch(step, index)
            self.samples[step, index] = xxhash.xxh3_64_hexdigest(batch.inputs.numpy().tobytes())
            return batch

        data.micro_batch = noted  # type: ignore[method-assign]
        self.data = data

    def run(self, at_step: Callable[[int], None] = lambda completed: None) -> str:
        """Train; how it ended: "finished", "stopped", or the error's class and words. `at_step`: called before each."""
        step = self.training._step

        def watched(completed: int) -> Any:
            at_step(completed)
            return step(completed)

        self.training._step = watched  # type: ignore[method-assign]
        try:
            progressed = Progressed()
            if self.order.resume is not None:
                progressed = restore(self.order, self.order.resume, self.engine, self.data, self.reporter)
            outcome: str = self.training.run(progressed)
            self.digest = self.engine.digest()
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
            self.engine.close(outcome)
        else:
            self.engine.close()
        self.reporter.close()
        return outcome

    def open_gate_when_saving(self, store: GatedStore) -> None:
        """The store hangs until this rank says that it waits for a save."""
        phase = self.reporter.phase

        def spy(name: Phase) -> None:
            if name == "saving":
                store.open_gate()
            phase(name)

        self.reporter.phase = spy  # type: ignore[assignment,method-assign]

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Its records of one kind."""
        records = [json.loads(line) for line in (self.folder / SPOOL_FILE).read_text().splitlines()]
        return [record for record in records if record["kind"] == kind]

    def events(self, action: str) -> list[dict[str, Any]]:
        """Its events of one action."""
        return [record for record in self.told("event") if record["action"] == action]
