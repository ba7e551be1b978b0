"""`shardyard run SPEC`: train a spec on this machine, with no service. The ranks run the same code as under one."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workers.built_plan import Resolved, predicted_stage, resolve_stage
from workers.calibrations import known_calibration
from workers.contract import LaunchOrder, PhaseRecord, ResultRecord
from workers.local_display import Display, display_of
from workers.local_lines import Lines
from workers.local_orders import local_orders
from workers.local_start import BadInputError, start_of
from workers.planner import Where
from workers.spec import JobSpec, SpecError, path_problems, read_spec_file
from workers.temporary_folder import temporary_folder

if TYPE_CHECKING:
    from workers.local_ranks import LocalRanks

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


@dataclass(frozen=True)
class Asked:
    """The command line."""

    spec: Path
    overrides: list[str]
    ranks: int | None
    as_json: bool
    checkpoints: Path | None
    resume: bool
    digest_every: int
    data_dir: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0 finished, 1 failed, 2 wrong input, 130 interrupted."""
    asked = _parsed(arguments)
    try:
        return _run(asked, display_of(asked.as_json))
    except SpecError as error:
        for problem in error.problems:
            print(f"{asked.spec}: {problem}", file=sys.stderr)
    except BadInputError as error:
        print(f"{asked.spec}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{error.filename or asked.spec}: {error.strerror or error}", file=sys.stderr)
    return BAD_INPUT


def _parsed(arguments: Sequence[str] | None) -> Asked:
    parser = argparse.ArgumentParser(prog="shardyard run", description=__doc__.partition("\n")[0])
    parser.add_argument("spec", type=Path, help="a job spec, YAML or JSON")
    parser.add_argument("--ranks", type=int, help="processes; the same bits for every number up to the micro-batches")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override, as zero.stage=3")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per step on standard output, and a summary"
    )
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="write checkpoints there, as the spec says")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoints")
    parser.add_argument("--digest-every", type=int, default=0, metavar="K", help="steps; 0: only the last")
    parser.add_argument("--data-dir", type=Path, help="holds the tokenizer cache; default ~/.shardyard")
    found = parser.parse_intermixed_args(arguments)
    if found.resume and found.checkpoints is None:
        parser.error("--resume needs --checkpoints DIR")
    if found.digest_every < 0:
        parser.error("--digest-every must be at least 0")
    data_dir = found.data_dir or Path(os.environ.get("SHARDYARD_DATA_DIR") or "~/.shardyard")
    return Asked(
        found.spec,
        found.set,
        found.ranks,
        found.json,
        found.checkpoints.absolute() if found.checkpoints else None,
        found.resume,
        found.digest_every,
        data_dir.expanduser().absolute(),
    )


def _run(asked: Asked, display: Display) -> int:
    spec = read_spec_file(asked.spec, asked.overrides, asked.ranks)
    problems = path_problems(spec, None)
    if problems:
        raise SpecError(problems)
    device = _device(spec)
    known = known_calibration(asked.data_dir, device, spec.resources.threads_per_rank)
    memory = _memory_of_one(device, spec.resources.ranks)
    where = Where(device=device, device_memory_bytes=memory, rates=known.rates, rates_note=known.note)
    resolved = resolve_stage(spec, where)
    if resolved.why is not None:
        display.say(resolved.why)
    with temporary_folder("shardyard-run-") as folder:
        return _train(asked, resolved, where, folder, display)


def _train(asked: Asked, resolved: Resolved, where: Where, folder: Path, display: Display) -> int:
    from workers.local_ranks import LocalRanks, listening_socket
    from workers.rank import main as rank_main  # torch, once for all ranks

    spec, listener, device = resolved.spec, listening_socket(), where.device
    orders = _orders(asked, spec, device, folder, listener.getsockname()[1])
    stage, steps = spec.zero.stage, spec.train.steps
    title = f"{spec.name}: {steps} steps, {len(orders)} x {device}, stage {stage}, chunk {orders[0].chunk}"
    display.begin(title, steps, spec.counts)
    ranks = LocalRanks(orders, listener, rank_main)
    interrupts = _Interrupts(ranks, display)
    lines = Lines(len(orders), orders[0].chunk)
    try:
        with interrupts:
            _follow(ranks, lines, display)
    finally:
        ranks.close()
    if lines.last is not None:
        lines.predicted = predicted_stage(resolved, where)  # now: it would take a user's model seconds before step 1
    return _concluded(ranks.results(), lines, display, interrupts.count)


