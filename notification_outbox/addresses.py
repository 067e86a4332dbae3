"""Which IP addresses a stranger may make us dial: one verdict per address, each refusal with a name.

The tables are our own, after the IANA special-purpose registries (RFC 6890), so that the verdict is the same
on every Python: ``is_global`` changed its mind more than once. IPv4 lists what is refused; IPv6 lists the one
block that is handed out (2000::/3) and what is refused inside it, so a new special block is refused unheard.
This room knows addresses only: what a project opens on purpose is in ``urls.DestinationPolicy``.
"""

from __future__ import annotations

from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address


class Denial(StrEnum):
    """Why an address is refused."""

    MALFORMED = "malformed"
    ZONE = "zone"
    UNSPECIFIED = "unspecified"
    LOOPBACK = "loopback"
    PRIVATE = "private"
    LINK_LOCAL = "link_local"
    METADATA = "metadata"
    CGNAT = "cgnat"
    PROTOCOL = "protocol"
    DOCUMENTATION = "documentation"
    BENCHMARKING = "benchmarking"
    ANYCAST = "anycast"
    MULTICAST = "multicast"
    MAPPED = "mapped"
    NAT64 = "nat64"
    TUNNEL = "tunnel"
    RESERVED = "reserved"


# the first row that holds an address names the refusal, so the narrow rows stand above the wide ones
IPV4_DENIED: tuple[tuple[IPv4Network, Denial], ...] = tuple(
    (IPv4Network(network), denial)
    for network, denial in (
        ("0.0.0.0/8", Denial.UNSPECIFIED),
        ("10.0.0.0/8", Denial.PRIVATE),
        ("100.100.100.200/32", Denial.METADATA),  # Alibaba Cloud
        ("100.64.0.0/10", Denial.CGNAT),
        ("127.0.0.0/8", Denial.LOOPBACK),
        ("168.63.129.16/32", Denial.METADATA),  # Azure's wire server, reachable from every guest
        ("169.254.169.254/32", Denial.METADATA),
        ("169.254.0.0/16", Denial.LINK_LOCAL),
        ("172.16.0.0/12", Denial.PRIVATE),
        ("192.0.0.192/32", Denial.METADATA),  # Oracle Cloud
        ("192.0.0.0/24", Denial.PROTOCOL),
        ("192.0.2.0/24", Denial.DOCUMENTATION),
        ("192.31.196.0/24", Denial.ANYCAST),
        ("192.52.193.0/24", Denial.ANYCAST),
        ("192.88.99.0/24", Denial.TUNNEL),
        ("192.168.0.0/16", Denial.PRIVATE),
        ("192.175.48.0/24", Denial.ANYCAST),
        ("198.18.0.0/15", Denial.BENCHMARKING),
        ("198.51.100.0/24", Denial.DOCUMENTATION),
        ("203.0.113.0/24", Denial.DOCUMENTATION),
        ("224.0.0.0/4", Denial.MULTICAST),
        ("240.0.0.0/4", Denial.RESERVED),
    )
)

IPV6_HANDED_OUT = IPv6Network("2000::/3")

IPV6_DENIED: tuple[tuple[IPv6Network, Denial], ...] = tuple(
    (IPv6Network(network), denial)
    for network, denial in (
        ("2001::/32", Denial.TUNNEL),  # Teredo, RFC 4380
        ("2001::/23", Denial.PROTOCOL),
        ("2001:db8::/32", Denial.DOCUMENTATION),
        ("2002::/16", Denial.TUNNEL),  # 6to4, RFC 3056
        ("2620:4f:8000::/48", Denial.ANYCAST),
        ("3fff::/20", Denial.DOCUMENTATION),  # RFC 9637
    )
)

# outside 2000::/3 everything is refused; these rows only give the refusal a better name
IPV6_NAMED: tuple[tuple[IPv6Network, Denial], ...] = tuple(
    (IPv6Network(network), denial)
    for network, denial in (
        ("::/128", Denial.UNSPECIFIED),
        ("::1/128", Denial.LOOPBACK),
        ("::ffff:0:0/96", Denial.MAPPED),
        ("64:ff9b::/96", Denial.NAT64),  # RFC 6052
        ("64:ff9b:1::/48", Denial.NAT64),  # RFC 8215
        ("fd00:ec2::254/128", Denial.METADATA),  # AWS
        ("fc00::/7", Denial.PRIVATE),
        ("fe80::/10", Denial.LINK_LOCAL),
        ("fec0::/10", Denial.PRIVATE),
        ("ff00::/8", Denial.MULTICAST),
    )
)


def judge(address: str | IPv4Address | IPv6Address) -> Denial | None:
    """Return why ``address`` is refused, or None when anyone may send us there.

    Text that is no canonical address is refused too, never looked up. An address with a zone id (RFC 4007,
    section 11) is refused whatever it is: it names an interface of this machine.
    """
    if isinstance(address, str):
        try:
            address = ip_address(address)
        except ValueError:
            return Denial.MALFORMED
    if isinstance(address, IPv4Address):
        return next((denial for network, denial in IPV4_DENIED if address in network), None)
    if address.scope_id is not None:
        return Denial.ZONE
    if address in IPV6_HANDED_OUT:
        return next((denial for network, denial in IPV6_DENIED if address in network), None)
    return next((denial for network, denial in IPV6_NAMED if address in network), Denial.RESERVED)
