"""A user's model is built in a fork of a warm process: a plan or a reason comes of it, in time, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session import ROOT
from tests.waiting import wait_for
from workers import model_builder
from workers.built_plan import plans_of_built
from workers.model_builder import ModelBuilder, NotBuilt
from workers.planner import Where
from workers.process_table import marked
from workers.spec import JobSpec

CODE = """
import multiprocessing, os, signal, subprocess, sys
from pathlib import Path
from torch import nn

def plain():
    print("said by the user's code")
    return nn.Linear(64, 10)

def broken():
    raise ValueError("no such width \\0 \\udc80")

def nothing():
    return 3

def crashing():
    print("x" * 100_000, "the last words")
    os.abort()

def leaving():
    sys.exit(3)

def with_children():
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    multiprocessing.get_context("fork").Process(target=signal.pause).start()
    return plain()
"""
MARK = "SHARDYARD_TEST_OF_BUILDS"


def spec_of(folder: Path, entry: str, **kwargs: str) -> JobSpec:
    (folder / "users_code.py").write_text(CODE)
    model = {"kind": "python", "entry": f"users_code:{entry}", "path": str(folder), "kwargs": kwargs}
    return JobSpec.model_validate({"name": "x", "model": model, "data": {"kind": "digits"}, "train": {"steps": 1}})


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What everything that is started from now on carries in its environment."""
    monkeypatch.setenv(MARK, str(tmp_path))
    return {MARK: str(tmp_path)}


def others(mark: dict[str, str]) -> list[int]:
    """Processes that were started since, and what they have started."""
    return [each.pid for each in marked(mark) if each.pid != os.getpid()]


def test_every_end_of_a_build_is_a_plan_or_a_reason_and_leaves_no_process(tmp_path: Path, mark: dict[str, str]) -> None:
    """The user's error; a wrong result; a crash and an exit with how they ended; a plan, though children go on."""

    async def outcome(entry: str, builder: ModelBuilder) -> str:
        try:
            (plan,) = await plans_of_built(spec_of(tmp_path, entry), [1], Where(), builder)
            return f"{plan.parameters} parameters"
        except NotBuilt as error:
            return str(error)

    async def all_of_them() -> list[str]:
        entries = ("broken", "nothing", "crashing", "leaving", "with_children")
        async with ModelBuilder() as builder:
            found = await asyncio.gather(*(outcome(entry, builder) for entry in entries))
            assert len(others(mark)) == 1  # the zygote
        return found

    broken, nothing, crashed, left, with_children = asyncio.run(all_of_them())
    assert with_children == "650 parameters"
    assert "in broken" in broken and broken.rstrip().endswith("ValueError: no such width  ?")
    assert "returned int; it must return a torch.nn.Module" in nothing
    assert crashed.endswith("the last words\n\nIts process was ended by SIGABRT.") and len(crashed) < 5000
    assert left == "Its process ended with code 3."
    assert not others(mark)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds do what build_bodies.py says, in forks of a zygote that needs no seconds to import torch."""
    monkeypatch.setattr(model_builder, "ENTRY", "tests.unit.build_bodies:run")
    monkeypatch.setattr(model_builder, "PRELOAD", ())


@pytest.mark.usefixtures("light")
def test_a_build_that_hangs_ends_in_time_with_its_children(mark: dict[str, str], tmp_path: Path) -> None:
    """The reason says for how long it was waited for."""
    begun = tmp_path / "begun"
    spec = spec_of(tmp_path, "hanging", begun=str(begun))

    async def hang() -> None:
        async with ModelBuilder() as builder:
            for seconds in (2.0**power for power in range(8)):  # until there was time for the build to begin
                with pytest.raises(NotBuilt, match=f"not built within {seconds:g} s"):
                    await plans_of_built(spec, [1], Where(), builder, seconds)
                assert len(others(mark)) == 1  # the zygote
                if begun.exists():
                    return
        raise AssertionError("the build never began")

    asyncio.run(hang())
    assert not others(mark)


@pytest.mark.usefixtures("light")
def test_models_are_built_by_one_warm_process_while_it_lives_and_is_asked(
    tmp_path: Path, mark: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it is made anew with the next question; without questions it goes; one that cannot start says why."""
    question = {"spec": spec_of(tmp_path, "plain").model_dump(mode="json")}

    async def build() -> None:
        async with ModelBuilder() as builder:
            first = await builder.ask(question)
            assert await builder.ask(question) == first and others(mark) == [first]
            os.kill(first, signal.SIGKILL)
            second = await builder.ask(question)
            assert second != first and others(mark) == [second]
            monkeypatch.setattr(model_builder, "IDLE_SECONDS", 0.0)
            assert await builder.ask(question) == second
            await asyncio.to_thread(wait_for, lambda: not others(mark), "the idle zygote is gone")
            monkeypatch.setattr(model_builder, "ENTRY", "no_such_module:answer")
            with pytest.raises(NotBuilt, match=r"did not start:[^$]*no_such_module"):
                await builder.ask(question)

    asyncio.run(build())
    assert not others(mark)


ASKING = """
import asyncio, sys
from workers import model_builder
from workers.built_plan import plans_of_built
from workers.planner import Where
from workers.spec import load_spec
model_builder.ENTRY, model_builder.PRELOAD = "tests.unit.build_bodies:run", ()
asyncio.run(plans_of_built(load_spec(sys.argv[1]), [1], Where()))
"""


def test_a_build_ends_with_a_process_that_was_killed_while_it_asked(tmp_path: Path, mark: dict[str, str]) -> None:
    """kill -9 of who asks: the kernel ends the zygote, the build and what that had started."""
    begun = tmp_path / "begun"
    spec = spec_of(tmp_path, "hanging", begun=str(begun)).model_dump_json()
    asking = subprocess.Popen([sys.executable, "-c", ASKING, spec], cwd=ROOT)
    try:
        wait_for(begun.exists, "the build has begun")
    finally:
        asking.send_signal(signal.SIGKILL)
        asking.wait()
    wait_for(lambda: not list(marked(mark)), "nothing is left", lambda: str(list(marked(mark))))


@pytest.mark.usefixtures("light")
def test_a_build_that_nobody_waits_for_any_more_ends(tmp_path: Path, mark: dict[str, str]) -> None:
    """Cancelled, as when the server stops."""
    begun = tmp_path / "begun"

    async def ask_and_leave() -> None:
        asking = asyncio.create_task(plans_of_built(spec_of(tmp_path, "hanging", begun=str(begun)), [1], Where()))
        await asyncio.to_thread(wait_for, begun.exists, "the build has begun")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(ask_and_leave())
    assert not others(mark)
