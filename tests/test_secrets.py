"""Secrets: a password, token or key that a processor is given is in no repr, drawing, place or error.

The table is made of the declarations of all ready-made processors (:data:`test_raw_errors.DECLARATIONS`): each
parameter whose value can hold a secret gets one. A new processor is in it by being declared there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_raw_errors import DECLARATIONS, STRANGE

import cues
from cues.errors import CuesError
from cues.graphs import draw

SECRET = "S3cr3t-0123456789"
ALONE = {"password", "secret", "client_secret", "refresh_token", "token"}
ADDRESSES = {"url", "servers", "target", "where", "path", "pattern", "endpoint_url"}
NAMES_ONLY = {
    "key", "cert", "client_ca", "ca", "user", "client_id", "key_header", "header", "sign", "verify", "partition",
    "routing_key",
}  # fmt: skip
"""Parameters that sound like a secret: fields of messages, files, names, and objects with tables of their own."""
SOUNDS = re.compile(r"pass|secret|token|key|cert|ca$|user|header|config|options|properties|credential|auth|sign|verify")
MAPPINGS: dict[str, Any] = {
    "config": {
        "Records": {"sasl.password": SECRET}, "Topic": {"sasl.password": SECRET},
        "RedisStream": {"password": SECRET}, "RedisTarget": {"password": SECRET},
        "NatsStream": {"password": SECRET}, "NatsSubject": {"password": SECRET},
    },
    "storage_options": {"AWS_SECRET_ACCESS_KEY": SECRET},
    "properties": {"s3.secret-access-key": SECRET},
    "headers": {"Authorization": f"Bearer {SECRET}"},
}  # fmt: skip


def secret_value(name: str, parameter: str, value: Any) -> Any:
    """Return ``value`` with a secret in it; None if it can hold none."""
    if parameter in ALONE:
        return SECRET
    if parameter in MAPPINGS:
        given = MAPPINGS[parameter]
        return given.get(name) if parameter == "config" else given
    if parameter in ADDRESSES and isinstance(value, str) and "://" in value:
        return re.sub("://", f"://user:{SECRET}@", value, count=1)
    return None


def cases() -> list[tuple[str, str, Any]]:
    found = []
    for name, (_, given) in DECLARATIONS.items():
        for parameter, value in given.items():
            secret = secret_value(name, parameter, value)
            if secret is not None:
                found.append((name, parameter, secret))
                if isinstance(secret, str) and "://" in secret:
                    found.append((name, parameter, f"{secret}?password={SECRET}&token={SECRET}"))
    return found


def texts(made: Any) -> list[str]:
    """Everything that people are shown of a processor: its repr, its place, and what ``cues show`` draws."""
    shown = [repr(made), str(made), str(getattr(made, "place", "")), str(getattr(made, "where", ""))]
    graph = None
    if isinstance(made, (cues.Source, cues.Stream, cues.Sink)):
        graph = cues.Graph("g", [made])
    elif callable(getattr(made, "sink", None)):
        graph = cues.Graph("g", [made.sink("a")])
    elif callable(made):
        try:
            graph = cues.Graph("g", [cues.Source("a", made)])
        except CuesError as error:
            shown.append(str(error))
    if graph is not None:
        plan = graph.plan()
        shown += [repr(graph), str(plan), draw.text(plan), draw.mermaid(plan), json.dumps(draw.describe(plan))]
    return shown


def test_the_table_has_the_processors_that_take_secrets() -> None:
    names = {name for name, _, _ in cases()}
    assert {"Poll", "OAuth", "Signature", "Mqtt", "RabbitQueue", "RedisStream", "NatsSubject", "Changes"} <= names


def test_every_parameter_that_may_hold_a_secret_is_in_the_table() -> None:
    """A new parameter whose name sounds like a secret gets one here, or says that it holds none."""
    given = {parameter for _, parameters in DECLARATIONS.values() for parameter in parameters}
    known = {*ALONE, *ADDRESSES, *MAPPINGS, *NAMES_ONLY}
    assert {parameter for parameter in given if SOUNDS.search(parameter)} - known == set()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameter", "secret"), cases())
def test_a_secret_is_shown_nowhere(
    name: str, parameter: str, secret: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, given = DECLARATIONS[name]
    found = []
    try:
        found += texts(make(**{**given, parameter: secret}))
    except CuesError as error:
        found.append(str(error))
    for other in given:
        if other != parameter:
            for value in STRANGE:
                try:
                    make(**{**given, parameter: secret, other: value})
                except CuesError as error:
                    found.append(f"{other}={value!r:.40}: {error}")
                except Exception:  # test_raw_errors.py finds it
                    continue
    assert [text for text in found if SECRET in text] == []