def _follow(ranks: LocalRanks, lines: Lines, display: Display) -> None:
    for rank, record in ranks.records():
        line = lines.take(rank, record)
        if line is not None:
            display.step(line)
        if rank == 0:
            for text in ranks.output(0):
                display.say(text)
            if isinstance(record, PhaseRecord) and record.phase in ("preparing", "restoring", "saving"):
                display.say(f"{record.phase} …")
        while lines.events:
            event = lines.events.pop(0)
            display.say(f"{event.action}: {event.message}")


def _concluded(results: list[ResultRecord], lines: Lines, display: Display, interrupts: int) -> int:
    outcomes = {result.outcome for result in results}
    if outcomes <= {"finished", "stopped"}:
        display.end(lines.summary(results[0].outcome, results[0].digest, results[0].step))
        return INTERRUPTED if "stopped" in outcomes else 0
    display.end(lines.summary("killed" if interrupts > 1 else "failed", None))
    if interrupts > 1:
        return INTERRUPTED
    rank, result = _culprit(results)
    _say_failure(rank, result, display)
    return FAILED


def _culprit(results: list[ResultRecord]) -> tuple[int, ResultRecord]:
    """The first rank that failed by itself, not because another one was gone."""
    failed = [(rank, result) for rank, result in enumerate(results) if result.outcome in ("failed", "died")]
    own = [pair for pair in failed if pair[1].error is None or pair[1].error.code != "peer_lost"]
    return min(own or failed, key=lambda pair: (pair[1].at, pair[0]))


def _say_failure(rank: int, result: ResultRecord, display: Display) -> None:
    from workers.local_ranks import describe

    if result.error is not None and result.error.code is not None:
        display.say(f"rank {rank} failed: {result.error.message}")
    else:
        display.say(f"rank {rank} failed:\n{describe(result)}")


class _Interrupts:
    """The first Ctrl-C asks the ranks to save and leave, the second ends them."""

    def __init__(self, ranks: LocalRanks, display: Display) -> None:
        self._ranks, self._display = ranks, display
        self.count = 0

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self.count += 1
        if self.count == 1:
            self._ranks.stop()
            self._display.say("stopping at the next step; once more to end at once")
        else:
            self._ranks.kill()


def _orders(asked: Asked, spec: JobSpec, device: Literal["cpu", "cuda"], folder: Path, port: int) -> list[LaunchOrder]:
    start = start_of(spec, asked.checkpoints, resume=asked.resume)
    return local_orders(
        spec,
        folder,
        asked.data_dir,
        port,
        device=device,
        fence=start.fence,
        chunk=start.chunk,
        store_url="" if asked.checkpoints is None else str(asked.checkpoints),
        resume=start.resume,
        digest_every=asked.digest_every,
        retains=asked.checkpoints is not None,
    )


def _device(spec: JobSpec) -> Literal["cpu", "cuda"]:
    if spec.resources.device == "cpu":
        return "cpu"
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # asks the driver, so that CUDA can start after the fork
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec.resources.device == "auto" and gpus < spec.resources.ranks:
        return "cpu"
    if gpus < spec.resources.ranks:
        raise BadInputError(f"resources.device is cuda with {spec.resources.ranks} ranks; there are {gpus} GPUs here")
    return "cuda"


def _memory_of_one(device: Literal["cpu", "cuda"], ranks: int) -> int | None:
    """Bytes for each rank: this machine's memory in equal parts; None on CUDA, which must not start before the fork."""
    if device == "cuda":
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks


if __name__ == "__main__":
    sys.exit(main())
