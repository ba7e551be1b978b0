"""Bad input: every wrong request gets a problem that says where and what; nothing else changes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from tests.service.conftest import SPEC, Api


@pytest.fixture
def database_url(tmp_path: Path, sqlite_template: Path) -> str:
    """What is refused at the edge does not reach a database: SQLite alone."""
    path = tmp_path / "errors.db"
    path.write_bytes(sqlite_template.read_bytes())
    return f"sqlite:///{path}"


def _spec(**changes: Any) -> dict[str, Any]:
    return {**SPEC, **changes}


async def _nothing_was_made(api: Api) -> bool:
    return bool((await api.admin.get("/v1/jobs")).json()["items"] == [])


GPT = {"kind": "gpt", "layers": 1, "hidden": 8, "heads": 1}
WRONG_SPECS: list[tuple[str, str, str | None]] = [
    # (body, pointer, part of the suggestion or message)
    (json.dumps(_spec(train={"steps": 5, "learing_rate": 1})), "/train/learing_rate", "unknown field"),
    (json.dumps(_spec(trian={})), "/trian", "train"),
    (json.dumps(_spec(train={"steps": "5"})), "/train/steps", "whole number"),
    (json.dumps(_spec(train={"steps": 1.5})), "/train/steps", "whole number"),
    (json.dumps(_spec(train={"steps": -1})), "/train/steps", "at least 1"),
    (json.dumps(_spec(train={"steps": 5, "gradient_clipping": float("nan")})), "/train/gradient_clipping", "finite"),
    ('{"name":"x","model":{"kind":"mlp"},"data":{"kind":"digits"},"train":{"steps":5,"gradient_clipping":1e400}}',
     "/train/gradient_clipping", "finite"),
    (json.dumps(_spec(name="")), "/name", "blank"),
    (json.dumps(_spec(model={"kind": "gtp"})), "/model/kind", "gpt"),
    (json.dumps(_spec(train={"steps": 5, "global_batch": 10, "micro_batch": 4})), "/train/global_batch", "8 or 12"),
    (json.dumps(_spec(resources={"ranks": 5})), "/resources/ranks", "4"),
    (json.dumps(_spec(resources={"ranks": 65}, train={"steps": 1, "global_batch": 65, "micro_batch": 1})),
     "/resources/ranks", "64"),
    (json.dumps(_spec(checkpoint={"keep_latest": 1})), "/checkpoint/keep_latest", "use 2"),
    (json.dumps(_spec(zero={"offload": "disk"})), "/zero/offload", "optimizer"),
    (json.dumps(_spec(model=GPT, data={"kind": "text", "path": "books"})), "/data/path", "absolute"),
    (json.dumps(_spec(model=GPT, data={"kind": "text", "path": "/etc/passwd"})), "/data/path", "outside"),
    (json.dumps(_spec(model=GPT, data={"kind": "text", "path": "/proc/../etc"})), "/data/path", "outside"),
    ("[]", "", "set of fields"),
    ("5", "", "set of fields"),
    ("", "", "set of fields"),
    ("{", "", "neither YAML nor JSON"),
    ("[" * 1000, "", None),
    ('{"a":' * 1000 + "1" + "}" * 1000, "", None),
    ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
     "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d,*d]\n", "", None),
    ('{"name": "a\\u0000b"}', "/name", "cannot be stored"),
    ('{"name": "\\ud800"}', "/name", "cannot be stored"),
    ('{"name": "x", "name": "y"}', "/name", "twice"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "pointer", "said"), WRONG_SPECS, ids=[f"spec{i}" for i in range(len(WRONG_SPECS))])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/plans"])
async def test_a_wrong_spec_is_refused_at_its_field(
    api: Api, path: str, body: str, pointer: str, said: str | None
) -> None:
    """422 as problem+json with the JSON pointer, the value and what would be right; no job is made."""
    answer = await api.admin.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == "invalid_spec" and problem["status"] == 422 and problem["detail"]
    found = problem["errors"][0]
    assert found["pointer"].startswith(pointer)
    if said is not None:
        assert said in f"{found['message']} {found.get('suggestion')}", found
    assert await _nothing_was_made(api)


async def test_a_yaml_spec_is_corrected_at_its_line_and_column(api: Api) -> None:
    """Lines and columns count from 1, also for broken YAML."""
    text = "name: x\nmodel: {kind: mlp}\ndata: {kind: digits}\ntrain:\n  steps: 5\n  learing_rate: 1\n"
    yaml = {"Content-Type": "application/yaml"}
    (found,) = (await api.admin.post("/v1/jobs", content=text, headers=yaml)).json()["errors"]
    assert (found["line"], found["column"]) == (6, 3)
    (found,) = (await api.admin.post("/v1/jobs", content="name: x\n\tbad", headers=yaml)).json()["errors"]
    assert found["line"] == 2


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/plans", "/v1/jobs/cancel", "/v1/login"])
async def test_a_body_above_the_limit_is_413_whether_its_length_is_announced_or_not(
    api: Api, path: str, announced: bool
) -> None:
    """Bytes are counted as they come; a megabyte and one byte are refused."""
    body = b" " * (2**20 + 1)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    content: Any = body if announced else pieces()
    answer = await api.admin.post(path, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    assert answer.headers["content-type"] == "application/problem+json"
    assert await _nothing_was_made(api)


async def test_an_answer_does_not_grow_with_the_number_of_mistakes(api: Api) -> None:
    """A thousand unknown fields: the number is said, the first fifty are shown."""
    answer = await api.admin.post("/v1/jobs", json=_spec(**{f"k{number}": 1 for number in range(1_000)}))
    assert answer.status_code == 422 and answer.json()["detail"].startswith("1000 problems")
    assert len(answer.json()["errors"]) == 50


async def test_other_mistakes_are_problems_too(api: Api) -> None:
    """404, 405, 415, 422 of every part of a request: one form, and the method's allowed ones named."""
    job = await api.submit()
    cases: list[tuple[str, str, dict[str, Any], int]] = [
        ("GET", "/v1/nothing", {}, 404),
        ("GET", "/assets/none.js", {}, 404),
        ("PUT", "/v1/jobs", {}, 405),
        ("DELETE", "/v1/queue", {}, 405),
        ("POST", "/v1/jobs", {"content": b"x", "headers": {"Content-Type": "application/xml"}}, 415),
        ("GET", "/v1/jobs?limit=0", {}, 422),
        ("GET", "/v1/jobs?limit=ten", {}, 422),
        ("GET", "/v1/jobs?sort=colour", {}, 422),
        ("GET", "/v1/jobs?status=sleeping", {}, 422),
        ("GET", "/v1/jobs?cursor=%00", {}, 422),
        ("GET", "/v1/jobs?cursor=WyJuYW1lIixbMSwyXV0", {}, 422),
        ("GET", "/v1/jobs?q=%00", {}, 422),
        ("GET", f"/v1/jobs/{job['id']}/metrics?width=-1", {}, 422),
        ("GET", f"/v1/jobs/{job['id']}/metrics?from_step=99999999999999999999", {}, 422),
        ("GET", f"/v1/jobs/{job['id']}/logs?before=1&after=2", {}, 422),
        ("GET", f"/v1/jobs/{job['id']}/events?cursor=x", {}, 422),
        ("GET", "/v1/feed?job=nonsense", {}, 422),
        ("GET", "/v1/feed", {"headers": {"Last-Event-ID": "x"}}, 422),
        ("PATCH", f"/v1/jobs/{job['id']}", {"json": {"nmae": "x"}}, 422),
        ("PATCH", f"/v1/jobs/{job['id']}", {"json": {"name": "a\x00"}}, 422),
        ("PATCH", f"/v1/jobs/{job['id']}", {"content": b'{"name": "\\ud800"}'}, 422),
        ("PATCH", f"/v1/jobs/{job['id']}", {"json": {"priority": 1.0}}, 422),
        ("PATCH", f"/v1/jobs/{job['id']}", {"content": b"{"}, 422),
        ("PATCH", f"/v1/jobs/{job['id']}", {"content": b'{"priority": NaN}'}, 422),
        ("PATCH", f"/v1/jobs/{job['id']}", {"content": b'{"a":' * 3000 + b"1" + b"}" * 3000}, 422),
        ("POST", f"/v1/jobs/{job['id']}/resume", {"content": b'{"ranks": 1e400}'}, 422),
        ("POST", "/v1/jobs", {"json": SPEC, "headers": {"Idempotency-Key": "x" * 201}}, 422),
    ]
    for method, url, request, status in cases:
        headers = {"Content-Type": "application/json", **request.pop("headers", {})}
        answer = await api.admin.request(method, url, headers=headers, **request)
        assert answer.status_code == status, (method, url, answer.text)
        assert answer.headers["content-type"] == "application/problem+json", url
        problem = json.loads(answer.text, parse_constant=pytest.fail)
        assert problem["status"] == status and problem["code"] and problem["title"] and problem["detail"]
        if status == 405:
            assert answer.headers["allow"]
        if status == 422:
            assert problem["errors"] or problem["detail"]


