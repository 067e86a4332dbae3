"""An HTTP proxy as the settings name it."""

from __future__ import annotations

import base64
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from .exceptions import ConfigurationError


class Proxy(NamedTuple):
    """A proxy that opens tunnels (CONNECT, RFC 9110, section 9.3.6). ``repr`` shows no credentials.

    ``authorization`` is the value of ``Proxy-Authorization``, '' without credentials.
    """

    host: str
    port: int
    authorization: str = ""

    def __repr__(self) -> str:
        return f"<Proxy {self.host}:{self.port}>"

    @classmethod
    def parse(cls, url: object) -> Proxy:
        """Return the proxy at ``http://host:port``, with ``user:password@`` before the host if it wants them.

        Raises ``ConfigurationError``, which does not repeat the URL.
        """
        try:
            parts = urlsplit(url if isinstance(url, str) and url.isprintable() else "")
            bare = parts.path in ("", "/") and not parts.query and not parts.fragment
            if parts.scheme == "http" and parts.hostname and parts.port and bare:
                return cls(parts.hostname, parts.port, _basic(parts.username, parts.password))
        except ValueError:
            pass
        raise ConfigurationError(
            "option 'proxy': expected http://host:port or http://user:password@host:port"
        )


def _basic(user: str | None, password: str | None) -> str:
    """Return Basic credentials (RFC 7617)."""
    if user is None:
        return ""
    pair = f"{unquote(user)}:{unquote(password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
