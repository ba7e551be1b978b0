"""The card of a job in its store: what a new database needs to know the job again. Pure.

A checkpoint says everything about the state of a run and nothing about who asked for it with which spec. The card,
one JSON file beside the checkpoint folders, says that; it is written again at every launch, since a resume may have
changed the spec.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from workers.spec import JobSpec, SpecError, parse_spec

CARD_FILE = "job.json"


class CardError(Exception):
    """A card cannot be used; the text says why."""


class Origin(BaseModel):
    """A checkpoint by its place in the store."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    job: str
    folder: str


class JobCard(BaseModel):
    """A job as its store knows it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["shardyard-job"] = "shardyard-job"
    version: Literal[1] = 1
    id: str
    owner: str
    created_at: AwareDatetime
    spec: dict[str, Any]
    spec_yaml: str
    chunk: int
    cloned_from: str | None = None
    forked_from: str | None = None  # id of a checkpoint, which a new database gives anew
    fork_step: int | None = None
    origin: Origin | None = None  # where that checkpoint lies

    def encode(self) -> bytes:
        """The bytes of the file."""
        return self.model_dump_json(indent=1).encode()

    @staticmethod
    def decode(data: bytes, job_id: str) -> JobCard:
        """The card in a job's folder. Raises CardError when it is damaged or another job's."""
        try:
            card = JobCard.model_validate_json(data)
        except ValidationError as error:
            raise CardError(f"{CARD_FILE} cannot be read: {error.error_count()} problems") from error
        if card.id != job_id:
            raise CardError(f"{CARD_FILE} belongs to job {card.id}")
        return card

    def job_spec(self) -> JobSpec:
        """The spec, validated. Raises CardError when this build does not take it any more."""
        try:
            return parse_spec(self.spec)
        except SpecError as error:
            raise CardError(f"the spec in {CARD_FILE} is not valid any more: {error.problems[0]}") from error
