"""Destination URLs: the normal form or the rule, what a project may open, and the verdict on a dial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from notification_outbox.addresses import Denial
from notification_outbox.exceptions import ConfigurationError, InvalidMessage
from notification_outbox.urls import HINTS, MAX_URL_BYTES, Destination, DestinationPolicy

CASES = json.loads((Path(__file__).parent / "cases" / "urls.json").read_text(encoding="utf-8"))["cases"]
MARK = "s3cr3t"


def rule_of(policy: DestinationPolicy, url: object) -> str:
    with pytest.raises(InvalidMessage) as caught:
        policy.parse(url)
    return caught.value.rule


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["url"])[:60])
def test_default_policy(case: dict[str, str]) -> None:
    """A URL is brought into its one normal form, or refused by the rule it breaks."""
    policy = DestinationPolicy()
    if "rule" in case:
        assert rule_of(policy, case["url"]) == case["rule"]
    else:
        assert policy.parse(case["url"]).url == case["stored"]


@pytest.mark.parametrize("stored", sorted({case["stored"] for case in CASES if "stored" in case}))
def test_normal_form_is_stable(stored: str) -> None:
    """A stored URL is its own normal form, so it is read back as it was written."""
    assert DestinationPolicy().parse(stored).url == stored


def test_parts() -> None:
    """A destination carries what dialling and signing need."""
    plain = DestinationPolicy().parse("https://Hooks.Acme.com/x?y")
    assert plain == Destination("https://hooks.acme.com/x?y", "https", "hooks.acme.com", 443)
    assert plain.authority == "hooks.acme.com"
    literal = DestinationPolicy().parse("https://[2606:4700::1]:8443/")
    assert (literal.host, literal.port) == ("2606:4700::1", 8443)
    assert literal.authority == "[2606:4700::1]:8443"


@pytest.mark.parametrize("value", [None, 7, b"https://hooks.acme.com/", ["https://hooks.acme.com/"]])
def test_only_text(value: object) -> None:
    """What is not a string is refused, not turned into one."""
    assert rule_of(DestinationPolicy(), value) == "not-text"


def test_lone_surrogate() -> None:
    """A string that UTF-8 cannot encode is refused as one."""
    assert rule_of(DestinationPolicy(), "https://hooks.acme.com/\ud800") == "not-unicode"


def test_length_counts_bytes_as_given_and_as_stored() -> None:
    """The limit holds for the URL as it came and again for its normal form."""
    base = "https://hooks.acme.com/"
    longest = base + "a" * (MAX_URL_BYTES - len(base))
    assert DestinationPolicy().parse(longest).url == longest
    assert rule_of(DestinationPolicy(), longest + "a") == "too-long"
    assert rule_of(DestinationPolicy(), base + "é" * 1000) == "too-long"


@pytest.mark.parametrize(
    "url",
    [
        f"https://hooks.acme.com:99/{MARK}",
        f"https://user:{MARK}@hooks.acme.com/",
        f"https://10.0.0.1/{MARK}?{MARK}",
        f"https://hooks.acme.com/{MARK} {MARK}",
        f"https://{MARK}/",
        f"https://{MARK}①.999/",
    ],
)
def test_errors_repeat_nothing(url: str) -> None:
    """An error names field and rule and carries no part of the URL, in its context neither."""
    with pytest.raises(InvalidMessage) as caught:
        DestinationPolicy().parse(url, "webhook_url")
    error = caught.value
    assert error.field == "webhook_url"
    assert error.hint == HINTS[error.rule]
    assert MARK not in f"{error!s} {error!r} {error.args}"
    assert error.__context__ is None
    assert error.__cause__ is None


def test_repr_shows_the_host_only() -> None:
    """A destination's path and query are secrets, so its repr has neither."""
    assert repr(DestinationPolicy().parse(f"https://hooks.acme.com/{MARK}?{MARK}")) == (
        "<Destination hooks.acme.com>"
    )


