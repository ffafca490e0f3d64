"""The page about deploying: its web servers write to a queue, forked ones too, and its alerts name real metrics."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.tools import exporter

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "how-to" / "deploy.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.M | re.S))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a file of the page; its store is in the directory of the test."""
    monkeypatch.setenv("SHOP_STORE", str(tmp_path / "shop"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    outbox = sys.modules.pop("outbox")
    outbox._orders(os.getpid()).queue.store.close()
    for name in FILES:
        sys.modules.pop(name, None)


def orders(place: Path) -> list[dict[str, Any]]:
    with cues.open(place / "shop", readonly=True) as store:
        return [
            {k: v for k, v in message.items() if not k.startswith("q/")} for message in store.queue("orders").tailer()
        ]


ORDER = {"count": 3, "cents": 100}


def test_flask_writes(load: Callable[[str], Any], tmp_path: Path) -> None:
    pytest.importorskip("flask")
    client = load("flask_app").app.test_client()
    answers = [client.post("/orders", json=ORDER) for _ in range(2)]
    assert [(answer.status_code, answer.get_json()) for answer in answers] == [(202, {"index": 1}), (202, {"index": 2})]
    assert orders(tmp_path) == [ORDER, ORDER]


def test_django_writes(load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view is called with what it needs of Django: a request with a body, and the class of answers."""
    http = types.ModuleType("django.http")
    http.JsonResponse = lambda data, status: (status, data)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "django", types.ModuleType("django"))
    monkeypatch.setitem(sys.modules, "django.http", http)
    request = types.SimpleNamespace(body=json.dumps(ORDER).encode())
    assert load("views").orders(request) == (202, {"index": 1})
    assert orders(tmp_path) == [ORDER]


def test_fastapi_writes(load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application is that of FastAPI where it is installed, else one of Starlette with the same decorator."""
    pytest.importorskip("starlette")
    if not importlib.util.find_spec("fastapi"):
        monkeypatch.setitem(sys.modules, "fastapi", small_fastapi())
    app = load("fastapi_app").app
    assert asyncio.run(post(app, "/orders", ORDER)) == (202, {"index": 1})
    assert orders(tmp_path) == [ORDER]


def small_fastapi() -> types.ModuleType:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    class FastAPI(Starlette):
        def post(self, path: str, status_code: int) -> Callable[[Any], Any]:
            def decorate(fn: Callable[[Any], Any]) -> Any:
                async def answer(request: Request) -> JSONResponse:
                    return JSONResponse(await run_in_threadpool(fn, await request.json()), status_code)

                self.add_route(path, answer, methods=["POST"])
                return fn

            return decorate

    module = types.ModuleType("fastapi")
    module.FastAPI = FastAPI  # type: ignore[attr-defined]
    return module


async def post(app: Any, path: str, message: dict[str, Any]) -> tuple[int, Any]:
    """Send one request to an ASGI application, and return status and body of the answer."""
    sent: list[dict[str, Any]] = []
    body = json.dumps(message).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(part: dict[str, Any]) -> None:
        sent.append(part)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path}
    scope |= {"raw_path": path.encode(), "query_string": b"", "headers": headers, "root_path": "", "scheme": "http"}
    await app(scope, receive, send)
    return sent[0]["status"], json.load(io.BytesIO(b"".join(part.get("body", b"") for part in sent)))


FORKED = """
import os
import cues
import outbox

def child(work):
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

outbox.place({"from": "parent"})
parents = outbox._orders(os.getpid())
print(child(lambda: parents.write({"from": "nobody"})), flush=True)
for number in range(3):
    print(child(lambda: outbox.place({"from": number})), flush=True)
print(outbox.place({"from": "parent"}))
"""


def test_a_forked_server_opens_the_store_after_the_fork(load: Callable[[str], Any], tmp_path: Path) -> None:
    """As gunicorn with preload_app: the parent has the store open, and its children write through their own."""
    load("outbox")
    ran = subprocess.run([sys.executable, "-c", FORKED], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["Forked", "1", "0", "0", "0", "5"], ran.stderr
    assert [message["from"] for message in orders(tmp_path)] == ["parent", 0, 1, 2, "parent"]


def test_each_alert_names_metrics_and_labels_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    rules = group["rules"]
    assert [rule["alert"] for rule in rules] == re.findall(r"^\| `(Cues\w+)` \|", PAGE, re.M)
    known = {
        f"{name}_total" if kind == "counter" else name: labels for name, (kind, labels, _) in exporter.METRICS.items()
    }
    for rule in rules:
        named = re.findall(r"cues_\w+", rule["expr"])
        assert named and set(named) <= set(known), rule["expr"]
        assert re.fullmatch(r"\d+m", rule["for"]) and rule["labels"]["severity"]
        labels = set.intersection(*({*known[name], "instance"} for name in named))
        for shown in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert shown in labels, rule
        assert rule["expr"].count("(") == rule["expr"].count(")")


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_accepts_the_alerts() -> None:
    subprocess.run(["promtool", "check", "rules", DOCS / "alerts.yml"], check=True, timeout=60)
