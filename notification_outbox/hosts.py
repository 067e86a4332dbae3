"""Host names and ports as strangers spell them, and the one spelling we keep.

Programs disagree on what an odd spelling means (``0x7f.1``, wide dots, a dot at the end, a zone id), and a
disagreement is how a name passes one and leads another astray. So one spelling is taken for each host and the
rest is refused with the name of the rule. Where a host leads is not asked here: that is ``addresses`` and
``urls``.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

import idna

# names that lead to machines of the house, or nowhere: RFC 6761, 6762, 7686, 8375, 9476 and common habit
RESERVED_SUFFIXES = frozenset(
    {
        "alt",
        "arpa",
        "corp",
        "example",
        "home.arpa",
        "internal",
        "intranet",
        "invalid",
        "lan",
        "local",
        "localhost",
        "onion",
        "test",
    }
)

UNSAFE = re.compile(r"[\x00-\x20\x7f-\xa0\\\s]")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class RuleError(Exception):
    """A rule for hosts or URLs is broken; the doors that were asked turn it into their own error."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule


def split_authority(authority: str) -> tuple[str, str | None]:
    """Return host and port of an authority as spelled; brackets stay, no colon gives None for the port."""
    if "@" in authority:
        raise RuleError("userinfo")
    if "%" in authority:
        raise RuleError("percent-zone")
    if authority.startswith("["):
        host, bracket, rest = authority.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise RuleError("parse")
        return host + bracket, rest[1:] if rest else None
    host, colon, port = authority.partition(":")
    return host, port if colon else None


def host_entry(entry: object) -> tuple[str, int | None]:
    """Return the normal form of a setting's ``"host"`` or ``"host:port"``, and the port."""
    if not isinstance(entry, str):
        raise RuleError("not-text")
    if UNSAFE.search(entry) or any(sign in entry for sign in "/?#"):
        raise RuleError("syntax")
    spelled, port = split_authority(entry)
    host, address = normal_host(spelled)
    if address is not None and not spelled.isascii():
        raise RuleError("numeric-host")
    number = port_number(port, 0)
    if port is not None and number == 0:
        raise RuleError("port")
    return host, number or None


def host_name(entry: object) -> str:
    """Return the normal form of a setting's host without port, an IPv6 address with or without brackets."""
    if isinstance(entry, str) and entry.count(":") > 1 and not entry.startswith("["):
        entry = f"[{entry}]"
    host, port = host_entry(entry)
    if port is not None:
        raise RuleError("port")
    return host


def normal_host(spelled: str) -> tuple[str, IPv4Address | IPv6Address | None]:
    """Return the host in normal form and, when it is an address, the address."""
    if spelled.startswith("["):
        try:
            address = IPv6Address(spelled[1:-1])
        except ValueError:
            raise RuleError("parse") from None
        return _spell(address), address
    if not spelled:
        raise RuleError("no-host")
    host = _ascii_host(spelled)
    name = host.removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        # what ends in a number is an address to some resolver (WHATWG URL, "ends in a number"): one spelling
        # is taken, every other could mean another address to the next program
        try:
            address4 = IPv4Address(name)
        except ValueError:
            raise RuleError("numeric-host") from None
        if name != host:
            raise RuleError("numeric-dot")
        return name, address4
    for label in labels:
        _check_label(label)
    if len(name) > 253:
        raise RuleError("syntax")
    return name, None


def _ascii_host(spelled: str) -> str:
    """Return the host in lower case ASCII, other labels as A-labels (UTS 46, RFC 5891)."""
    if spelled.isascii():
        return spelled.lower()
    try:
        mapped = idna.uts46_remap(spelled, std3_rules=False, transitional=False)
        return ".".join(
            label if label.isascii() else idna.alabel(label).decode("ascii") for label in mapped.split(".")
        )
    except (idna.IDNAError, UnicodeError):
        raise RuleError("syntax") from None


def _check_label(label: str) -> None:
    """Refuse what is not letters, digits, hyphens and underscores, and an A-label that does not decode."""
    if not _LABEL.fullmatch(label):
        raise RuleError("syntax")
    if label.startswith("xn--"):
        try:
            idna.ulabel(label)
        except (idna.IDNAError, UnicodeError):
            raise RuleError("syntax") from None


def check_public(host: str) -> None:
    """Refuse names that only mean something inside a house."""
    labels = host.split(".")
    if len(labels) == 1:
        raise RuleError("single-label")
    if any(".".join(labels[start:]) in RESERVED_SUFFIXES for start in range(len(labels))):
        raise RuleError("reserved-suffix")


def port_number(text: str | None, default: int) -> int:
    """Return the port as a number; an empty one is refused, since programs differ on what it means."""
    if text is None:
        return default
    if not text:
        raise RuleError("port")
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535):
        raise RuleError("parse")
    return int(text)


def _spell(address: IPv6Address) -> str:
    """Write an IPv6 address (RFC 5952). Mapped ones are in hex: Pythons differ, and the form is stored."""
    if address.ipv4_mapped is None:
        return str(address)
    low = int(address) & 0xFFFFFFFF
    return f"::ffff:{low >> 16:x}:{low & 0xFFFF:x}"
