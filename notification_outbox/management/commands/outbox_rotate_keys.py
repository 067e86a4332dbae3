"""``manage.py outbox_rotate_keys``: bring every row under the current key."""

from __future__ import annotations

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import router

from ... import conf
from ...exceptions import ConfigurationError
from ...models import OutboxMessage
from ...operations import rotate_keys

SAY_EVERY = 2.0


class Command(BaseCommand):
    help = (
        "Seal every message that still holds a body under the first of ENCRYPTION_KEYS. Deploy the new key "
        "first, in front of the old ones, to every web process and worker. May run beside them, be interrupted "
        "and be run again. Exits 0 when no message is left under another key: only then drop the old one; "
        "otherwise 1, saying what is left."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", metavar="ALIAS", help="default: the router's choice")
        parser.add_argument("--dry-run", action="store_true", help="open and count, write nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        said = time.monotonic()

        def progress(resealed: int) -> None:
            nonlocal said
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                self.stderr.write(f"{resealed} messages resealed so far")

        try:
            keyring = conf.get().keyring
        except ConfigurationError as error:
            raise CommandError(str(error)) from None
        using = options["database"] or router.db_for_write(OutboxMessage)
        dry_run = options["dry_run"]
        rotation = rotate_keys(keyring, using=using, dry_run=dry_run, progress=progress)
        verb = "would be resealed" if dry_run else "resealed"
        self.stdout.write(f"{rotation.resealed} messages {verb} under {keyring.current_id!r}")
        if rotation.tampered:
            self.stdout.write(f"{rotation.tampered} messages were changed in the table and cannot be opened")
        for key_id, count in rotation.unknown.items():
            self.stdout.write(f"{count} messages are under {key_id!r}, which is not configured")
        if not rotation.done and not dry_run:
            left = ", ".join(map(repr, rotation.left))
            raise CommandError(f"messages are left under {left}: keep these keys, mend and run again")
