"""The reference page says what the models say."""

from __future__ import annotations

import re
from pathlib import Path

from workers.spec import load_spec
from workers.spec.reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "job-spec.md"


def test_the_page_is_current() -> None:
    """Property: docs/job-spec.md is what `python -m workers.spec.reference` prints."""
    assert PAGE.read_text() == reference(), "run: python -m workers.spec.reference > docs/job-spec.md"


def test_the_specs_on_the_page_are_valid() -> None:
    """Property: every YAML block of the page loads."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        load_spec(block)


def test_the_example_specs_are_valid() -> None:
    """Property: what stands in examples/ can be submitted as it is."""
    from workers.spec import path_problems, read_spec_file

    files = sorted((PAGE.parents[1] / "examples").glob("**/*.yaml"))
    assert files
    for file in files:
        assert path_problems(read_spec_file(file), None) == [], file
