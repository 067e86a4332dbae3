"""Real worker processes against the test database, and what tests ask of the outbox around them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connection, connections, router, transaction

from notification_outbox import Receipt, conf, enqueue
from notification_outbox.models import OutboxMessage
from notification_outbox.worker import Until, Worker
from tests.receiver import Receiver
from tests.settings import SIGNER

ROOT = Path(__file__).parent.parent
POLL = 0.02


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 30.0, poll: float = POLL) -> None:
    """Wait for something another process does; say what was waited for when it does not come."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(poll)


def database_url() -> str:
    """Return the test database's address as another process understands it."""
    found = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{Path(found['NAME']).absolute()}"
    scheme = {"postgresql": "postgres", "mysql": "mysql"}[connection.vendor]
    login = found["USER"] + (f":{found['PASSWORD']}" if found["PASSWORD"] else "")
    return f"{scheme}://{login}@{found['HOST']}:{found['PORT']}/{found['NAME']}"


class Started:
    """A worker process; its log goes to a file so that it never waits for a reader."""

    def __init__(
        self,
        *arguments: str,
        raw_settings: dict[str, Any],
        log_level: str = "INFO",
        environment: dict[str, str] | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "django", "run_outbox_worker", *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "DATABASE_URL": database_url(),
                "OUTBOX_TEST_SECOND": str(connections["second"].settings_dict["NAME"]),
                "DJANGO_SETTINGS_MODULE": "tests.settings",
                "OUTBOX_TEST_SETTINGS": json.dumps(raw_settings),
                "OUTBOX_TEST_LOG": log_level,
                **(environment or {}),
            },
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait(self, timeout: float = 90.0) -> int:
        return self.popen.wait(timeout)

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        # a reloader's child outlives it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(10)

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()

    def close(self) -> None:
        self.kill()
        self._log.close()


@dataclass
class Outbox:
    """What a test needs of the outbox: settings that reach the receiver, messages, workers."""

    receiver: Receiver
    configure_settings: Callable[..., None]
    started: list[Started]
    raw: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.configure()

    def configure(
        self, options: dict[str, Any] | None = None, root: dict[str, Any] | None = None, **alias: Any
    ) -> None:
        """Set the default publisher's keys and options; the receiver is trusted and allowed."""
        reach = {"ca_file": self.receiver.ca_file, "allow_hosts": [self.receiver.host]}
        self.raw = {"PUBLISHERS": {"default": {"OPTIONS": reach | (options or {}), **alias}}, **(root or {})}
        here = json.loads(json.dumps(self.raw))
        here["PUBLISHERS"]["default"]["OPTIONS"]["signer"] = SIGNER
        self.configure_settings(**here)

    def enqueue(self, count: int = 1, path: str = "/hooks", **arguments: Any) -> list[Receipt]:
        """Enqueue and commit ``count`` messages ``{"n": 0…}``."""
        arguments = {"to": self.receiver.url(path), **arguments}
        with transaction.atomic():
            return [enqueue("order.paid", {"n": n}, **arguments) for n in range(count)]

    def work(self, until: Until = "idle", **options: Any) -> None:
        """Run a worker in this process until there is nothing more to do."""
        worker = Worker(conf.get(), using=router.db_for_write(OutboxMessage), until=until, **options)
        asyncio.run(worker.run())

    def start(self, *arguments: str, log_level: str = "INFO", **environment: str) -> Started:
        """Start a worker process with this test's settings; it is killed when the test ends."""
        process = Started(*arguments, raw_settings=self.raw, log_level=log_level, environment=environment)
        self.started.append(process)
        return process

    def settings_text(self) -> str:
        """Return this test's settings as another process reads them from ``OUTBOX_TEST_SETTINGS``."""
        return json.dumps(self.raw)

    def states(self) -> dict[str, int]:
        """Return how many messages there are in each state."""
        found: dict[str, int] = {}
        for state in OutboxMessage.objects.values_list("state", flat=True):
            found[state] = found.get(state, 0) + 1
        return found

    def row(self, receipt: Receipt) -> OutboxMessage:
        return OutboxMessage.objects.get(id=receipt.id)
