"""What forks of a builder's zygote do in tests of the builder itself: `run` hangs, or says who forked it. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path


def run(question_file: str, _: int | None) -> None:
    """The entry of the zygote."""
    question = json.loads(Path(question_file).read_text())
    begun = question["spec"]["model"]["kwargs"].get("begun")
    if begun is not None:
        subprocess.Popen(["sleep", "600"])
        Path(begun).touch()
        signal.pause()
    Path(question_file).with_name("answer.json").write_text(json.dumps(os.getppid()))
