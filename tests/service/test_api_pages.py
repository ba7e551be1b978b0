"""Pages, probes, the OpenAPI document and plans: what the rest of the world reads."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from server import openapi, views
from server.app import create_app
from server.controller.cluster import Node
from server.controller.leader import Leadership
from server.controller.plan_maker import PlanMaker
from server.examples import EXAMPLES
from server.models import PlanRequest
from server.routes.actions import BulkCancel
from server.routes.forks import CloneRequest, ForkRequest, PreflightRequest
from server.routes.jobs import JobPatch
from server.routes.session import LoginBody, NewToken, TokenView
from server.rows import nodes, plans
from server.states import Action, Status
from server.views import AttemptView, CheckpointView, EventView, PlanView
from tests.service.conftest import SPEC, Api
from workers.contract import ReportBatch, ReportReply, ResumeRequest
from workers.planner import SpecPlan
from workers.spec import JobSpec


@pytest.fixture
def database_url(tmp_path: Path, sqlite_template: Path) -> str:
    """Nothing here depends on the database: SQLite alone."""
    path = tmp_path / "pages.db"
    path.write_bytes(sqlite_template.read_bytes())
    return f"sqlite:///{path}"


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """A small dashboard, there before the app is made."""
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>Shardyard</title>" + " " * 2000)
    (folder / "assets" / "app-1a2b.js").write_text("console.log('x');" * 200)
    (folder / "favicon.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


HTML = {"Accept": "text/html,*/*"}


async def test_every_page_is_the_dashboard_and_every_file_is_itself(static: Path, api: Api) -> None:
    """Routes of the browser get index.html; files their type, a tag and a life span."""
    for path in ("/", "/jobs/abc", "/new", "/cluster", "/deep/er"):
        page = await api.nobody.get(path, headers=HTML)
        assert page.status_code == 200 and page.text.startswith("<!doctype html>"), path
        assert page.headers["cache-control"] == "no-cache"
    script = await api.nobody.get("/assets/app-1a2b.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "immutable" in script.headers["cache-control"]
    again = await api.nobody.get("/assets/app-1a2b.js", headers={"If-None-Match": script.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_files_are_sent_compressed_to_who_takes_it(static: Path, api: Api) -> None:
    """The same bytes after unpacking; plain for others; both say that they vary."""
    packed = await api.nobody.get("/assets/app-1a2b.js", headers={"Accept-Encoding": "gzip"})
    plain = await api.nobody.get("/assets/app-1a2b.js", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert packed.content == plain.content == (static / "assets" / "app-1a2b.js").read_bytes()
    assert int(packed.headers["content-length"]) < len(gzip.compress(plain.content, 1))
    assert "Accept-Encoding" in packed.headers["vary"] and "Accept-Encoding" in plain.headers["vary"]


async def test_no_spelling_of_a_path_leaves_the_folder(static: Path, api: Api) -> None:
    """Dots, encodings, backslashes, drive letters, absolute paths: 404, and never the secret."""
    for path in (
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/assets/..%2f..%2fsecret.txt",
        "/assets/..%5c..%5csecret.txt",
        "//etc/passwd",
        "/C:/secret.txt",
        "/assets/%00",
        "/index.html%00.js",
    ):
        answer = await api.nobody.get(path)
        assert answer.status_code == 404 and "secret" not in answer.text.replace("secret.txt", ""), path


async def test_an_unknown_path_of_the_api_is_never_a_page(static: Path, api: Api) -> None:
    """A browser that types it sees the problem."""
    for path in ("/v1/nothing", "/v1", "/healthz/x", "/assets/none.js"):
        assert (await api.nobody.get(path, headers=HTML)).status_code in (401, 404), path


async def test_a_server_without_a_dashboard_says_how_to_build_it(api: Api) -> None:
    """And works otherwise."""
    page = await api.nobody.get("/", headers=HTML)
    assert page.status_code == 200 and "make web" in page.text


async def test_prometheus_reads_jobs_by_status_and_slots(api: Api) -> None:
    """Every status is there, also at zero; no name of a job is."""
    await api.submit("a secret name")
    async with api.database.write() as tx:
        await nodes.replace(tx, [Node("n1", "127.0.0.1", True, "cpu", 4, 3, 2**30, 2**28)])
    answer = await api.nobody.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = dict(re.findall(r"^(shardyard_\w+(?:\{[^}]*\})?) (\S+)$", answer.text, re.M))
    assert found['shardyard_jobs{status="queued"}'] == "1.0"
    assert {f'shardyard_jobs{{status="{s}"}}' for s in Status} <= set(found)
    assert (found["shardyard_slots"], found["shardyard_slots_free"]) == ("4.0", "3.0")
    assert "secret" not in answer.text


async def test_nodes_show_what_the_controller_saw_last(api: Api) -> None:
    """Replaced as a whole, and the feed is told only of a difference."""
    seen = [
        Node("n1", "127.0.0.1", True, "cpu", 4, 3, 2**30, 2**28),
        Node("n2", "10.0.0.2", True, "cuda", 1, 1, 1, 1, ("GPU-1",)),
    ]
    for _ in range(2):
        async with api.database.write() as tx:
            await nodes.replace(tx, seen)
    items = (await api.admin.get("/v1/nodes")).json()["items"]
    assert [(n["id"], n["slots"], n["devices"]) for n in items] == [("n1", 4, []), ("n2", 1, ["GPU-1"])]


# --- the document


def test_the_committed_openapi_document_is_current(root: Path) -> None:
    """The dashboard's types come from it: `python -m server.openapi > web/openapi.json` after every change."""
    assert (root / "web" / "openapi.json").read_text() == openapi.text()


