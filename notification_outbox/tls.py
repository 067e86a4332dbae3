"""The TLS settings of a client: the same for the check that reads them and the worker that dials.

Knows no HTTP library, so that ``manage.py check`` and web processes can ask it.
"""

from __future__ import annotations

import ssl

from .exceptions import ConfigurationError


def client_context(ca_file: str | None, client_cert: str | None = None) -> ssl.SSLContext:
    """Return the TLS settings. Raises ``ConfigurationError`` for a file that cannot be used.

    ``ca_file``: the authorities to trust instead of the system's. ``client_cert``: a PEM file with our own
    certificate, its chain and its unencrypted key. (``create_default_context()`` would write keys to SSLKEYLOGFILE.)
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    wanted = "ca_file", "certificates"
    try:
        if ca_file is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(ca_file)
        wanted = "client_cert", "a certificate, its chain and its unencrypted key"
        if client_cert is not None:
            # without a password OpenSSL would ask for one on the terminal
            context.load_cert_chain(client_cert, password="")
        return context
    except (OSError, TypeError, ValueError):
        pass
    raise ConfigurationError(f"option {wanted[0]!r}: expected the path of a readable PEM file of {wanted[1]}")
