"""Threads that are started meanwhile interrupt no other; all others stay as they are."""

from __future__ import annotations

import os
import threading

import pytest

from zero_engine.yielding import threads, yielding

pytestmark = pytest.mark.skipif(not threads(), reason="Linux alone lets a thread's way to a core be chosen")


def test_threads_that_are_started_meanwhile_are_batch_threads_and_no_others() -> None:
    ended = threading.Event()

    def started() -> int:
        thread = threading.Thread(target=ended.wait, daemon=True)
        thread.start()
        assert thread.native_id is not None
        return thread.native_id

    try:
        before = started()
        with yielding():
            meanwhile = started()
        after = started()
        policies = [os.sched_getscheduler(thread) for thread in (before, meanwhile, after, threading.get_native_id())]
        assert policies == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_OTHER]
        assert os.getpriority(os.PRIO_PROCESS, meanwhile) == os.getpriority(os.PRIO_PROCESS, after)
    finally:
        ended.set()
