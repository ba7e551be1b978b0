"""Standing gloo ranks for the whole test session: a call costs milliseconds where a spawn costs seconds.

A test hands over a module-level function; ranks 0 to n-1 of the pool run it with a `Rank` and the given arguments, all
at once, and the results come back in rank order.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from tests.waiting import PATIENCE_SECONDS

SIZE = 5
# What takes seconds to import, or a part of one: ranks that start anew after a failure have it already.
PRELOADED = ["torch._dynamo", "pytest", "tests.distributed.engine_cases", "zero_engine.saver", "zero_engine.checkpoint"]
CALL_SECONDS = PATIENCE_SECONDS  # between two answers, on a loaded machine too


@dataclass(frozen=True)
class Rank:
    """What a dispatched function gets first."""

    rank: int
    ranks: int
    group: Any  # the process group of ranks 0 to ranks-1


class RankFailed(AssertionError):
    """A dispatched function raised; the text is its traceback."""


class Pool:
    """`size` processes, started when first used."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None  # where the ranks meet

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(Rank, *args)` on ranks 0 to ranks-1. Raises RankFailed with the first traceback."""
        outcomes = self.outcomes(ranks, function, *args)
        for rank, (good, value) in enumerate(outcomes):
            if not good:
                self.stop()  # collectives may be out of step: the next call starts fresh ranks
                raise RankFailed(f"rank {rank} of {ranks}:\n{value}")
        return [value for _, value in outcomes]

    def outcomes(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """As `run`, but (False, traceback) stands for a rank that raised."""
        if not self._processes:
            self._start()
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, function, args))
        outcomes: dict[int, tuple[bool, Any]] = {}
        while len(outcomes) < ranks:
            waiting = [pipe for rank, pipe in enumerate(self._pipes[:ranks]) if rank not in outcomes]
            ready = wait(waiting, timeout=CALL_SECONDS)
            if not ready:
                self.stop()
                raise RankFailed(f"no answer within {CALL_SECONDS} s from ranks {set(range(ranks)) - set(outcomes)}")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    outcomes[rank] = (False, f"the process ended with {self._processes[rank].exitcode}")
        return [outcomes[rank] for rank in range(ranks)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # Bound here and then told: nobody can take the port in between.
        self._store = dist.TCPStore("127.0.0.1", 0, self._size, is_master=True, wait_for_workers=False)
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._size, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End all ranks."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    patience = timedelta(seconds=CALL_SECONDS / 2)  # so that the one who waits can say where
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, size + 1)}
    while True:
        try:
            ranks, function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(Rank(rank, ranks, groups[ranks]), *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
