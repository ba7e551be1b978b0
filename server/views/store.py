"""The store beside the database: what lies there that nothing refers to, and what should lie there and does not."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field

from server.views.view import View


class StoreView(View):
    """Where checkpoints lie."""

    url: str = Field(description="a folder of the server's machine, or a url; each job's are below its id")


class OrphanView(View):
    """Something in the store that no row refers to, or a row whose files are gone."""

    kind: Literal["job", "save", "deletion", "checkpoint", "file", "missing"] = Field(
        description="job: of a job that is not in the database; save, deletion: cut short; checkpoint: published, "
        "in no row; file: belongs to no checkpoint; missing: a row without its files"
    )
    job_id: str = Field(description="empty: of a file that lies beside the jobs' folders")
    place: str = Field(description="below the job's folder; empty: the whole folder")
    bytes: int
    meaning: str = Field(description="what it is, and what becomes of it")


class OrphansView(View):
    """What a look through the whole store found."""

    store: str
    at: AwareDatetime
    jobs: int = Field(description="folders of jobs that were looked through")
    items: list[OrphanView]
    truncated: bool = Field(description="there is more than is listed")


class AdoptedView(View):
    """Jobs of the store that the database did not know and knows now."""

    jobs: list[str]
