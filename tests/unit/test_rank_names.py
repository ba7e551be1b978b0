"""Names that are written twice, because the light side must not import pydantic, are the same."""

from __future__ import annotations

import subprocess
import sys

from workers import contract, launch_register, rank_actor, rank_process, spool_sender, zygote


def test_the_light_side_uses_the_names_of_the_contract() -> None:
    """Actor, agent and zygote find what the rank writes."""
    assert rank_actor.ORDER_FILE == contract.ORDER_FILE
    assert rank_actor.STOP_FILE == contract.STOP_FILE
    assert rank_process.OUTPUT_FILE == spool_sender.OUTPUT_FILE == contract.OUTPUT_FILE
    assert rank_process.RESULT_FILE == contract.RESULT_FILE
    assert spool_sender.SPOOL_FILE == rank_process.SPOOL_FILE == contract.SPOOL_FILE
    assert zygote.MARKS[0] == contract.ENVIRONMENT_MARK
    assert tuple(launch_register.rank_mark("attempt", 0)) == zygote.MARKS


def test_the_rank_actor_loads_neither_torch_nor_pydantic_nor_ray() -> None:
    """It is started for every rank and stays as long: it must be light."""
    program = (
        "import sys, workers.rank_actor; print(sorted({'torch', 'ray', 'pydantic', 'numpy'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
