"""Steps of a run made again from one of its checkpoints, and compared: bit-exact, or where they part first.

    python -m workers.verify_resume SPEC --checkpoints STORE [--steps N] [--from FOLDER] [--recorded FILE]

The ranks are those of any attempt; what they save goes to a folder that is removed. Compared are the loss and gradient
norm of each step that was recorded, and every block of every checkpoint that stands in the store at a step on the way.
The number of ranks and the stage need not be those of the run: they never change a bit.

Note: why the store is asked in another process first. The ranks are forks of this process, and a client of S3 starts
threads that a fork does not have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from workers.contract import EventRecord, LaunchOrder, ResumeFrom
from workers.local_lines import Lines, StepLine
from workers.local_orders import local_orders
from workers.object_store import open_store
from workers.spec import JobSpec, SpecError, read_spec_file
from workers.temporary_folder import temporary_folder

if TYPE_CHECKING:
    from zero_engine.catalog import CheckpointName
    from zero_engine.manifest import Manifest

T = TypeVar("T")

EXACT, DIFFERS, CANNOT = 0, 1, 2  # exit codes
COMPARED = ("loss", "grad_norm")

Recorded = Mapping[int, Mapping[str, float]]  # by step, then by series


class CannotVerifyError(Exception):
    """There is nothing to run again, or nothing to compare with; one sentence."""


@dataclass(frozen=True)
class Rerun:
    """What is made again."""

    store: str  # url of the job's checkpoints
    start: str  # folder
    first: int  # step of that checkpoint
    until: int  # last step that is made
    milestones: tuple[tuple[int, str], ...]  # (step, folder) of the checkpoints on the way
    manifest: Manifest = field(repr=False)  # of the start


@dataclass
class Findings:
    """What comparing found so far."""

    checkpoint: str
    first_step: int
    last_step: int
    compared_steps: int = 0
    compared_checkpoints: list[str] = field(default_factory=list)
    differs_at: int | None = None  # the first step
    differs_in: list[str] = field(default_factory=list)  # series, or tensors as "kind of parameter"
    notes: list[str] = field(default_factory=list)

    def part(self, step: int, what: Sequence[str]) -> None:
        """Something differs after `step`."""
        if self.differs_at is None or step < self.differs_at:
            self.differs_at, self.differs_in = step, list(what)
        elif step == self.differs_at:
            self.differs_in += what

    @property
    def verdict(self) -> Literal["bit-exact", "differs"]:
        return "bit-exact" if self.differs_at is None else "differs"

    def sentence(self) -> str:
        """For a person."""
        what = f"{self.compared_steps} steps and {len(self.compared_checkpoints)} checkpoints after {self.checkpoint}"
        if self.differs_at is None:
            return f"Bit-exact: {what} are as they were."
        return f"Differs first at step {self.differs_at}, in {', '.join(self.differs_in[:8])} ({what} were compared)."


def choose(url: str, start: str | None, steps: int | None, recorded: Recorded) -> Rerun:
    """Which checkpoint to start from, and how far to go. Raises CannotVerifyError, CheckpointError, StoreError."""
    from zero_engine.catalog import list_checkpoints

    names = sorted(list_checkpoints(open_store(url)), key=lambda name: (name.step, name.fence))
    known = {name.folder: name for name in names}
    if not known:
        raise CannotVerifyError(f"there is no checkpoint in {url}; say with --checkpoints where they lie")
    if start is not None:
        start = start.rstrip("/").rpartition("/")[2]  # a path to it names it too
        if start not in known:
            raise CannotVerifyError(f"there is no checkpoint {start} in {url}; there are: {', '.join(known)}")
    last = max([*recorded, *(name.step for name in names)], default=0)
    candidates = [known[start]] if start is not None else [name for name in names if name.step < last]
    if not candidates or candidates[-1].step >= last:
        raise CannotVerifyError("no checkpoint has a later step to compare with; keep two, or name an older one")
    chosen = candidates[-1]
    return _rerun(url, chosen, names, steps, last)


def _rerun(url: str, chosen: CheckpointName, names: Sequence[CheckpointName], steps: int | None, last: int) -> Rerun:
    from zero_engine.catalog import read_manifest

    later = [name for name in names if name.step > chosen.step and name.fence >= chosen.fence]
    usual = later[0].step if later else last
    manifest = read_manifest(open_store(url), chosen.folder)
    until = min(last, chosen.step + steps) if steps is not None else usual
    on_the_way = {name.step: name.folder for name in later if name.step <= until}  # of one step the newest attempt
    return Rerun(url, chosen.folder, chosen.step, until, tuple(on_the_way.items()), manifest)


def in_another_process(function: Callable[..., T], *given: Any) -> T:
    """What a call returns or raises that may leave threads behind."""
    ours, theirs = Pipe(duplex=False)
    child = get_context("fork").Process(target=_answer, args=(theirs, function, given))
    child.start()
    theirs.close()
    try:
        good, value = ours.recv()
    except EOFError:
        good, value = False, CannotVerifyError("the process that asked the store ended without an answer")
    child.join()
    if not good:
        raise value
    found: T = value
    return found


def _answer(pipe: Connection, function: Callable[..., T], given: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*given)))
    except Exception as error:
        pipe.send((False, error))


def run_again(spec: JobSpec, rerun: Rerun, recorded: Recorded, data_dir: Path) -> Findings:
    """Train from the checkpoint on and compare. Raises CannotVerifyError."""
    from workers.local_ranks import LocalRanks, describe, listening_socket
    from workers.rank import main as rank_main

    findings = Findings(rerun.start, rerun.first + 1, rerun.until)
    with temporary_folder("shardyard-verify-") as folder:
        listener = listening_socket()
        orders = _orders(spec, rerun, folder, listener.getsockname()[1], data_dir)
        lines = Lines(len(orders), orders[0].chunk)
        ranks = LocalRanks(orders, listener, rank_main)
        try:
            for rank, record in ranks.records():
                line = lines.take(rank, record)
                if line is not None:
                    _compare_step(findings, line, recorded)
        finally:
            ranks.close()
        _require_the_checkpoint(lines.events, rerun)
        failed = [result for result in ranks.results() if result.outcome not in ("finished", "stopped")]
        if failed:
            raise CannotVerifyError(f"the steps could not be made again: {describe(failed[0]).strip()}")
        findings.notes += [event.message for event in lines.events if event.action == "resume.changed"]
        _compare_states(findings, rerun, str(Path(folder, "store")))
    return findings


def _orders(spec: JobSpec, rerun: Rerun, folder: Path, port: int, data_dir: Path) -> list[LaunchOrder]:
    manifest = rerun.manifest
    then = manifest.progress.schedule.get("steps", spec.train.steps)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": max(int(then), rerun.until)})})
    stage = manifest.stage if spec.zero.stage == "auto" else spec.zero.stage
    spec = spec.model_copy(update={"zero": spec.zero.model_copy(update={"stage": stage})})
    return local_orders(
        spec,
        folder,
        data_dir,
        port,
        device="cuda" if manifest.environment.device != "cpu" else "cpu",
        fence=manifest.fence,
        chunk=manifest.arithmetic.chunk,
        store_url=str(folder / "store"),
        resume=ResumeFrom(checkpoint=rerun.start, step=rerun.first, store_url=rerun.store),
        until=rerun.until,
    )


def _compare_step(findings: Findings, line: StepLine, recorded: Recorded) -> None:
    known = recorded.get(line.step)
    if known is None:
        return
    findings.compared_steps += 1
    now = asdict(line)
    unlike = [name for name in COMPARED if name in known and repr(float(known[name])) != repr(float(now[name]))]
    if unlike:
        findings.part(line.step, unlike)


def _compare_states(findings: Findings, rerun: Rerun, made: str) -> None:
    from zero_engine.catalog import list_checkpoints, read_manifest
    from zero_engine.compare import differences

    ours, theirs = open_store(made), open_store(rerun.store)
    again = {name.step: name.folder for name in list_checkpoints(ours)}
    for step, folder in rerun.milestones:
        if step not in again:
            continue
        before, now = read_manifest(theirs, folder), read_manifest(ours, again[step])
        findings.compared_checkpoints.append(folder)
        for difference in differences(before, now):
            findings.part(step, [f"{difference.kind} of {name}" for name in difference.parameters])
        if before.scalars != now.scalars:
            findings.part(step, ["step counts or loss scale"])


def _require_the_checkpoint(events: Sequence[EventRecord], rerun: Rerun) -> None:
    refused = [event.message for event in events if event.action == "checkpoint.refused"]
    if refused:
        raise CannotVerifyError(refused[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; exit code 0 bit-exact, 1 differs, 2 nothing to verify."""
    parser = argparse.ArgumentParser(prog="shardyard verify-resume", description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--checkpoints", required=True, help="folder or url where the checkpoints lie")
    parser.add_argument("--steps", type=int, help="default: to the next checkpoint")
    parser.add_argument("--from", dest="start", help="folder of the checkpoint; default: the newest with a later step")
    parser.add_argument("--recorded", type=Path, help="JSON: step to series to value")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--data-dir", type=Path, default=Path("~/.shardyard"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.steps is not None and given.steps < 1:
        parser.error("--steps must be at least 1")
    try:
        return _verify(given)
    except (CannotVerifyError, SpecError) as error:
        print(f"Cannot be verified: {error}", file=sys.stderr)
        return CANNOT


def _verify(given: argparse.Namespace) -> int:
    from zero_engine.manifest import CheckpointError
    from zero_engine.store import StoreError

    store = given.checkpoints if "://" in given.checkpoints else str(Path(given.checkpoints).expanduser().absolute())
    recorded = _read_recorded(given.recorded)
    try:
        spec = read_spec_file(given.spec, given.set)
        rerun = in_another_process(choose, store, given.start, given.steps, recorded)
        findings = run_again(spec, rerun, recorded, given.data_dir.expanduser().absolute())
    except (CheckpointError, StoreError, OSError) as error:
        raise CannotVerifyError(str(error)) from error
    if not findings.compared_steps and not findings.compared_checkpoints:
        raise CannotVerifyError(f"nothing is recorded between step {findings.first_step} and {findings.last_step}")
    _show(findings, as_json=given.json)
    return EXACT if findings.differs_at is None else DIFFERS


def _show(findings: Findings, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"verdict": findings.verdict, **asdict(findings)}))
        return
    print(findings.sentence())
    for note in findings.notes:
        print(note)


def _read_recorded(path: Path | None) -> dict[int, dict[str, float]]:
    if path is None:
        return {}
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return {int(step): {name: float(value) for name, value in values.items()} for step, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())