def test_the_page_of_the_api_has_every_route_and_every_code_of_an_error(root: Path) -> None:
    """`docs/http-api.md` says of each route what the document says, and names each code that a problem may carry."""
    page = (root / "docs" / "http-api.md").read_text()
    for path, operations in openapi.document()["paths"].items():
        for method, operation in operations.items():
            row = f"| `{method.upper()} {path}` | {operation['description'].splitlines()[0]} |"
            assert row in page, row
    files = [*(root / "server").glob("*.py"), *(root / "server" / "rows").glob("*.py")]
    sources = "".join(file.read_text() for file in [*files, *(root / "server" / "routes").glob("*.py")])
    codes = set(re.findall(r'code="([a-z_]+)"', sources)) - {"unknown_attempt", "unknown_rank", "wrong_fence"}
    assert {code for code in codes if f"`{code}`" not in page} == set()


async def test_the_document_is_served_with_examples_and_unique_names(api: Api) -> None:
    """No dangling reference, every operation named once, every body with an example."""
    document = (await api.nobody.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    text = json.dumps(document)
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', text)) <= set(document["components"]["schemas"])
    operations = [o for path in document["paths"].values() for o in path.values()]
    names = [o["operationId"] for o in operations]
    assert len(names) == len(set(names)) > 30
    assert all(o.get("summary") and o.get("description") for o in operations)
    submit = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]
    assert submit["application/json"]["examples"] and submit["application/yaml"]["example"]


