"""``manage.py run_outbox_worker``: the process that delivers."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import OperationalError, connections, router
from django.utils import autoreload

from ... import conf
from ...exceptions import ConfigurationError
from ...models import OutboxMessage
from ...worker import Until, Worker
from ..base import require_alias, require_tables

LEFT_AT_ONCE = 3
UNRECORDED = 4
# seconds that a publisher's leftovers may take after the stop
LINGER = 2.0
SHOW_LIFE_EVERY = 1.0
# A worker's objects live as long as their delivery and few are cyclic garbage; Python's default of looking
# through them at every 700th costs it a tenth of its time.
GC_THRESHOLD = 20_000


class Command(BaseCommand):
    help = (
        "Deliver the outbox's messages until stopped. SIGTERM or SIGINT: claim nothing more, let running "
        "deliveries end, record them, hand back the rest, exit 0; exit 4 when outcomes could not be recorded "
        "because the database did not answer. A second signal leaves at once (exit 3). What a worker held that "
        "left with 3 or 4, or died, is delivered again when its lease ends. Wrong settings exit 1, wrong arguments "
        "2. A database that is away is waited for. Any number of workers may run at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        def seconds(flag: str, least: float, what: str, default: float | None = None) -> None:
            parse = _number(float, least, 31_536_000)
            parser.add_argument(flag, type=parse, default=default, metavar="SECONDS", help=what)

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
            type=_number(int, 1, 10_000),
            metavar="N",
            help="deliveries at once in each alias (default: its CONCURRENCY)",
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
        until.add_argument(
            "--reload", action="store_true", help="start anew when the code changes; development only"
        )
        parser.add_argument(
            "--max-messages",
            type=_number(int, 1, 10**12),
            metavar="N",
            help="claim so many messages from each database, let them end, then exit 0",
        )
        seconds("--max-runtime", 0, "stop after so long as if told by SIGTERM")
        seconds(
            "--shutdown-timeout", 0, "how long running deliveries may take after a stop (default: 30)", 30.0
        )
        seconds("--poll-interval", 0.01, "the longest an idle worker sleeps (default: POLL_INTERVAL)")
        parser.add_argument(
            "--worker-id",
            type=_name,
            metavar="NAME",
            help="what leases and attempts are marked with (default: host, process and four random digits)",
        )
        parser.add_argument(
            "--liveness-file",
            type=Path,
            metavar="PATH",
            help="touched at least every poll interval and 6 s while the worker goes round in all its databases, "
            "also while one is away; older than a minute: it hangs",
        )
        parser.add_argument(
            "--no-purge",
            dest="purge",
            action="store_false",
            help="leave what RETENTION asks for to other workers or to outbox_purge",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["reload"]:
            autoreload.run_with_reloader(self._work, options)
        else:
            self._work(options)

    def _work(self, options: dict[str, Any]) -> None:
        until: Until = options["until"] or "stopped"
        try:
            settings = conf.get()
            require_writable(options["liveness_file"])
            databases = options["database"] or settings.databases or [router.db_for_write(OutboxMessage)]
            for alias in databases:
                require_alias(alias)
                with closing(connections[alias]), suppress(OperationalError):
                    # one that is away is waited for
                    require_tables(alias)
            workers = [
                Worker(
                    settings,
                    using=alias,
                    publishers=options["publisher"],
                    concurrency=options["concurrency"],
                    shutdown_timeout=options["shutdown_timeout"],
                    until=until,
                    max_messages=options["max_messages"],
                    poll_interval=options["poll_interval"],
                    worker_id=options["worker_id"] or "",
                    purge=options["purge"],
                )
                for alias in dict.fromkeys(databases)
            ]
            with rare_collections():
                end = asyncio.run(self._run(workers, options))
            end.cancel()
        except ConfigurationError as error:
            raise CommandError(str(error)) from None
        if code := _exit_code(workers):
            unrecorded = sum(worker.unrecorded for worker in workers)
            self.stderr.write(f"{unrecorded} outcomes could not be recorded: these messages are sent again")
            sys.exit(code)

    async def _run(self, workers: list[Worker], options: dict[str, Any]) -> threading.Timer:
        loop = asyncio.get_running_loop()
        signalled = False

        def stop() -> None:
            for worker in workers:
                worker.stop()

        def on_signal() -> None:
            nonlocal signalled
            if signalled:
                os._exit(LEFT_AT_ONCE)
            signalled = True
            stop()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, on_signal)
        else:
            _stop_at_exit(loop, stop)
        if options["max_runtime"] is not None:
            loop.call_later(options["max_runtime"], stop)
        for worker in workers:
            if options["verbosity"] > 0:
                lanes = ", ".join(worker.aliases)
                self.stderr.write(
                    f"outbox worker {worker.worker_id} serves {lanes} of database {worker.using}"
                )
        living = asyncio.create_task(show_life(options["liveness_file"], workers))
        await asyncio.gather(*(worker.run() for worker in workers))
        living.cancel()
        # a publisher's task or thread that ignores the end must not keep the process
        end = threading.Timer(LINGER, os._exit, [_exit_code(workers)])
        end.daemon = True
        end.start()
        return end


async def show_life(file: Path | None, workers: list[Worker]) -> None:
    """Touch the file whenever all workers have gone round since the last time."""
    touched = float("-inf")
    while file is not None:
        if min(worker.went_round_at for worker in workers) > touched:
            touched = time.monotonic()
            # a disk that is full for a while ends no worker: the file's age tells
            _touch(file)
        await asyncio.sleep(SHOW_LIFE_EVERY)


def require_writable(file: Path | None) -> None:
    """Touch the liveness file for the first time. Raises ``ConfigurationError``: it would say "hangs" for ever."""
    if file is not None and (problem := _touch(file)):
        raise ConfigurationError(f"the liveness file cannot be written: {problem}")


def _touch(file: Path) -> str:
    """Return what went wrong, or nothing."""
    try:
        file.touch()
    except OSError as error:
        return type(error).__name__
    return ""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Have Python look for cyclic garbage seldom, and never among what was there before."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _stop_at_exit(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Drain before the reloader's main thread leaves: what is in hand would wait for the end of its lease."""
    thread = threading.current_thread()

    def drain() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop)
            thread.join()

    atexit.register(drain)


def _exit_code(workers: list[Worker]) -> int:
    return UNRECORDED if any(worker.unrecorded for worker in workers) else 0


def _number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    what = "a whole number" if kind is int else "a number"

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"expected {what} from {least:g} to {most:g}")
        return number

    return parse


def _name(text: str) -> str:
    if not 1 <= len(text) <= 255 or not text.isprintable():
        raise argparse.ArgumentTypeError("expected 1 to 255 printable characters")
    return text
