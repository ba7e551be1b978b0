"""Every error of the API as RFC 9457 problem details with a stable code, and the handlers that make it so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.exceptions import HTTPException as AnyHttpException
from starlette.responses import Response

from server.states import Action, Status
from server.views import FieldProblem, Problem
from workers.spec import SpecError, SpecProblem, SpecTooLarge

log = logging.getLogger("shardyard.api")
MEDIA_TYPE = "application/problem+json"
SHOWN_PROBLEMS = 50  # of one answer; their number is in the detail

_CODES: dict[int, str] = {
    400: "malformed_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    412: "precondition_failed",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    500: "internal_error",
    503: "unavailable",
}


class ApiError(HTTPException):
    """An answer of 400 or above. `code` is stable; `detail` says what to change."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        code: str | None = None,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
        job_status: Status | None = None,
        allowed_actions: Iterable[Action] | None = None,
    ) -> None:
        super().__init__(status, detail, headers)
        self.code = code or _CODES.get(status, "error")
        self.errors = tuple(errors)
        self.job_status = job_status
        self.allowed_actions = None if allowed_actions is None else list(allowed_actions)


def not_found(what: str, key: str) -> ApiError:
    """404 for a thing named in the path."""
    return ApiError(404, f"There is no {what} {key[:80]!r}.")


def invalid(pointer: str, message: str, *, value: Any = None, suggestion: str | None = None) -> ApiError:
    """422 for one field or query parameter."""
    shown = None if value is None else repr(value)[:120]
    problem = FieldProblem(pointer=pointer, message=message, value=shown, suggestion=suggestion)
    return ApiError(422, f"{pointer}: {message}", errors=[problem])


def spec_error(error: SpecError) -> ApiError:
    """A wrong spec as 422 (or 413) with a pointer, value, suggestion and line for each problem."""
    if isinstance(error, SpecTooLarge):
        return ApiError(413, str(error.problems[0].message), code=error.code)
    number = len(error.problems)
    detail = str(error.problems[0]) if number == 1 else f"{number} problems; the first: {error.problems[0]}"
    shown = [_field_problem(problem) for problem in error.problems[:SHOWN_PROBLEMS]]
    return ApiError(422, detail, code=error.code, errors=shown)


def _field_problem(problem: SpecProblem) -> FieldProblem:
    return FieldProblem(
        pointer=problem.pointer,
        message=problem.message,
        value=problem.value or None,
        suggestion=problem.suggestion,
        line=problem.line,
        column=problem.column,
    )


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """A problem on the wire."""
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, problem.status, dict(headers or {}), media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem."""
    app.add_exception_handler(AnyHttpException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(SpecError, _on_spec)
    app.add_exception_handler(OperationalError, _on_database)
    app.add_exception_handler(InterfaceError, _on_database)
    app.add_exception_handler(Exception, _on_bug)


def problem_of(error: AnyHttpException, path: str) -> Problem:
    """What is said about an error of a request to `path`."""
    code = error.code if isinstance(error, ApiError) else _CODES.get(error.status_code, "error")
    own = error if isinstance(error, ApiError) else None
    return Problem(
        type=f"urn:shardyard:problem:{code}",
        title=HTTPStatus(error.status_code).phrase,
        status=error.status_code,
        detail=str(error.detail),
        code=code,
        instance=path,
        errors=list(own.errors) if own else [],
        job_status=own.job_status if own else None,
        allowed_actions=own.allowed_actions if own else None,
    )


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, AnyHttpException)
    if isinstance(error.__cause__, RecursionError):
        error = ApiError(422, "The body is nested too deep.")
    return problem_response(problem_of(error, request.url.path), error.headers)


async def _on_spec(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecError)
    return problem_response(problem_of(spec_error(error), request.url.path))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [_validation_problem(detail) for detail in error.errors()]
    detail = "; ".join(f"{p.pointer or 'body'}: {p.message}" for p in problems[:3])
    return problem_response(problem_of(ApiError(422, detail, errors=problems[:SHOWN_PROBLEMS]), request.url.path))


def _validation_problem(detail: Mapping[str, Any]) -> FieldProblem:
    place, *keys = detail["loc"]
    if place == "body":
        pointer = "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in keys)
    else:
        pointer = ".".join(str(key) for key in keys)
    value = detail.get("input")
    shown = None if value is None or isinstance(value, (dict, list, bytes)) else repr(value)[:120]
    return FieldProblem(pointer=pointer, message=str(detail["msg"]), value=shown)


async def _on_database(request: Request, error: Exception) -> Response:
    log.error("api.database_error path=%s error=%s", request.url.path, error)
    unavailable = ApiError(503, "The database does not answer; nothing was changed. Try again.")
    return problem_response(problem_of(unavailable, request.url.path), {"Retry-After": "1"})


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("api.internal_error method=%s path=%s", request.method, request.url.path, exc_info=error)
    return problem_response(problem_of(ApiError(500, "The server failed; its log says why."), request.url.path))
