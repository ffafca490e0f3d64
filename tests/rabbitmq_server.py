"""A real RabbitMQ on loopback that tests start, stop, kill and start again on its data.

It is the server of the system, if it is installed (Debian: apt-get install rabbitmq-server); no package of PyPI has it.
Each node has its own directory, ports, name, cookie and port mapper (epmd), so it meets no other node of the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mqtt_broker import answers
from ports import free_port

RABBITMQ = shutil.which("rabbitmq-server", path="/usr/lib/rabbitmq/bin:/usr/local/sbin:/opt/rabbitmq/sbin")
"""The script itself: the one in Debian's /usr/sbin runs as another user, in that user's directory."""
MISSING = "RabbitMQ is not on this machine: apt-get install rabbitmq-server"

RIGHTS = {"configure": ".*", "write": ".*", "read": ".*"}


class RabbitMQ:
    """A node in a directory. ``options`` are lines of rabbitmq.conf; ``arguments`` are those of erl.

    ``users`` have a password and rights by name.
    """

    def __init__(
        self,
        path: Path,
        *options: str,
        users: dict[str, tuple[str, dict[str, str]]] | None = None,
        arguments: str = "",
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.port, self._mapper_port, node_port = free_port(), free_port(), free_port()
        self.url = f"amqp://localhost:{self.port}"
        self._path, self._running, self._mapper = path, None, None
        known = {"guest": ("guest", RIGHTS), **(users or {})}
        definitions = {
            "vhosts": [{"name": "/"}, {"name": "closed"}],
            "users": [{"name": name, "password": word, "tags": ""} for name, (word, _) in known.items()],
            "permissions": [{"user": name, "vhost": "/", **rights} for name, (_, rights) in known.items()],
        }
        (path / "definitions.json").write_text(json.dumps(definitions))
        lines = [
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            f"load_definitions = {path}/definitions.json",
            "disk_free_limit.absolute = 1MB",
            *options,
        ]
        (path / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        for name in ("plugins", "environment"):
            (path / name).write_text("[].\n" if name == "plugins" else "")
        (path / ".erlang.cookie").write_text("CUESTEST")
        (path / ".erlang.cookie").chmod(0o400)
        own = "-noinput -kernel inet_dist_use_interface {127,0,0,1} +sbwt none"
        self._environment = {
            **os.environ,
            "HOME": str(path),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            "RABBITMQ_NODENAME": f"cues{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(node_port),
            "RABBITMQ_CONFIG_FILE": str(path / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(path / "environment"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(path / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(path / "data"),
            "RABBITMQ_LOG_BASE": str(path / "log"),
            "RABBITMQ_PID_FILE": str(path / "pid"),
            "RABBITMQ_ALLOW_INPUT": "1",  # the script then becomes the node, which signals reach
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{own} {arguments}",
        }
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Start it, again on the same port with the data that is on the disk."""
        assert RABBITMQ is not None
        if self._mapper is None:
            self._mapper = self._program(str(shutil.which("epmd")))
            answers(self._mapper_port, self._mapper)
        self._running = self._program(RABBITMQ)
        answers(self.port, self._running)

    def _program(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self._path / "output", "ab") as log:
            return subprocess.Popen(command, env=self._environment, stdout=log, stderr=log, cwd=self._path)

    def end(self, signal_number: int = signal.SIGTERM) -> None:
        """End the node: SIGTERM stops it in order, SIGKILL does not."""
        running, self._running = self._running, None
        if running is not None:
            running.send_signal(signal_number)
            running.wait(60)

    def stop(self) -> None:
        """End the node and its port mapper."""
        self.end(signal.SIGKILL)
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait(30)

    # --- what tests do at the broker ---

    def channel(self) -> Any:
        """A new connection with one channel, whose publications are confirmed."""
        import pika

        channel = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port)).channel()
        channel.confirm_delivery()
        return channel

    def declare(self, queue: str, durable: bool = True, **arguments: Any) -> None:
        """Make a queue; ``arguments`` have underscores in the place of hyphens: ``x_queue_type="quorum"``.

        RabbitMQ writes the name of a new quorum queue to its file up to some seconds later. Killed before that, it
        would never have a leader for the queue again, so this waits.
        """
        channel = self.channel()
        given = {name.replace("_", "-"): value for name, value in arguments.items()}
        channel.queue_declare(queue, durable=durable, arguments=given)
        channel.connection.close()
        until = time.monotonic() + 60
        while given.get("x-queue-type") == "quorum" and not any(
            f"2F_{queue}".encode() in file.read_bytes() for file in self._path.glob("data/*/quorum/*/names.dets")
        ):
            assert time.monotonic() < until, "the name of the queue is not in the file"
            time.sleep(0.05)

    def publish(
        self, queue: str, bodies: Iterable[bytes], ids: bool = False, confirm: bool = False, **properties: Any
    ) -> list[bytes]:
        """Publish persistent messages; ``ids``: the body is the message_id. Returns the bodies that may be there twice.

        All in one transaction; with ``confirm`` each one is confirmed: a quorum queue takes no part in transactions. It
        refuses publications without a leader, for seconds after a start, so what is refused is published again.
        """
        import pika

        again: list[bytes] = []

        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port))
        channel = connection.channel()
        channel.confirm_delivery() if confirm else channel.tx_select()
        for body in bodies:
            if ids:
                properties["message_id"] = body.decode()
            until = time.monotonic() + 60
            while True:
                try:
                    channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2, **properties))
                    break
                except pika.exceptions.NackError:
                    if time.monotonic() > until:
                        raise
                    again.append(body)
                    connection.sleep(0.1)
        if not confirm:
            channel.tx_commit()
        connection.close()
        return again

    def taken(self, queue: str) -> list[tuple[Any, bytes]]:
        """Take all messages of a queue: the properties and the body of each."""
        channel, found = self.channel(), []
        while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
            found.append((got[1], got[2]))
        channel.connection.close()
        return found

    def count(self, queue: str) -> int:
        """The messages of a queue that are ready to be sent."""
        channel = self.channel()
        count: int = channel.queue_declare(queue, passive=True).method.message_count
        channel.connection.close()
        return count
