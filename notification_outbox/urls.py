"""Where a message may go: the rules for a destination URL, its one normal form, and the verdict on each dial.

``DestinationPolicy.parse()`` is asked at enqueue, ``judge()`` whenever a socket is about to be opened, and
``judge()`` is right: a name that passed may lead anywhere by then. The normal form is what is stored, signed
and sent, so nothing after this room rewrites it. This room resolves nothing and reads no settings, and no
error repeats a URL: path and query are secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self, TypeVar

from .addresses import Denial, judge
from .exceptions import ConfigurationError, InvalidMessage
from .hosts import UNSAFE, RuleError, check_public, host_entry, normal_host, port_number, split_authority

MAX_URL_BYTES = 2048
NAT64 = IPv6Network("64:ff9b::/96")
DEFAULT_PORTS = {"https": 443, "http": 80}

HINTS = {
    "not-text": "the URL must be a string",
    "not-unicode": "the URL must be text that UTF-8 can encode",
    "too-long": f"the URL may have at most {MAX_URL_BYTES} bytes",
    "control-space-backslash": "the URL may hold no control character, white space or backslash",
    "fragment": "the URL may have no fragment",
    "parse": "this is no URL of the form https://host:port/path?query",
    "scheme": "the URL must begin with https://",
    "no-host": "the URL must name a host after //",
    "userinfo": "the URL may hold no user name or password",
    "percent-zone": "the host may hold no percent sign, so no escape and no zone id",
    "port": "this port is not open to destinations",
    "numeric-host": "an address must be written in its usual form, as in 192.0.2.1",
    "numeric-dot": "an address may have no dot at its end",
    "denied-address": "this address is not open to destinations",
    "single-label": "the host must be a full domain name",
    "reserved-suffix": "this name is reserved for private or special use",
    "syntax": "the host is no valid domain name",
}

EXAMPLES = {
    "allow_hosts": '["printer.lan", "10.9.8.7:8443"]',
    "allow_networks": '["10.2.0.0/16"]',
    "insecure_hosts": '["127.0.0.1:9000"]',
    "ports": "[443, 8443]",
}

_Address = IPv4Address | IPv6Address
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Destination:
    """A URL in normal form, and what dialling needs of it.

    ``host`` is lower case ASCII, an IPv6 address without its brackets. The URL is a secret: ``repr`` shows
    only the host.
    """

    url: str
    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """Host and, unless it is the scheme's default, port, as the Host header has it (RFC 9110, 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __repr__(self) -> str:
        return f"<Destination {self.host}>"


@dataclass(frozen=True, slots=True)
class DestinationPolicy:
    """What destinations may be: https to public addresses on ``ports``, and exactly what is opened besides.

    ``secure`` maps each opened host to the ports it is opened on, ``insecure`` each host that http may reach
    to its http ports; such a host is in ``secure`` as well. On any other port an opened host is a host like
    every other. Hosts are in normal form.
    """

    ports: frozenset[int] = frozenset({443, 8443})
    secure: Mapping[str, frozenset[int]] = field(default_factory=dict)
    insecure: Mapping[str, frozenset[int]] = field(default_factory=dict)
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    nat64: bool = False

    @classmethod
    def from_options(
        cls,
        *,
        ports: Iterable[int] = (443, 8443),
        allow_hosts: Iterable[str] = (),
        allow_networks: Iterable[str] = (),
        insecure_hosts: Iterable[str] = (),
        allow_nat64: bool = False,
    ) -> Self:
        """Return the policy of a project's options; ConfigurationError names option and place, no entry.

        ``allow_hosts``     ``"host"`` or ``"host:port"`` (IPv6: ``"[::1]:9443"``): this very host may be a
                            single label, have a reserved suffix, be or resolve to any address, on this
                            port only, or without one on ``ports``.
        ``allow_networks``  ``"10.2.0.0/16"``: these addresses are open to every destination.
        ``insecure_hosts``  like ``allow_hosts``, and reached by http too, on the entry's port or else on 80.
        ``allow_nat64``     64:ff9b::/96 (RFC 6052) is as open as the IPv4 address inside, for machines that have no
                            IPv4 of their own.
        """
        insecure = [
            _host_entry("insecure_hosts", *entry) for entry in _entries("insecure_hosts", insecure_hosts)
        ]
        secure = [_host_entry("allow_hosts", *entry) for entry in _entries("allow_hosts", allow_hosts)]
        open_ports = frozenset(_port(*entry) for entry in _entries("ports", ports))
        return cls(
            ports=open_ports,
            secure=_by_host(
                (host, named)
                for host, port in secure + insecure
                for named in ([port] if port else open_ports)
            ),
            insecure=_by_host((host, port or DEFAULT_PORTS["http"]) for host, port in insecure),
            networks=tuple(_network(*entry) for entry in _entries("allow_networks", allow_networks)),
            nat64=allow_nat64,
        )

    def parse(self, url: object, field: str = "to") -> Destination:
        """Return ``url`` in normal form; InvalidMessage names ``field`` and a rule of ``HINTS``.

        Scheme and host in lower case, the host by UTS 46 (non-transitional), default port and empty query
        dropped, an empty path written ``/``, what is not ASCII in path and query escaped as UTF-8
        (RFC 3987, section 3.1). All else stays byte for byte.
        """
        try:
            return self._parse(url)
        except RuleError as broken:
            rule = broken.rule
        raise InvalidMessage(field, rule, HINTS[rule], data=rule != "not-text")

    def admits(self, scheme: str, host: str, port: int) -> bool:
        """Say whether ``host`` (in normal form) may be spoken to by ``scheme`` on ``port``."""
        if scheme == "https":
            return port in self.ports or port in self.secure.get(host, ())
        return scheme == "http" and port in self.insecure.get(host, ())

    def opens(self, host: str, port: int) -> bool:
        """Say whether ``host`` (in normal form) was opened on ``port`` by its name."""
        return port in self.secure.get(host, ()) or port in self.insecure.get(host, ())

    def judge(self, host: str, port: int, address: str | _Address) -> Denial | None:
        """Return why ``host`` (in normal form) must not be dialled at ``address``, or None when it may be."""
        denial = judge(address)
        if denial in (None, Denial.ZONE, Denial.MALFORMED):
            return denial
        if self.opens(host, port):
            return None
        address = ip_address(address)
        if self.nat64 and address in NAT64:
            return self.judge(host, port, IPv4Address(int(address) & 0xFFFFFFFF))
        # the networks of the other IP version never hold it
        return None if any(address in network for network in self.networks) else denial

    def _parse(self, url: object) -> Destination:
        scheme, authority, path, query = _split(url)
        spelled, port_text = split_authority(authority)
        host, address = normal_host(spelled)
        if scheme == "http" and host not in self.insecure:
            raise RuleError("scheme")
        port = port_number(port_text, DEFAULT_PORTS[scheme])
        if address is not None:
            if not spelled.isascii() or self.judge(host, port, address) is not None:
                raise RuleError("denied-address")
        elif not self.opens(host, port):
            check_public(host)
        if not self.admits(scheme, host, port):
            raise RuleError("port")
        target = _escaped(path) or "/"
        if query:
            target += f"?{_escaped(query)}"
        authority = Destination("", scheme, host, port).authority
        stored = f"{scheme}://{authority}{target}"
        if len(stored) > MAX_URL_BYTES:
            raise RuleError("too-long")
        return Destination(stored, scheme, host, port)


