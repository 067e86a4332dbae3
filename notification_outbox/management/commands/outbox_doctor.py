"""``manage.py outbox_doctor``: what is wrong, and its mend."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from django.core.management.base import CommandParser

from ...conf import Settings
from ...doctor import examine
from ..base import OutboxCommand


class Command(OutboxCommand):
    help = (
        "Look for what is wrong with the outbox of a database: messages under keys that nobody holds, lanes that "
        "no publisher serves. Reads only."
    )
    exits = {0: "all is well", 1: "something was found"}

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")

    def run(self, settings: Settings, using: str, options: dict[str, Any]) -> int:
        findings = examine(settings, using=using)
        if options["json"]:
            self.stdout.write(json.dumps([dataclasses.asdict(finding) for finding in findings]))
        else:
            for finding in findings:
                self.stdout.write(f"{finding.code}: {finding.problem}\n  {finding.mend}")
            if not findings:
                self.stdout.write("all is well")
        return 1 if findings else 0
