"""What a build of a plan does in tests instead of building: `answer` does what a file says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from workers.planner import Where, plan_spec
from workers.spec import JobSpec

ACT = "TEST_PLAN_ACT"  # environment variable: path of the file


def answer(question_file: str, _: int | None) -> None:
    """The entry of a builder's zygote."""
    question = json.loads(Path(question_file).read_text())
    act = json.loads(Path(os.environ[ACT]).read_text())
    if act["do"] == "hang":
        signal.pause()
    if act["do"] == "fail":
        sys.exit(1)
    while not Path(act["gate"]).exists():
        time.sleep(0.01)
    with Path(act["log"]).open("a") as log:
        print(question["spec"]["resources"]["ranks"], file=log)
    spec = JobSpec.model_validate({**question["spec"], "model": {"kind": "mlp", "hidden": [8]}})
    where = Where.model_validate(question["where"])
    plans = [plan_spec(spec, where, ranks).model_dump(mode="json") for ranks in question["ranks"]]
    Path(question_file).with_name("answer.json").write_text(json.dumps(plans))