def _split(url: object) -> tuple[str, str, str, str]:
    """Return scheme, authority, path and query of ``url`` (RFC 3986, section 3), or refuse it as text."""
    if not isinstance(url, str):
        raise RuleError("not-text")
    try:
        size = len(url.encode())
    except UnicodeEncodeError:
        raise RuleError("not-unicode") from None
    if size > MAX_URL_BYTES:
        raise RuleError("too-long")
    if UNSAFE.search(url):
        raise RuleError("control-space-backslash")
    if "#" in url:
        raise RuleError("fragment")
    hierarchy, _, query = url.partition("?")
    scheme, _, rest = hierarchy.partition(":")
    if scheme.lower() not in DEFAULT_PORTS:
        raise RuleError("scheme")
    if not rest.startswith("//"):
        raise RuleError("no-host")
    authority, slash, path = rest[2:].partition("/")
    return scheme.lower(), authority, slash + path, query


def _escaped(text: str) -> str:
    """Escape what is not ASCII as UTF-8; what is ASCII, escapes included, stays as it is."""
    if text.isascii():
        return text
    return "".join(chr(byte) if byte < 0x80 else f"%{byte:02X}" for byte in text.encode())


def _entries(option: str, entries: Iterable[_T]) -> list[tuple[int, _T]]:
    """Return the entries with their places from 1."""
    # a lone string would be read letter by letter, bytes as ports, a dict without its values
    if isinstance(entries, (str, bytes, Mapping)) or not isinstance(entries, Iterable):
        raise ConfigurationError(f"{option}: expected a list such as {EXAMPLES[option]} [list]")
    return list(enumerate(entries, start=1))


def _by_host(entries: Iterable[tuple[str, int | None]]) -> dict[str, frozenset[int]]:
    ports: dict[str, frozenset[int]] = {}
    for host, port in entries:
        ports[host] = ports.get(host, frozenset()) | (frozenset() if port is None else {port})
    return ports


def _host_entry(option: str, place: int, entry: str) -> tuple[str, int | None]:
    try:
        return host_entry(entry)
    except RuleError as broken:
        rule = broken.rule
    raise ConfigurationError(f'{option}: entry {place} must be "host" or "host:port" [{rule}]')


def _network(place: int, entry: str) -> IPv4Network | IPv6Network:
    try:
        if isinstance(entry, str):
            return ip_network(entry)
    except ValueError:
        pass
    raise ConfigurationError(
        f'allow_networks: entry {place} must be a network like "10.2.0.0/16", with no host bits set [network]'
    )


def _port(place: int, entry: int) -> int:
    if isinstance(entry, int) and not isinstance(entry, bool) and 0 < entry < 65536:
        return entry
    raise ConfigurationError(f"ports: entry {place} must be a number from 1 to 65535 [port]")
