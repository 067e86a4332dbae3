"""``manage.py outbox_rotate_keys``: bring every row under the current key."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...conf import Settings
from ...operations import rotate_keys
from ..base import OutboxCommand

NAMED = 20


class Command(OutboxCommand):
    help = (
        "Seal every message that still holds a body under the first of ENCRYPTION_KEYS. Deploy the new key "
        "first, in front of the old ones, to every web process and worker. May run beside them, be interrupted "
        "and be run again. Drop the old key only when none is left under it."
    )
    exits = {0: "no message is left under another key, or a dry run", 1: "some are left, as it says"}

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="open and count, write nothing")

    def run(self, settings: Settings, using: str, options: dict[str, Any]) -> int:
        keyring, dry_run = settings.keyring, options["dry_run"]
        progress = self.progress("messages resealed")
        rotation = rotate_keys(keyring, using=using, dry_run=dry_run, progress=progress)
        verb = "would be resealed" if dry_run else "resealed"
        self.stdout.write(f"{rotation.resealed} messages {verb} under {keyring.current_id!r}")
        if rotation.tampered:
            named = ", ".join(map(str, rotation.tampered[:NAMED]))
            more = ", ..." if len(rotation.tampered) > NAMED else ""
            self.stdout.write(
                f"{len(rotation.tampered)} messages were changed in the table and cannot be opened: "
                f"ids {named}{more}\n"
                "  A worker that meets one quarantines it as tampered. Settled ones need no key any more once "
                "outbox_expunge --id has erased their bodies, which nobody can read."
            )
        for key_id, count in rotation.unknown.items():
            self.stdout.write(f"{count} messages are under {key_id!r}, which is not configured")
        if not rotation.done and not dry_run:
            left = ", ".join(map(repr, rotation.left))
            raise CommandError(f"messages are left under {left}: keep these keys, mend and run again")
        return 0
