"""``manage.py outbox_doctor``: what is wrong, and its mend."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import router

from ... import conf
from ...doctor import examine
from ...exceptions import ConfigurationError
from ...models import OutboxMessage


class Command(BaseCommand):
    help = (
        "Look for what is wrong with the outbox of a database: messages under keys that nobody holds, lanes that "
        "no publisher serves. Reads only. Exits 0 when all is well and 1 when something was found."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", metavar="ALIAS", help="default: the router's choice")
        parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            settings = conf.get()
        except ConfigurationError as error:
            raise CommandError(str(error)) from None
        findings = examine(settings, using=options["database"] or router.db_for_write(OutboxMessage))
        if options["json"]:
            self.stdout.write(json.dumps([dataclasses.asdict(finding) for finding in findings]))
        else:
            for finding in findings:
                self.stdout.write(f"{finding.code}: {finding.problem}\n  {finding.mend}")
            if not findings:
                self.stdout.write("all is well")
        if findings:
            sys.exit(1)