OPEN: dict[str, Any] = {
    "allow_hosts": [
        "localhost",
        "10.9.8.7",
        "[::1]:9443",
        "printer.lan:8080",
        "Bücher.test",
        "[::ffff:7f00:1]",
    ],
    "allow_networks": ["10.1.0.0/16", "fd00::/64"],
    "insecure_hosts": ["web", "127.0.0.1:8000"],
}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://localhost/", "https://localhost/"),
        ("https://LOCALHOST.:8443/", "https://localhost:8443/"),
        ("https://localhost:9443/", "single-label"),
        ("https://localhost.acme.com/", "https://localhost.acme.com/"),
        ("https://x.localhost/", "reserved-suffix"),
        ("https://10.9.8.7/", "https://10.9.8.7/"),
        ("https://10.9.8.6/", "denied-address"),
        ("https://[0::1]:9443/x", "https://[::1]:9443/x"),
        ("https://[::1]/", "denied-address"),
        ("https://127.0.0.1:8000/", "https://127.0.0.1:8000/"),
        ("https://127.0.0.1/", "denied-address"),
        ("https://127.0.0.1:8443/", "denied-address"),
        ("https://[::1]:9444/", "denied-address"),
        ("https://printer.lan:8080/", "https://printer.lan:8080/"),
        ("https://printer.lan:8443/", "reserved-suffix"),
        ("https://printer.lan/", "reserved-suffix"),
        ("https://printer2.lan:8080/", "reserved-suffix"),
        ("https://hooks.acme.com:8080/", "port"),
        ("https://xn--bcher-kva.test/", "https://xn--bcher-kva.test/"),
        ("https://[::ffff:127.0.0.1]/", "https://[::ffff:7f00:1]/"),
        ("https://10.1.2.3/", "https://10.1.2.3/"),
        ("https://10.1.2.3:22/", "port"),
        ("https://10.2.0.0/", "denied-address"),
        ("https://[fd00::7]/", "https://[fd00::7]/"),
        ("https://[::ffff:10.1.2.3]/", "denied-address"),
        ("http://web/", "http://web/"),
        ("http://web:8080/", "single-label"),
        ("http://web:443/", "port"),
        ("https://web/", "https://web/"),
        ("https://web:80/", "port"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/"),
        ("http://127.0.0.1/", "denied-address"),
        ("http://localhost/", "scheme"),
        ("http://hooks.acme.com/", "scheme"),
        ("https://2130706433:8000/", "numeric-host"),
        ("https://127.1:8000/", "numeric-host"),
        ("https://127.0.0.1.:8000/", "numeric-dot"),
        ("https://0177.0.0.1:8000/", "numeric-host"),
        ("https://①②⑦.0.0.1:8000/", "denied-address"),
        ("https://10。9。8。7/", "denied-address"),
    ],
)
def test_opened_exactly(url: str, expected: str) -> None:
    """An option opens what it names, in its usual spelling, and nothing beside it."""
    policy = DestinationPolicy.from_options(**OPEN)
    if "://" in expected:
        assert policy.parse(url).url == expected
    else:
        assert rule_of(policy, url) == expected


@pytest.mark.parametrize(
    ("host", "port", "address", "denial"),
    [
        ("hooks.acme.com", 443, "1.1.1.1", None),
        ("hooks.acme.com", 443, "127.0.0.1", Denial.LOOPBACK),
        ("hooks.acme.com", 443, "10.1.2.3", None),
        ("hooks.acme.com", 443, "10.9.8.7", Denial.PRIVATE),
        ("hooks.acme.com", 443, "::ffff:10.1.2.3", Denial.MAPPED),
        ("hooks.acme.com", 443, "fd00::1%1", Denial.ZONE),
        ("localhost", 443, "127.0.0.1", None),
        ("localhost", 443, "169.254.169.254", None),
        ("localhost", 443, "fe80::1%lo", Denial.ZONE),
        ("localhost", 443, "2130706433", Denial.MALFORMED),
        ("localhost", 22, "127.0.0.1", Denial.LOOPBACK),
        ("web", 80, "10.200.0.1", None),
        ("web", 8000, "10.200.0.1", Denial.PRIVATE),
        ("127.0.0.1", 8000, "127.0.0.1", None),
        ("127.0.0.1", 8001, "127.0.0.1", Denial.LOOPBACK),
    ],
)
def test_dial(host: str, port: int, address: str, denial: Denial | None) -> None:
    """A dial is judged by its address, and by what was opened for its host and port."""
    assert DestinationPolicy.from_options(**OPEN).judge(host, port, address) is denial


