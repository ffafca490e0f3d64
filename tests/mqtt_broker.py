"""Real MQTT brokers on loopback that tests start, stop, kill and start again on the same port.

    Mosquitto   of the system, if it is installed (Debian: apt-get install mosquitto): MQTT 5, and sessions on disk
    Amqtt       from PyPI: MQTT 3.1.1, without sessions on disk. It forgets what a client did not acknowledge when the
                connection ends, so no kill can be tested with it

A broker is a process of its own, and ends with the test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ports import free_port

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


class Mosquitto:
    """A broker in a directory. ``options`` are lines of its configuration; ``tls`` has ca, certificate and key."""

    def __init__(self, path: Path, *options: str, tls: bool = False) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"mqtt{'s' * tls}://localhost:{self.port}"
        lines = [
            f"listener {self.port} 127.0.0.1",
            "persistence true",
            f"persistence_location {path}/",
            "user root",
            "max_queued_messages 0",
            "log_type none",
            *options,
        ]
        if not any(line.startswith("allow_anonymous") for line in options):
            lines.append("allow_anonymous true")
        self._config = path / "mosquitto.conf"
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, again on the same port with the sessions that are on the disk."""
        assert MOSQUITTO is not None
        log = open(self._config.with_suffix(".log"), "ab")  # noqa: SIM115
        self._process = subprocess.Popen([MOSQUITTO, "-c", str(self._config)], stdout=log, stderr=log)
        log.close()
        answers(self.port, self._process)

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """End it: SIGTERM stores the sessions, SIGKILL does not."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal_number)
            process.wait(30)


class Amqtt:
    """The broker of amqtt, as a program (see the end of this file)."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"mqtt://127.0.0.1:{self.port}"
        command = [sys.executable, __file__, str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        answers(self.port, self._process)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(30)


def answers(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a port is listened on."""
    deadline = time.monotonic() + 180
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def running(make: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Any]:
    """A broker that ends with the block."""
    broker = make(*arguments, **options)
    try:
        yield broker
    finally:
        broker.stop()


def publish(broker: Any, topic: str, payloads: Iterable[bytes], qos: int = 1, **options: Any) -> None:
    """Publish, and wait until the broker has all."""
    import paho.mqtt.client as paho

    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    try:
        for info in [client.publish(topic, payload, qos, **options) for payload in payloads]:
            info.wait_for_publish(60)
            assert info.is_published()
    finally:
        client.disconnect()
        client.loop_stop()


class Heard:
    """A subscriber that keeps all that it hears."""

    def __init__(self, broker: Any, topic: str) -> None:
        import paho.mqtt.client as paho

        self.messages: list[tuple[str, bytes, bool, list[Any]]] = []
        ready = threading.Event()
        self._client = client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.on_message = lambda c, u, message: self.messages.append(
            (message.topic, message.payload, message.retain, getattr(message.properties, "UserProperty", []))
        )
        client.on_subscribe = lambda *_: ready.set()
        client.connect("127.0.0.1", broker.port)
        client.loop_start()
        client.subscribe(topic, qos=1)
        assert ready.wait(30)

    def __enter__(self) -> Heard:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()


async def _serve(port: int) -> None:
    import asyncio

    from amqtt.broker import Broker

    plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    broker = Broker({"listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}}, "plugins": plugins})
    await broker.start()
    while os.getppid() != 1:
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    import asyncio

    asyncio.run(_serve(int(sys.argv[1])))
