"""``manage.py run_outbox_worker``: the process that delivers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import OperationalError, connections, router

from ... import conf
from ...exceptions import ConfigurationError
from ...models import OutboxMessage
from ...worker import Until, Worker

LEFT_AT_ONCE = 3


class Command(BaseCommand):
    help = (
        "Deliver the outbox's messages until stopped. SIGTERM or SIGINT: claim nothing more, let running "
        "deliveries end, record them, hand back the rest, exit 0. A second signal leaves at once (exit 3); "
        "what was in hand is delivered again when its lease ends. Wrong settings exit 1. Any number of workers "
        "may run at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--publisher",
            action="append",
            default=[],
            metavar="ALIAS",
            help="serve this alias of PUBLISHERS; may be repeated (default: all)",
        )
        parser.add_argument(
            "--database",
            action="append",
            default=[],
            metavar="ALIAS",
            help="serve the outbox of this database; may be repeated (default: DATABASES, or the router's choice)",
        )
        parser.add_argument(
            "--concurrency",
            type=_positive,
            metavar="N",
            help="deliveries at once in each alias (default: its CONCURRENCY)",
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=_seconds,
            default=30.0,
            metavar="SECONDS",
            help="how long running deliveries may take after a stop signal (default: 30)",
        )
        parser.add_argument(
            "--no-purge",
            dest="purge",
            action="store_false",
            help="leave the deleting of what RETENTION no longer keeps to other workers or to outbox_purge",
        )
        until = parser.add_mutually_exclusive_group()
        until.add_argument(
            "--once",
            dest="until",
            action="store_const",
            const="idle",
            help="deliver what is due now, then exit 0",
        )
        until.add_argument(
            "--until-empty",
            dest="until",
            action="store_const",
            const="empty",
            help="exit 0 when no message waits any more, retries and scheduled ones included",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        until: Until = options["until"] or "stopped"
        try:
            settings = conf.get()
            databases = options["database"] or settings.databases or [router.db_for_write(OutboxMessage)]
            for alias in databases:
                if alias not in connections:
                    known = ", ".join(sorted(connections))
                    raise ConfigurationError(f"there is no database {alias!r}; DATABASES has {known}")
                _require_tables(alias)
            workers = [
                Worker(
                    settings,
                    using=alias,
                    publishers=options["publisher"],
                    concurrency=options["concurrency"],
                    shutdown_timeout=options["shutdown_timeout"],
                    until=until,
                    purge=options["purge"],
                )
                for alias in dict.fromkeys(databases)
            ]
            asyncio.run(self._run(workers, options["verbosity"]))
        except ConfigurationError as error:
            raise CommandError(str(error)) from None

    async def _run(self, workers: list[Worker], verbosity: int) -> None:
        loop = asyncio.get_running_loop()
        signalled = False

        def on_signal() -> None:
            nonlocal signalled
            if signalled:
                os._exit(LEFT_AT_ONCE)
            signalled = True
            for worker in workers:
                worker.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        for worker in workers:
            if verbosity > 0:
                lanes = ", ".join(worker.aliases)
                self.stderr.write(
                    f"outbox worker {worker.worker_id} serves {lanes} of database {worker.using}"
                )
        await asyncio.gather(*(worker.run() for worker in workers))


def _require_tables(alias: str) -> None:
    try:
        names = connections[alias].introspection.table_names()
    except OperationalError:
        return  # away: the worker waits for it
    finally:
        connections[alias].close()
    if OutboxMessage._meta.db_table not in names:
        raise ConfigurationError(f"database {alias!r} has no outbox tables: run 'manage.py migrate' first")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86400:
        raise ValueError
    return seconds
