"""How `shardyard run` shows itself: JSON lines, a progress bar on a terminal, or plain lines in a pipe."""

from __future__ import annotations

import json
import sys
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from workers.local_lines import StepLine


class Display(Protocol):
    """What a run tells a person or a program."""

    def begin(self, title: str, steps: int, counts: str) -> None:
        """The run starts; `steps` in all, whose data is counted in `counts`: tokens or samples."""

    def say(self, text: str) -> None:
        """A phase, an event, or something the user's code printed."""

    def step(self, line: StepLine) -> None:
        """A step was made."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run is over."""


class JsonDisplay:
    """Standard output carries one compact object per line and nothing else; what is said goes to standard error."""

    def begin(self, title: str, steps: int, counts: str) -> None:
        """Nothing: a program knows what it asked for."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, line: StepLine) -> None:
        self._write(line.as_json())

    def end(self, summary: dict[str, Any]) -> None:
        self._write({"summary": summary})

    def _write(self, value: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")
        sys.stdout.flush()


class PlainDisplay:
    """A line now and then, for a pipe or a file."""

    LINES = 20  # of steps, about

    def begin(self, title: str, steps: int, counts: str) -> None:
        self._every = max(1, steps // self.LINES)
        self._steps, self._counts = steps, counts
        print(title, flush=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, line: StepLine) -> None:
        if line.step % self._every == 0 or line.step == self._steps or line.eval_loss is not None:
            print(f"step {line.step}/{self._steps}  {described(line, self._counts)}", flush=True)

    def end(self, summary: dict[str, Any]) -> None:
        print(ended(summary), flush=True)


class TerminalDisplay:
    """A progress bar with the numbers beside it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def begin(self, title: str, steps: int, counts: str) -> None:
        self._counts = counts
        self._console.print(title, markup=False, highlight=False)
        self._task = self._progress.add_task("train", total=steps, numbers="starting")
        self._progress.start()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, line: StepLine) -> None:
        self._progress.update(self._task, completed=line.step, numbers=described(line, self._counts))

    def end(self, summary: dict[str, Any]) -> None:
        self._progress.stop()
        self._console.print(ended(summary), markup=False, highlight=False)


def display_of(as_json: bool) -> Display:
    """The one that fits standard output."""
    if as_json:
        return JsonDisplay()
    console = Console()
    return TerminalDisplay(console) if console.is_terminal else PlainDisplay()


def described(line: StepLine, counts: str) -> str:
    """A step in a few words."""
    rate = line.tokens / line.seconds if line.seconds else 0.0
    validation = f"  validation {line.eval_loss:.4f}" if line.eval_loss is not None else ""
    return f"loss {line.loss:.4f}{validation}  norm {line.grad_norm:.3f}  {rate:,.0f} {counts}/s"


def ended(summary: dict[str, Any]) -> str:
    """The end in a few lines."""
    lines = [f"{summary['outcome']} after step {summary['step']} in {summary['seconds']:.1f} s of steps"]
    steps = summary.get("step_seconds")
    if steps and steps["predicted"] is not None:
        predicted, error = steps["predicted"]["total"], 100 * steps["error"]
        lines.append(f"a step took {steps['measured']:.3g} s, predicted {predicted:.3g} s ({error:+.0f} %)")
    before, after = summary["eval_loss_before"], summary["eval_loss"]
    if isinstance(after, float):
        start = f" (before step 1: {before:.4f})" if isinstance(before, float) else ""
        lines.append(f"validation loss {after:.4f}{start}")
    if summary["digest"]:
        lines.append(f"digest {summary['digest']}")
    if summary["checkpoints"]:
        lines.append(f"last checkpoint {summary['checkpoints'][-1]}")
    return "\n".join(lines)