async def test_a_bug_is_a_500_problem_that_says_nothing_of_the_inside(api: Api) -> None:
    """The message of an exception stays in the log."""

    @api.app.get("/v1/broken")
    async def broken() -> None:
        raise RuntimeError("the password is 12345")

    api.app.router.routes.insert(0, api.app.router.routes.pop())
    answer = await api.admin.get("/v1/broken")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert "12345" not in answer.text


async def test_a_database_that_does_not_answer_is_a_503_and_readiness_says_so(api: Api) -> None:
    """The API itself stays up, alive but not ready, and recovers."""

    def refuse(*_: Any) -> None:
        raise OperationalError("select", {}, Exception("disk I/O error"))

    engine = api.database._reader.sync_engine
    event.listen(engine, "before_cursor_execute", refuse)
    try:
        answer = await api.admin.get("/v1/jobs")
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        ready = await api.nobody.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "unavailable")
        assert (await api.nobody.get("/healthz")).status_code == 200
    finally:
        event.remove(engine, "before_cursor_execute", refuse)
    assert (await api.nobody.get("/readyz")).status_code == 200
    assert (await api.admin.get("/v1/jobs")).status_code == 200


async def test_a_websocket_finds_nothing_and_breaks_nothing(api: Api) -> None:
    """An upgrade on any path is closed before it is accepted."""
    for path in ("/", "/v1/feed", "/assets/x"):
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: dict[str, Any], sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": path, "headers": [], "query_string": b"", "subprotocols": []}
        await api.app(scope, receive, send)
        assert [message["type"] for message in sent] == ["websocket.close"]


