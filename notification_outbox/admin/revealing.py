"""Opening a body for somebody who may read it, or saying why it cannot be opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from ..envelope import Binding, Headers, Keyring, open_sealed
from ..exceptions import Tampered, UnknownKey
from ..models import OutboxMessage

# characters of a body that are shown
SHOWN = 64 * 1024


@dataclass(frozen=True, repr=False)
class Revealed:
    """What was sealed, or the ``problem`` that keeps it closed. A body that is no text is shown in hexadecimal."""

    problem: str = ""
    destination: str = ""
    content_type: str = ""
    headers: Headers = ()
    body: str = ""
    size: int = 0
    cut: bool = False


def reveal(message: OutboxMessage, keyring: Keyring) -> Revealed:
    """Open a message's row as it is now; a rotation may have written it anew since the page was made."""
    row = OutboxMessage.objects.using(message._state.db).filter(pk=message.pk).first()
    if row is None or row.sealed is None:
        return Revealed(_("The body was erased; nothing of it is left."))
    try:
        content = open_sealed(bytes(row.sealed), Binding.of(row), keyring)
    except UnknownKey as error:
        return Revealed(
            _("This web process lacks the key the body is encrypted with (%(key)s).") % {"key": error.key_id}
        )
    except Tampered:
        return Revealed(_("The row was changed after it was stored. Nobody can open it."))
    try:
        body: Any = content.body.decode()
    except UnicodeDecodeError:
        body = content.body.hex(" ")
    return Revealed(
        destination=content.destination,
        content_type=content.content_type,
        headers=content.headers,
        body=body[:SHOWN],
        size=len(content.body),
        cut=len(body) > SHOWN,
    )
