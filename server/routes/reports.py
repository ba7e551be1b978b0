"""What ranks report: one batch a request, with the token of their attempt."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError

from server.db import Tx
from server.errors import ApiError
from server.routes.state import ERRORS, Db, TheGate, TheSettings
from server.rows import reports
from server.views import FieldProblem
from workers.contract import ReportBatch, ReportReply

router = APIRouter(prefix="/v1", tags=["reports"], responses=ERRORS)

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/ReportBatch"},
                "example": {
                    "attempt_id": "01930000-0000-7000-8000-000000000000",
                    "fence": 1,
                    "rank": 0,
                    "seq": 1,
                    "records": [
                        {"kind": "points", "at": "2026-01-01T00:00:00Z", "step": 1, "values": {"loss": 4.2, "lr": 1e-4}}
                    ],
                },
            }
        },
    },
    "security": [{"attemptToken": []}],
}


@router.post("/reports", operation_id="postReport", openapi_extra=_BODY)
async def post_report(request: Request, database: Db, gate: TheGate, settings: TheSettings) -> ReportReply:
    """Apply a batch once; the answer names the highest batch applied, from which the sender goes on."""
    batch = _batch(await request.body())
    await gate.check_attempt(request, batch.attempt_id)

    async def work(tx: Tx) -> int:
        return (await reports.apply(tx, batch, settings.log_bytes_per_attempt)).seq

    return ReportReply(applied_seq=await database.transact(work))


def _batch(body: bytes) -> ReportBatch:
    try:
        return ReportBatch.model_validate_json(body)
    except ValidationError as error:
        problems = [
            FieldProblem(pointer="".join(f"/{part}" for part in detail["loc"]), message=detail["msg"])
            for detail in error.errors(include_url=False, include_context=False, include_input=False)[:20]
        ]
        detail = f"{problems[0].pointer}: {problems[0].message}"
        raise ApiError(422, detail, code="invalid_record", errors=problems) from None
