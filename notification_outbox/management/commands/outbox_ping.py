"""``manage.py outbox_ping URL``: does the receiver take what we send?"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...exceptions import ConfigurationError, InvalidMessage
from ...explain import error_words
from ...operations import ping
from ..base import COULD_NOT_RUN, ToldCommand


class Command(ToldCommand):
    help = (
        "Send one signed test message of type outbox.ping through the real path and say how long each phase took, "
        "who answered, until when its certificate is good, and what the answer means. Stores nothing."
    )
    exits = {0: "the receiver accepted it", 1: "it did not, or must not be reached"}

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("destination", metavar="URL", help="where to; a topic, for other publishers")
        parser.add_argument(
            "--publisher", default="default", metavar="ALIAS", help="the alias of PUBLISHERS that sends it"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            pong = ping(options["destination"], publisher=options["publisher"])
        except InvalidMessage as error:
            raise CommandError(f"not sent: {error.hint} [{error.rule}]") from None
        except (ConfigurationError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=COULD_NOT_RUN) from None
        self.stdout.write(pong.display)
        for phase, seconds in pong.phases:
            self.stdout.write(f"  {phase:<8}{seconds * 1000:8.1f} ms")
        if pong.peer:
            self.stdout.write(f"  peer    {pong.peer}")
        if pong.certificate_ends:
            self.stdout.write(f"  its certificate ends {pong.certificate_ends:%Y-%m-%d %H:%M} UTC")
        if pong.code:
            raise CommandError(f"not accepted ({pong.code}): {error_words(pong.code)}")
        self.stdout.write(f"accepted (HTTP {pong.status})" if pong.status else "accepted")
