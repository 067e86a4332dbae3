"""``manage.py outbox_purge``: delete what is kept no longer, now."""

from __future__ import annotations

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import router

from ... import conf
from ...exceptions import ConfigurationError
from ...models import OutboxMessage
from ...operations import purge, purgeable

SAY_EVERY = 2.0


class Command(BaseCommand):
    help = (
        "Delete settled messages and attempts that RETENTION no longer keeps, in small chunks beside running "
        "workers. Workers do so by themselves unless started with --no-purge. May be interrupted and run again. "
        "Exits 0."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", metavar="ALIAS", help="default: the router's choice")
        parser.add_argument("--dry-run", action="store_true", help="count, delete nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        said = time.monotonic()

        def progress(deleted: int) -> None:
            nonlocal said
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                self.stderr.write(f"{deleted} rows so far")

        try:
            retention = conf.get().retention
        except ConfigurationError as error:
            raise CommandError(str(error)) from None
        using = options["database"] or router.db_for_write(OutboxMessage)
        if options["dry_run"]:
            messages, attempts = purgeable(retention, using=using)
            self.stdout.write(f"{messages} messages and {attempts} attempts are old enough to be deleted")
            return
        self.stdout.write(f"{purge(retention, using=using, progress=progress)} rows deleted")
