"""The TLS settings of a client: the same for the check that reads them and the worker that dials.

Knows no HTTP library, so that ``manage.py check`` and web processes can ask it.
"""

from __future__ import annotations

import ssl

from .exceptions import ConfigurationError


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """Return the TLS settings. ``create_default_context()`` would write keys to SSLKEYLOGFILE."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if ca_file is None:
        context.load_default_certs()
        return context
    try:
        context.load_verify_locations(ca_file)
        return context
    except (OSError, TypeError, ValueError):
        pass
    raise ConfigurationError("option 'ca_file': expected the path of a readable PEM file of certificates")