@pytest.mark.parametrize(
    ("address", "allowed", "denial"),
    [
        ("64:ff9b::808:808", False, Denial.NAT64),
        ("64:ff9b::808:808", True, None),
        ("64:ff9b::a01:203", True, None),
        ("64:ff9b::7f00:1", True, Denial.LOOPBACK),
        ("64:ff9b::a9fe:a9fe", True, Denial.METADATA),
        ("64:ff9b:1::808:808", True, Denial.NAT64),
        ("::ffff:8.8.8.8", True, Denial.MAPPED),
    ],
)
def test_nat64(address: str, allowed: bool, denial: Denial | None) -> None:
    """Where it is allowed the IPv4 address inside is judged as if it were dialled; other prefixes stay shut."""
    policy = DestinationPolicy.from_options(**OPEN, allow_nat64=allowed)
    assert policy.judge("hooks.acme.com", 443, address) is denial


def test_own_ports() -> None:
    """``ports`` replaces the two that are open to every host."""
    policy = DestinationPolicy.from_options(ports=[4443])
    assert policy.parse("https://hooks.acme.com:4443/").port == 4443
    assert rule_of(policy, "https://hooks.acme.com/") == "port"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"allow_hosts": ["ok.com", f"https://{MARK}.com"]}, "allow_hosts: entry 2"),
        ({"allow_hosts": [f"*.{MARK}.com"]}, "[syntax]"),
        ({"allow_hosts": [f"{MARK}.com/path"]}, "[syntax]"),
        ({"allow_hosts": [f"{MARK}@host"]}, "[userinfo]"),
        ({"allow_hosts": ["127.1"]}, "[numeric-host]"),
        ({"allow_hosts": ["2130706433"]}, "[numeric-host]"),
        ({"allow_hosts": ["①.1.1.1"]}, "[numeric-host]"),
        ({"allow_hosts": ["127.0.0.1."]}, "[numeric-dot]"),
        ({"allow_hosts": ["host:"]}, "[port]"),
        ({"allow_hosts": ["host:0"]}, "[port]"),
        ({"allow_hosts": ["host:70000"]}, "[parse]"),
        ({"allow_hosts": ["::1"]}, "allow_hosts: entry 1"),
        ({"allow_hosts": ["[::1%lo]"]}, "[percent-zone]"),
        ({"allow_hosts": [""]}, "[no-host]"),
        ({"allow_hosts": [None]}, "[not-text]"),
        (
            {"allow_hosts": MARK},
            'allow_hosts: expected a list such as ["printer.lan", "10.9.8.7:8443"] [list]',
        ),
        ({"allow_hosts": 5}, "allow_hosts: expected a list such as"),
        ({"allow_hosts": None}, "allow_hosts: expected a list such as"),
        ({"allow_hosts": {"printer.lan": 8443}}, "allow_hosts: expected a list such as"),
        ({"insecure_hosts": 5}, 'insecure_hosts: expected a list such as ["127.0.0.1:9000"] [list]'),
        ({"insecure_hosts": "127.0.0.1:9000"}, "insecure_hosts: expected a list such as"),
        ({"insecure_hosts": ["a b"]}, "insecure_hosts: entry 1"),
        ({"allow_networks": ["10.0.0.1/8"]}, "allow_networks: entry 1"),
        ({"allow_networks": [167772160]}, "allow_networks: entry 1"),
        ({"allow_networks": "10.0.0.0/8"}, 'allow_networks: expected a list such as ["10.2.0.0/16"] [list]'),
        ({"allow_networks": 5}, "allow_networks: expected a list such as"),
        ({"ports": 443}, "ports: expected a list such as [443, 8443] [list]"),
        ({"ports": b"443"}, "ports: expected a list such as"),
        ({"ports": [0]}, "ports: entry 1"),
        ({"ports": [443, True]}, "ports: entry 2"),
        ({"ports": ["443"]}, "ports: entry 1"),
    ],
)
def test_malformed_options(options: dict[str, Any], text: str) -> None:
    """A malformed entry is refused with its option, place and rule, and is not repeated."""
    with pytest.raises(ConfigurationError) as caught:
        DestinationPolicy.from_options(**options)
    assert text in str(caught.value)
    assert MARK not in str(caught.value)
    assert caught.value.__context__ is None
