"""What the example programs print can be read without their source."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mlp_vs_ddp.py"


def test_the_columns_of_bytes_say_what_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each of the two that look alike, above the table."""
    spec = importlib.util.spec_from_file_location("mlp_vs_ddp", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mlp_vs_ddp", example)  # where its dataclass looks for itself
    spec.loader.exec_module(example)
    row = example.Row("stage 1", [3_000_000, 3_000_000], {"parameters": 2_500_000}, 2_500_000, 2e6, 0.5, "d")
    example.show([[row]])
    alive, owned, _, heading, numbers = capsys.readouterr().out.splitlines()
    assert alive.startswith("alive  all tensors that Python can reach") and owned.startswith("owned  what the engine")
    assert "alive after step" in heading and " owned" in heading
    assert numbers.split()[:8] == ["stage", "1", "0", "3.000", "3.000", "3.000", "2.500", "2.500"]
