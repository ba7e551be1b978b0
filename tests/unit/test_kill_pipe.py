"""The pipe that kills, by the kernel and by the watcher that stands in where the kernel does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from workers.kill_pipe import guard, kernel_kills, open_kill_pipe
from workers.process_table import PROC, ProcessId, identify, kill_marked, marked, own_identity, send_signal, wait_gone


def test_this_kernel_kills_by_the_pipe() -> None:
    """What doctor and the zygote check: true on every kernel that the service was tried on."""
    assert kernel_kills()


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_the_group_dies_when_the_last_writer_closes(kernel: bool, before: bool) -> None:
    """By signal or by watcher; also when the writer is closed before the guard stands."""
    pipe, ready = open_kill_pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(pipe.writer)
        if before:
            os.read(ready[0], 1)
        guard(pipe.reader, kernel)
        os.write(ready[1], b"x")
        signal.pause()
        os._exit(0)
    os.close(pipe.reader)
    if before:
        os.close(pipe.writer)
        os.write(ready[1], b"x")
    else:
        os.read(ready[0], 1)
        os.close(pipe.writer)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    for descriptor in ready:
        os.close(descriptor)


def test_a_reused_pid_is_not_taken_for_the_process_that_had_it() -> None:
    """Same pid, other start time: not alive, not signalled, already gone."""
    me = own_identity()
    other = ProcessId(me.pid, me.start_ticks - 1)
    assert me.alive() and not other.alive()
    assert not send_signal(other, signal.SIGKILL)
    assert wait_gone(other, 0.0)


def test_a_process_lives_as_long_as_any_of_its_threads() -> None:
    """/proc calls it a zombie once its first thread has ended; it is not gone, and can still be killed."""
    program = (
        "import ctypes, signal, threading\n"
        "threading.Thread(target=lambda: [print('up', flush=True), threading.Event().wait()]).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    process = identify(child.pid)
    assert process is not None
    while (PROC / str(child.pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert child.poll() is None
    assert process.alive() and not wait_gone(process, 0.0)
    assert send_signal(process, signal.SIGKILL) and wait_gone(process, 60.0)
    assert child.wait() == -signal.SIGKILL


def test_only_processes_with_the_whole_mark_are_ended() -> None:
    """Two children with one attempt and different ranks: the mark of one ends one."""
    program = [sys.executable, "-c", "import signal; signal.pause()"]
    children = [
        subprocess.Popen(program, env={**os.environ, "MARK_OF_TEST": str(os.getpid()), "MARK_RANK": str(rank)})
        for rank in range(2)
    ]
    mine = {"MARK_OF_TEST": str(os.getpid())}
    assert {process.pid for process in marked(mine)} == {child.pid for child in children}
    assert kill_marked({**mine, "MARK_RANK": "1"}) == 1
    assert children[1].wait() == -signal.SIGKILL
    assert identify(children[0].pid) is not None and children[0].poll() is None
    assert kill_marked(mine) == 1
    assert children[0].wait() == -signal.SIGKILL
