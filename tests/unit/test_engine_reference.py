"""The page of the engine's API has everything public, each with its meaning."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zero_engine
from zero_engine.saver import Saver

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "engine_api.md").read_text()
ROW = re.compile(r"^\| `([\w.]+)` \| (?:.* \| )?(.*) \|$", re.MULTILINE)


def rows_of(section: str) -> dict[str, str]:
    """First cell to last of the rows of a section."""
    found = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, section
    return dict(ROW.findall(found[1]))


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


def test_every_public_name_is_on_the_page() -> None:
    """Property: what `from zero_engine import *` gives has a section or a heading."""
    headings = set(re.findall(r"^#{2,3} (\w+)$", PAGE, re.MULTILINE))
    assert set(zero_engine.__all__) <= headings


def test_every_setting_has_its_default_and_a_meaning() -> None:
    """Property: in the order of the source, none empty."""
    rows = rows_of("ZeroConfig")
    names = [field.name for field in fields(zero_engine.ZeroConfig)]
    assert [name for name in rows if "." not in name] == names
    assert not [name for name in names if len(rows[name]) < 5]
    for field in fields(zero_engine.ZeroConfig):
        row = rf"^\| `{field.name}` \| .* \| `{re.escape(repr(field.default))}` \| "
        assert re.search(row, PAGE, re.MULTILINE), field.name


@pytest.mark.parametrize(("kind", "prefix"), [(zero_engine.Engine, "engine"), (Saver, "saver")])
def test_every_method_and_property_is_on_the_page(kind: Any, prefix: str) -> None:
    """Property: nothing public is missing, inherited members included."""
    shown = set(re.findall(rf"^### (?:{prefix}|{kind.__name__})\.(\w+)$", PAGE, re.MULTILINE))
    shown |= set(re.findall(rf"^\| `{prefix}\.(\w+)`", PAGE, re.MULTILINE))
    assert public(kind) <= shown


def test_every_attribute_of_an_engine_is_on_the_page() -> None:
    """Property: the table has what an engine has, and nothing that it has not."""
    engine = zero_engine.Engine(nn.Linear(3, 2), zero_engine.ZeroConfig())
    try:
        rows = rows_of("Engine")
        named = {name.removeprefix("engine.") for name in rows if name.startswith("engine.")}
        assert {name for name in vars(engine) if not name.startswith("_")} <= named
        assert all(hasattr(engine, name) for name in named)
    finally:
        engine.close()
