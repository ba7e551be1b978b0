"""`shardyard plan`: numbers for every stage and column, from the planner and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.test_cli_commands import shardyard
from workers.calibrations import known_calibration
from workers.planner import Where, plan_spec
from workers.spec import load_spec

SPEC = "name: tiny\nmodel: {kind: mlp}\ndata: {kind: digits}\ntrain: {steps: 5}\n"


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return str(path)


def test_piped_it_is_the_planners_own_numbers(spec: str) -> None:
    """One source of truth: the command adds nothing and rounds nothing."""
    folder = Path(spec).parent
    run = shardyard(None, "plan", spec, "--ranks", "1,4", "--link-gbps", "10", "--data-dir", str(folder))
    shown, note = json.loads(run.stdout), known_calibration(folder, "cpu").note
    planned = [plan_spec(load_spec(SPEC), Where(link_gbps=10, rates_note=note), count) for count in (1, 4)]
    assert shown == [plan.model_dump(mode="json") for plan in planned]
    assert [len(column["stages"]) for column in shown] == [4, 4]


def test_more_ranks_than_micro_batches_are_planned_and_marked(spec: str) -> None:
    """Columns above V are computed with V = N; the note names the batch that would allow them."""
    (column,) = json.loads(shardyard(None, "plan", spec, "--ranks", "64").stdout)
    assert column["micro_batches"] == 64 and column["note"] == "needs global_batch 256"


def test_a_wrong_override_is_named_as_it_was_typed(spec: str) -> None:
    """Not by a line of the file."""
    ended = shardyard(None, "plan", spec, "--set", "train.steps=x")
    assert ended.returncode == 2 and "--set train.steps=x, /train/steps: must be a whole number" in ended.stderr
    assert "line" not in ended.stderr


def test_an_override_changes_the_plan(spec: str) -> None:
    (column,) = json.loads(shardyard(None, "plan", spec, "--set", "resources.ranks=3").stdout)
    assert column["ranks"] == 3 and column["idle_share"] > 0


@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "0"),
        ("--ranks", "1,,2"),
        ("--ranks", "two"),
        ("--ranks", "70000"),
        ("--link-gbps", "-1"),
        ("--link-gbps", "nan"),
        ("--device-gb", "0"),
        ("--ranks", ",".join(map(str, range(1, 40)))),
        ("--set", "train.step=3"),
    ],
)
def test_what_cannot_be_planned_is_exit_code_2_with_one_line(spec: str, words: tuple[str, str]) -> None:
    run = shardyard(None, "plan", spec, *words)
    assert run.returncode == 2 and run.stderr and "Traceback" not in run.stderr