async def test_every_answer_carries_the_headers_that_keep_pages_safe(api: Api) -> None:
    """No sniffing, no framing, no foreign scripts; answers of the API are not stored."""
    for answer in (await api.admin.get("/v1/jobs"), await api.nobody.get("/v1/jobs"), await api.nobody.get("/")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert (await api.admin.get("/v1/jobs")).headers["cache-control"] == "no-store"


UNSTORABLE = ["\\u0000", "\\ud800"]


@pytest.mark.parametrize("bad", UNSTORABLE)
async def test_text_that_no_database_holds_is_refused_at_the_edge(api: Api, bad: str) -> None:
    """NUL and lone surrogates, in any field of any body: 422 with the pointer, and nothing is changed."""
    job = await api.submit()
    path = f"/v1/jobs/{job['id']}"
    cases = [
        ("PATCH", path, '{"name": "a%s"}', "/name"),
        ("PATCH", path, '{"tags": ["x", "%s"]}', "/tags/1"),
        ("POST", f"{path}/clone", '{"name": "%s"}', "/name"),
        ("POST", f"{path}/fork", '{"checkpoint": "%s"}', "/checkpoint"),
        ("POST", f"{path}/resume", '{"checkpoint": "%s"}', "/checkpoint"),
        ("POST", "/v1/jobs/cancel", '{"ids": ["%s"]}', "/ids/0"),
        ("POST", "/v1/jobs/cancel", '{"filter": {"tag": "%s"}}', "/filter/tag"),
        ("POST", "/v1/login", '{"token": "%s"}', "/token"),
    ]
    for method, url, body, pointer in cases:
        answer = await api.admin.request(method, url, content=body % bad, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer), (url, answer.text)
    for name in ("q", "tag", "owner", "cursor"):
        answer = await api.admin.get("/v1/jobs", params={name: "a\0"})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, name)
    assert (await api.admin.get(path)).json()["version"] == job["version"]
    assert len((await api.admin.get("/v1/jobs")).json()["items"]) == 1


@pytest.mark.parametrize("name", [" ", "\u3000", "\t"])
async def test_a_name_is_never_blank_whoever_writes_it(api: Api, name: str) -> None:
    """A blank name would be refused by the spec at the next launch: it is refused where it is typed."""
    job = await api.submit()
    path = f"/v1/jobs/{job['id']}"
    for method, url in (("PATCH", path), ("POST", f"{path}/clone")):
        answer = await api.admin.request(method, url, json={"name": name})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/name"), answer.text
