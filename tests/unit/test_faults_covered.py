"""The table of faults in docs/faults-covered.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

WANTED = {*range(1, 4), *range(5, 15), *range(16, 24), *range(25, 29), *range(30, 34), *range(35, 38), *range(39, 46)}
WANTED |= {*range(47, 55), *range(56, 61), *range(62, 68), 92, *range(94, 97), 98, 99, 100}
WANTED |= {68, 70, *range(72, 75), 76, 77, *range(79, 86), *range(87, 92)}


def _rows(root: Path) -> list[list[str]]:
    lines = (root / "docs" / "faults-covered.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] != "no."]


def test_every_test_named_beside_a_fault_exists(root: Path) -> None:
    """Each row has a test, and each test stands in the file that the row says."""
    for number, kind, tests in _rows(root):
        named = re.findall(r"`([^`]+)::([^`]+)`", tests)
        assert named, f"no test for {number} {kind}"
        for file, name in named:
            tree = ast.parse((root / file).read_text())
            found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in found, f"{file} has no {name}"


def test_no_number_of_the_list_is_missing(root: Path) -> None:
    """Every kind of an engine's faults that can be seen on CPU has a row; those of the service carry a letter."""
    numbers = {int(number) for row in _rows(root) for number in re.findall(r"(?<![A-Z\d])\d+", row[0])}
    assert numbers == WANTED