async def test_the_examples_of_the_document_are_accepted(api: Api) -> None:
    """What it shows can be sent."""
    content = openapi.document()["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]
    for example in content["application/json"]["examples"].values():
        assert (await api.admin.post("/v1/jobs", json=example["value"])).status_code == 201
    answer = await api.admin.post(
        "/v1/jobs", content=content["application/yaml"]["example"], headers={"Content-Type": "application/yaml"}
    )
    assert answer.status_code == 201


def test_every_example_is_valid_and_every_json_body_has_one() -> None:
    """Each validates against its own schema's model; no request or answer of an operation is without one."""
    models: dict[str, Any] = {name: getattr(views, name) for name in dir(views)}
    models |= {model.__name__: model for model in (JobSpec, ReportBatch, ReportReply, ResumeRequest)}
    models |= {
        model.__name__: model
        for model in (JobPatch, CloneRequest, ForkRequest, PreflightRequest, BulkCancel, LoginBody, NewToken, TokenView)
    }
    models |= {f"Page_{view.__name__}_": views.Page[view] for view in (AttemptView, EventView, CheckpointView)}
    for name, example in EXAMPLES.items():
        models[name].model_validate_json(json.dumps(example))
    document = openapi.document()
    used = {
        content["schema"]["$ref"].rpartition("/")[2]
        for path in document["paths"].values()
        for operation in path.values()
        for part in [operation.get("requestBody", {}), *operation["responses"].values()]
        for kind, content in part.get("content", {}).items()
        if kind == "application/json" and "$ref" in content.get("schema", {})
    }
    assert used - {"HTTPValidationError"} <= set(EXAMPLES)


def test_the_enums_of_the_document_are_the_tables_of_the_states() -> None:
    """The dashboard cannot know another status or action than the server."""
    schemas = openapi.document()["components"]["schemas"]
    assert schemas["Status"]["enum"] == [s.value for s in Status]
    assert schemas["Action"]["enum"] == [a.value for a in Action]


def test_two_apps_of_one_process_do_not_share_state(api: Api) -> None:
    """Nothing of an app is global: two APIs may stand in one process."""
    other = create_app(api.settings, api.database)
    assert other.state.feed is not api.app.state.feed


# --- plans


async def test_a_plan_has_all_stages_beside_the_papers_and_advises_one(api: Api) -> None:
    """Bytes by category and purpose at the spec's own ranks; nothing is submitted."""
    answer = await api.admin.post("/v1/plans", json={**SPEC, "resources": {"ranks": 4}})
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert [s["stage"] for s in plan["stages"]] == [0, 1, 2, 3]
    assert (plan["ranks"], plan["micro_batches"], plan["fits"]) == (4, 4, True)
    for stage in plan["stages"]:
        assert stage["total_bytes"] == sum(stage["memory"].values())
        assert stage["total_traffic_bytes"] == sum(stage["traffic"].values())
    assert plan["advised_stage"] in range(4) and plan["advice"]
    assert (await api.admin.get("/v1/jobs")).json()["items"] == []


def test_the_view_of_a_plan_has_every_field_of_the_planners() -> None:
    """What the planner learns to say, the API says."""
    assert set(PlanView.model_fields) == set(SpecPlan.model_fields)


async def test_a_plan_is_for_the_smallest_device_at_hand(api: Api) -> None:
    """A node whose slots are too small: it does not fit, and says so."""
    async with api.database.write() as tx:
        await nodes.replace(tx, [Node("n1", "127.0.0.1", True, "cpu", 4, 4, 4000, 1000)])
    plan = (await api.admin.post("/v1/plans", json=SPEC)).json()
    assert plan["device_memory_bytes"] == 1000 and not plan["fits"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_plan_of_a_users_model_comes_from_the_model_itself(api: Api) -> None:
    """202 and a place to look. Built for real: its parameters at every stage, or the user's own traceback."""
    folder = api.settings.roots[0] / "code"
    folder.mkdir()
    lines = ["from torch import nn", "def build(width):", "    print('noise')", "    return nn.Linear(64, width)"]
    (folder / "mine.py").write_text("\n".join([*lines, "def broken(width):", "    raise ValueError('no such width')"]))
    places = []
    for entry in ("mine:build", "mine:broken"):
        model = {"kind": "python", "entry": entry, "path": str(folder), "kwargs": {"width": 10}}
        asked = await api.admin.post("/v1/plans", json={**SPEC, "model": model})
        assert (asked.status_code, asked.json()["status"]) == (202, "pending"), asked.text
        places.append(asked.headers["location"])
    leadership = Leadership(api.database, "controller", 60.0)
    assert await leadership.acquire()
    maker = PlanMaker(api.database, api.settings, leadership)
    await maker.begin()
    await asyncio.gather(*maker.making.values())
    await maker.stop()
    good, bad = [(await api.admin.get(place)).json() for place in places]
    assert good["status"] == "done", good
    plan = good["plan"]
    assert (plan["parameters"], [stage["stage"] for stage in plan["stages"]]) == (650, [0, 1, 2, 3])
    assert "shardyard calibrate" in plan["step_basis"]
    assert [stage["paper_bytes"] for stage in plan["stages"]] == [16 * 650, 12 * 650, 10 * 650, 8 * 650]
    assert bad["status"] == "failed" and "ValueError: no such width" in bad["error"] and "broken" in bad["error"]


async def test_a_submit_does_not_wait_for_a_model_to_be_built(api: Api) -> None:
    """The job is there, its plan is being made; a plan that somebody only asked about goes after a day."""
    folder = api.settings.roots[0] / "code"
    folder.mkdir()
    (folder / "mine.py").write_text("def build(): ...\n")
    spec = {**SPEC, "model": {"kind": "python", "entry": "mine:build", "path": str(folder)}}
    asked = await api.admin.post("/v1/plans", json=spec)
    submitted = await api.admin.post("/v1/jobs", json=spec)
    assert submitted.status_code == 201 and submitted.json()["stage"] is None
    plan = (await api.admin.get(f"/v1/jobs/{submitted.json()['id']}/plan")).json()
    assert (plan["status"], plan["predicted"], plan["failure"]) == ("pending", None, None)
    async with api.database.write() as tx:
        await tx.execute(update(PlanRequest).values(created_at=tx.now - plans.KEPT * 2))
    await api.admin.post("/v1/plans", json=spec)
    assert (await api.admin.get(asked.headers["location"])).status_code == 404
    assert (await api.admin.get(f"/v1/jobs/{submitted.json()['id']}/plan")).json()["status"] == "pending"
