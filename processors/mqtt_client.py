"""The client of MQTT as ``mqtt_source.py`` and ``mqtt_sink.py`` use it: a broker, its answers, connections.

The client is paho-mqtt, the extra ``mqtt``. It is imported on first use.
"""

from __future__ import annotations

import importlib
import ssl
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from cues.arguments import check_number, text_of
from cues.errors import Away, CuesError, InvalidArgument
from cues.imported import package
from cues.overrides import override

VERSIONS: Final = ("5", "3.1.1")
"""The versions of the protocol."""

PACKET_IDS: Final = 65_535
_PORTS: Final = {"mqtt": 1883, "mqtts": 8883}
_FAULTS: Final = frozenset(
    (129, 130, 132, 133, 134, 135, 138, 140, 142, 143, 144, 149, 153, 154, 155, 156, 157, 158, 161, 162)
)
"""Reason codes that no wait mends, such as 134 (bad user name or password) and 142 (session taken over)."""


def library() -> Any:
    return package("MQTT needs paho-mqtt", "mqtt", "paho.mqtt.client")


class Broker(NamedTuple):
    """A broker and how to reach it. Its text shows no secret."""

    shown: str
    host: str
    port: int
    user: str | None
    password: str | Callable[[], str] | None
    tls: Callable[[], ssl.SSLContext] | None
    version: str
    client: str | None
    keepalive_s: float
    timeout_s: float

    @override
    def __repr__(self) -> str:
        return f"<broker {self.shown}>"

    def made(self, id: str, clean: bool) -> Any:
        """Return a client that is not connected yet, and that gives up at the first failure."""
        lib = library()
        kept = {} if self.version == "5" else {"clean_session": clean}
        client = lib.Client(
            lib.CallbackAPIVersion.VERSION2,
            self.client or id,
            protocol=lib.MQTTv5 if self.version == "5" else lib.MQTTv311,
            manual_ack=True,
            reconnect_on_failure=False,
            **kept,
        )
        client.connect_timeout = self.timeout_s
        if self.user is not None:
            client.username_pw_set(self.user, self.password() if callable(self.password) else self.password)
        if self.tls is not None:
            client.tls_set_context(self.tls())
        return client

    def connect(self, client: Any, clean: bool, **properties: int) -> None:
        """Open the connection; the thread of the client awaits the answer. Raises :class:`Away`, and for a fault of TLS
        :class:`CuesError`."""
        options: dict[str, Any] = {}
        if self.version == "5":
            options = {"clean_start": clean, "properties": properties_of("CONNECT", **properties)}
        try:
            client.connect(self.host, self.port, round(self.keepalive_s), **options)
        except ssl.SSLError as error:
            raise CuesError(
                f"The broker {self.shown} is refused: {error}.", "correct the certificates, or tls=."
            ) from None
        except OSError as error:
            raise self.away(str(error)) from error
        client.loop_start()

    def away(self, text: str) -> Away:
        return Away(
            f"The broker {self.shown} is away: {text}.", "start the graph again when it answers.", what=self.shown
        )

    def unanswered(self) -> Away:
        older = " (a broker that does not know version 5 may be silent: version='3.1.1')" if self.version == "5" else ""
        return self.away(f"no answer within {self.timeout_s:g} s{older}")

    def failed(self, doing: str, reason: Any) -> CuesError:
        """Return the error for a reason code: the broker is away, or a fault."""
        if reason.value not in _FAULTS:
            return self.away(f"{doing}: {reason}")
        hints = {
            132: "give version='3.1.1', which older brokers speak.",
            134: "correct user= and password=.",
            135: "correct user= and password=, or the access rules of the broker.",
            142: "another client has the same id: give each source its own client=.",
        }
        hint = hints.get(reason.value, "correct the options, or the rules of the broker.")
        return CuesError(f"The broker {self.shown} refused: {doing}: {reason}.", hint)


def broker_of(
    url: str,
    user: str | None,
    password: str | Callable[[], str] | None,
    tls: Callable[[], ssl.SSLContext] | None,
    version: str,
    client: str | None,
    keepalive_s: float,
    timeout_s: float,
) -> Broker:
    """Check the options that both processors have. No error shows ``url``, which may have a password."""
    try:
        parts = urlsplit(text_of("url", url))
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        raise InvalidArgument("url= is not the address of a broker.", "give 'mqtt://host:1883'.") from None
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument("url= has a user or a password.", "give user= and password=.")
    if parts.scheme not in _PORTS or not host or parts.path.strip("/") or parts.query or parts.fragment:
        raise InvalidArgument("url= is not the address of a broker.", "give 'mqtt://host:1883' or 'mqtts://host:8883'.")
    if version not in VERSIONS:
        raise InvalidArgument(f"version={version!r} is unknown.", "use '5' or '3.1.1'.")
    if tls is not None and (parts.scheme != "mqtts" or not callable(tls)):
        raise InvalidArgument(
            "tls= is a function for a URL of mqtts://.", "give tls=lambda: ssl.create_default_context(…)."
        )
    if password is not None and (user is None or not (isinstance(password, str) or callable(password))):
        raise InvalidArgument("password= is a text or a function, and needs user=.", "give both.")
    for name, value in (("user", user), ("client", client)):
        if value is not None and not text_of(name, value):
            raise InvalidArgument(f"{name}= is empty.", "leave it out.")
    check_number("keepalive_s", keepalive_s, 1, 65_535)
    check_number("timeout_s", timeout_s, 0.001)
    if parts.scheme == "mqtts" and tls is None:
        tls = ssl.create_default_context
    library()
    shown = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    return Broker(shown, host, port, user, password, tls, version, client, keepalive_s, timeout_s)


def properties_of(packet: str, **values: Any) -> Any:
    kinds = importlib.import_module("paho.mqtt.packettypes").PacketTypes
    found = importlib.import_module("paho.mqtt.properties").Properties(getattr(kinds, packet))
    for name, value in values.items():
        setattr(found, name, value)
    return found


def close(client: Any) -> None:
    client.disconnect()
    client.loop_stop()
