"""Build hook: a wheel without the built dashboard is refused, since the server would have no pages to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DASHBOARD = Path("server/static/index.html")


class DashboardHook(BuildHookInterface):  # type: ignore[type-arg]
    """Checks, and builds nothing itself: `make web` does."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raise when `server/static` holds no dashboard; an editable install may go ahead without one."""
        if version == "editable":
            return
        if not (Path(self.root) / DASHBOARD).is_file():
            raise FileNotFoundError(f"{DASHBOARD} is missing: run `make web` before building a wheel")
