"""`python -m server.openapi` prints the OpenAPI document, from which the dashboard's types are generated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from server.app import create_app
from server.db import Database
from server.settings import Settings


def document() -> dict[str, Any]:
    """The OpenAPI document; nothing is started or connected."""
    database = Database.open("sqlite:///never-opened.db")
    return create_app(Settings(data_dir=Path("/")), database).openapi()


def text() -> str:
    """The document as it is committed in `web/openapi.json`."""
    return json.dumps(document(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
