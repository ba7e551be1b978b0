"""Builds users' models in forks of a zygote that has torch imported: their code never runs in this process. Torch-free.

The zygote is started with the first question, which takes the seconds that importing torch takes, and kept for the
next ones, which then take a fraction of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import uuid
from asyncio import Future
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from workers.forked_process import ExitStatus, ForkedProcess, ZygoteGone
from workers.temporary_folder import temporary_folder
from workers.zygote import MARKS
from workers.zygote_process import ZygoteFailed, ZygoteProcess

ENTRY = "workers.model_plan:answer"
PRELOAD = ("workers.model_plan",)
QUESTION_FILE = "question.json"
ANSWER_FILE = "answer.json"
SAID_BYTES = 4000  # kept of what the user's code printed, from its end
NICENESS = 10  # ranks that start or train go first
IDLE_SECONDS = 600.0  # that the zygote is kept without a question
LOOK_SECONDS = 0.02
SAID_SECONDS = 1.0  # for the last words of what has ended; a child out of reach may keep the pipe open


class NotBuilt(Exception):
    """The model could not be built or measured; the text is what its process said."""


class ModelBuilder:
    """Builds models, several at once. Nothing of it outlives `close`, nor the death of this process."""

    def __init__(self) -> None:
        self._home = contextlib.ExitStack()
        self._folder: Path | None = None
        self._zygote: ZygoteProcess | None = None
        self._building = 0
        self._idle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the zygote. The next question would start another."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._zygote is not None:
            self._zygote.end()
            self._zygote = None
        self._home.close()
        self._folder = None

    async def ask(self, question: Mapping[str, Any]) -> Any:
        """What ENTRY answers to a question, both JSON. Raises NotBuilt when it ends without a word.

        What the fork has started ends with this call, also when it is cancelled.
        """
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._building += 1
        try:
            return await self._ask({**question, "folder": str(Path.cwd())})
        finally:
            self._building -= 1
            if not self._building:
                self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.close)

    async def _ask(self, question: Mapping[str, Any]) -> Any:
        if self._folder is None:
            self._folder = self._home.enter_context(temporary_folder("shardyard-builds-"))
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            order = Path(folder, QUESTION_FILE)
            order.write_text(json.dumps(question))
            async with _Output() as output:
                process = await self._forked(order, output.writer)
                output.close_writer()
                try:
                    await _until_ended(process)
                finally:
                    status = await asyncio.to_thread(_collect, process)
                said = await output.text()
            try:
                return json.loads(Path(folder, ANSWER_FILE).read_text())
            except FileNotFoundError:
                raise NotBuilt(f"{said}\nIts process {_how(status)}.".strip()) from None

    async def _forked(self, order: Path, output: int) -> ForkedProcess:
        """A fork for this order. Raises NotBuilt when the zygote does not come up."""
        mark = dict(zip(MARKS, (f"build-{uuid.uuid4().hex}", "0"), strict=True))
        zygote = self._living_zygote()
        while True:
            forking = asyncio.create_task(
                asyncio.to_thread(ForkedProcess.fork, zygote.socket_path, order, mark, {}, output)
            )
            try:
                forked = await asyncio.shield(forking)
                zygote.came_up = True
                return forked
            except ZygoteGone:
                if zygote.ended() and not zygote.came_up:
                    raise NotBuilt(f"The process that builds models did not start:\n{zygote.last_words()}") from None
                if zygote.ended():  # killed since the last question
                    zygote = self._living_zygote()
            except asyncio.CancelledError:
                with contextlib.suppress(ZygoteGone):
                    await asyncio.to_thread(_collect, await forking)
                raise
            await asyncio.sleep(LOOK_SECONDS)

    def _living_zygote(self) -> ZygoteProcess:
        """The one at hand, or a new one. Raises NotBuilt."""
        assert self._folder is not None
        if self._zygote is not None and self._zygote.ended():
            self._zygote.end()
            self._zygote = None
        if self._zygote is None:
            try:
                self._zygote = ZygoteProcess(self._folder, ENTRY, PRELOAD, os.environ, niceness=NICENESS)
            except ZygoteFailed as error:
                raise NotBuilt(str(error)) from error
        return self._zygote


async def _until_ended(process: ForkedProcess) -> None:
    loop = asyncio.get_running_loop()
    ended: Future[None] = loop.create_future()
    loop.add_reader(process, _set, ended)
    try:
        await ended
    finally:
        loop.remove_reader(process)


def _collect(process: ForkedProcess) -> ExitStatus:
    """End it, unless it has ended, and what it has started."""
    process.kill()
    process.ended(None)
    return process.collect()


def _set(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Output(asyncio.Protocol):
    """A pipe for what a fork prints, of which the end is kept."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._said = b""
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        file = os.fdopen(self._reader, "rb", 0)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, file)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close_writer()
        self._transport.close()

    def close_writer(self) -> None:
        """The fork has it: ours would keep the pipe open."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def data_received(self, data: bytes) -> None:
        self._said = (self._said + data)[-SAID_BYTES:]

    def connection_lost(self, _: Exception | None) -> None:
        self._closed.set()

    async def text(self) -> str:
        """What was printed, once nobody prints any more."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), SAID_SECONDS)
        return storable(self._said.decode(errors="replace"))


def storable(said: str) -> str:
    """What every database can hold: no NUL, nothing that is no character."""
    return said.encode(errors="replace").decode().replace("\0", "")


def _how(status: ExitStatus) -> str:
    if status.signal is not None:
        return f"was ended by {signal.Signals(status.signal).name}"
    return "ended" if status.exit_code is None else f"ended with code {status.exit_code}"
