"""``manage.py outbox_purge``: do what ``RETENTION`` asks, now."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...conf import Settings
from ...operations import purge, purgeable
from ..base import OutboxCommand


class Command(OutboxCommand):
    help = (
        "Delete settled messages and attempts that RETENTION no longer keeps, and erase the bodies of delivered "
        "messages older than its expunge_delivered, in small chunks beside running workers. Workers do so by "
        "themselves unless started with --no-purge. May be interrupted and run again."
    )
    exits = {0: "done"}

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="count, change nothing")

    def run(self, settings: Settings, using: str, options: dict[str, Any]) -> int:
        if options["dry_run"]:
            verb, found = "would be ", purgeable(settings.retention, using=using)
        else:
            verb, found = (
                "",
                purge(settings.retention, using=using, progress=self.progress("rows and bodies")),
            )
        self.stdout.write(
            f"{found.messages} messages and {found.attempts} attempts {verb}deleted, "
            f"{found.bodies} bodies {verb}erased"
        )
        return 0
