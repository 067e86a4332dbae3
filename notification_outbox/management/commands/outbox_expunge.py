"""``manage.py outbox_expunge``: erase bodies, keep rows."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...conf import Settings
from ...operations import bodies, expunge
from ...reading import BadValue, duration
from ..base import COULD_NOT_RUN, OutboxCommand


class Command(OutboxCommand):
    help = (
        "Erase the bodies (payload, headers, full destination) of settled messages for good: those delivered, "
        "quarantined, expired or cancelled. What is given is combined; --id, --account or --older-than is needed. "
        "The rows stay until RETENTION ends, with type, host, account id and keys, so that a repeated key still "
        "finds its message. Messages that are not settled keep their bodies and are counted. May be interrupted "
        "and run again. Backups, and a PostgreSQL table until its next vacuum, hold what they held."
    )
    exits = {
        0: "done, or a dry run",
        1: "messages that are not settled yet keep their bodies: cancel them or wait, then run again",
    }

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--id", type=int, action="append", dest="ids", metavar="ID", help="this message; may be repeated"
        )
        parser.add_argument("--account", metavar="ID", help="messages of this account_id")
        parser.add_argument(
            "--older-than", type=_age, metavar="DURATION", help="settled so long ago: 90s, 15m, 4h or 3d"
        )
        parser.add_argument("--dry-run", action="store_true", help="count, erase nothing")
        parser.add_argument("--yes", action="store_true", help="do not ask")

    def run(self, settings: Settings, using: str, options: dict[str, Any]) -> int:
        which = {
            "ids": options["ids"],
            "account_id": options["account"],
            "older_than": options["older_than"],
            "using": using,
        }
        if all(which[name] is None for name in ("ids", "account_id", "older_than")):
            raise CommandError("say which: --id, --account or --older-than", returncode=COULD_NOT_RUN)
        found = bodies(**which)
        left = found.live
        if options["dry_run"]:
            self.stdout.write(f"{found.settled} bodies would be erased")
        else:
            if found.settled and not options["yes"]:
                self._confirm(found.settled, using)
            erased = expunge(**which, progress=self.progress("bodies erased"))
            self.stdout.write(f"{erased} bodies erased")
            if options["older_than"] is None:
                # one that settled behind our back is left as well
                left = sum(bodies(**which))
        if left:
            self.stdout.write(
                f"{left} of these messages are not settled yet and keep their body: "
                "cancel them or wait, then run again"
            )
        return 1 if left and not options["dry_run"] else 0

    def _confirm(self, count: int, using: str) -> None:
        if not sys.stdin.isatty():
            raise CommandError(
                f"nobody is there to confirm that {count} bodies are erased: pass --yes",
                returncode=COULD_NOT_RUN,
            )
        answer = input(
            f"This erases the bodies of {count} messages of database {using!r} for good: they can be neither sent "
            "again nor read.\nType 'yes' to go on: "
        )
        if answer != "yes":
            raise CommandError("nothing was erased", returncode=COULD_NOT_RUN)


def _age(text: str) -> timedelta:
    try:
        return timedelta(seconds=duration(0, 100 * 366 * 86400)(text))
    except BadValue:
        pass
    raise ArgumentTypeError("expected a duration such as 90s, 15m, 4h or 3d")
