"""Runs `workers.local` and `workers.verify_resume` in forks of one process that has torch imported.

A run then costs its work, not the import.

Reads requests from standard input, one JSON list of arguments a line, with the file to write to; answers with the exit
code, one line each. `python -m tests.distributed.run_server`.
"""

from __future__ import annotations

import json
import os
import sys

import workers.rank  # noqa: F401  (torch, once)
from workers import local, verify_resume

PROGRAMS = {"run": local.main, "verify-resume": verify_resume.main}


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(request)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(request: dict[str, str | list[str]]) -> None:
    """Run and leave; standard input, output and error are the run's own."""
    code = 1
    try:
        places = (
            (os.devnull, os.O_RDONLY),
            (str(request["output"]), os.O_WRONLY),
            (str(request["errors"]), os.O_WRONLY),
        )
        for descriptor, (path, flags) in enumerate(places):
            opened = os.open(path, flags | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        code = PROGRAMS[str(request["program"])](list(request["arguments"]))
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
