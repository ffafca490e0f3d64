"""The client of Amazon Web Services as ``sqs.py`` and ``kinesis.py`` use it: boto3, and the errors of its requests.

boto3 finds credentials and the region as it always does: environment, profile, role. It is imported on first use.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from cues.errors import Away, CheckpointError, CuesError, InvalidArgument
from cues.imported import package

_AWAY: Final = re.compile(
    r"Throttl|TooManyRequests|RequestLimit|LimitExceeded|ThroughputExceeded|ServiceUnavailable|InternalError"
    r"|InternalFailure|Timeout"
)
"""Codes of errors that pass: too many requests, and failures of the service."""


def check_library(service: str, client: Any) -> None:
    """Raise :class:`InvalidArgument` for a ``client=`` that is none, and :class:`NotInstalled` without boto3."""
    if client is not None and not callable(client):
        raise InvalidArgument(
            "client= is not a function.", f"give a function that returns boto3.client({service!r}, …)."
        )
    package(f"{service} of Amazon needs boto3", service, "boto3")


def client_of(service: str, make: Callable[[], Any] | None, **options: Any) -> Any:
    """Return the client of ``make``, or one of boto3; options that are None are boto3's to find."""
    if make is not None:
        return make()
    given = {name: value for name, value in options.items() if value is not None}
    return importlib.import_module("boto3").client(service, **given)


def code_of(error: BaseException) -> str:
    """Return the code of an error of botocore, such as ``"AccessDeniedException"``; empty if it has none."""
    answer = getattr(error, "response", None) or {}  # that of a timeout is None
    return str(answer.get("Error", {}).get("Code", ""))


def failed(what: str, error: Exception) -> CuesError:
    """Return the error for one of botocore: the service is away, or a fault."""
    exceptions = importlib.import_module("botocore.exceptions")
    text = f"{what} cannot be used: {type(error).__name__}: {error}"
    answer = getattr(error, "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    lost = isinstance(error, (exceptions.ConnectionError, exceptions.HTTPClientError))
    if lost or status >= 500 or _AWAY.search(code_of(error)):
        return Away(text, "start the graph again when the service answers.", what=what)
    return CuesError(text, "correct the URL, the name, the region, the credentials or the permissions.")


@contextlib.contextmanager
def said(what: str) -> Iterator[None]:
    """Raise the errors of botocore as those of Cues."""
    exceptions = importlib.import_module("botocore.exceptions")
    try:
        yield
    except (exceptions.BotoCoreError, exceptions.ClientError) as error:
        raise failed(what, error) from error


@contextlib.contextmanager
def sending(what: str, where: str) -> Iterator[None]:
    """Raise the errors of botocore as those of a sink: what no message can mend is a :class:`CheckpointError`."""
    try:
        with said(what):
            yield
    except (InvalidArgument, Away):
        raise
    except CuesError as error:
        raise CheckpointError(error.message, error.hint, where=where, away=False) from error
