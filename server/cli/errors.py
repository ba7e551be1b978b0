"""What a command prints when it cannot do what was asked, and with which exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FAILED = 1  # it was tried and did not work
BAD_INPUT = 2  # what was asked for cannot be right


class CommandError(Exception):
    """One sentence that says what is wrong and what to do; ends the command with `exit_code`."""

    exit_code = FAILED

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code

    def lines(self) -> list[str]:
        """What to print on stderr."""
        return [str(self)]


class BadInput(CommandError):
    """A mistake in what was typed or in the spec; nothing was changed."""

    exit_code = BAD_INPUT


class SpecProblems(BadInput):
    """A spec with faults, each with its place, its value and what would be right.

    `faults` are the `errors` of problem+json: mappings with `pointer`, `message` and perhaps `value`, `suggestion`,
    `line`, `column`; those of a file also `option`.
    """

    def __init__(self, message: str, faults: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(message)
        self.faults = faults

    def lines(self) -> list[str]:
        return [str(self), *(fault_line(fault) for fault in self.faults)]


def fault_line(fault: Mapping[str, Any]) -> str:
    """One fault as one line: `  /train/step: unknown field "step" (got 3); did you mean steps?`."""
    place = fault.get("pointer") or "/"
    if fault.get("option"):
        place = f"{fault['option']}, {place}"
    elif fault.get("line"):
        place = f"line {fault['line']}, {place}"
    value = fault.get("value")
    shown = "" if value is None or str(value) in str(fault["message"]) else f" (got {value})"
    hint = f"; did you mean {fault['suggestion']}?" if fault.get("suggestion") else ""
    return f"  {place}: {fault['message']}{shown}{hint}"


class ServerProblem(CommandError):
    """A problem+json answer of the server."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(str(body.get("detail") or body.get("title") or f"the server answered {status}"))
        self.status = status
        self.body = body
        self.exit_code = BAD_INPUT if status in (400, 413, 415, 422) else FAILED

    def lines(self) -> list[str]:
        faults = [fault_line(fault) for fault in self.body.get("errors") or []]
        lines = [str(self)] if not faults else ["The server refuses this:", *faults]  # the detail repeats the first
        allowed = self.body.get("allowed_actions")
        if allowed is not None:
            lines.append(f"  possible now: {', '.join(allowed) or 'nothing'}")
        return lines


class SomeRefused(CommandError):
    """What the server answered for some of several jobs, by short id; the others were done."""

    def __init__(self, problems: Mapping[str, ServerProblem]) -> None:
        super().__init__("; ".join(f"{job}: {problem}" for job, problem in problems.items()))
        self.problems = problems

    def lines(self) -> list[str]:
        return [f"{job}: {line}" for job, problem in self.problems.items() for line in problem.lines()]


class ServerUnreachable(CommandError):
    """Nobody answers at the address."""
