"""Webhooks through a proxy: a tunnel to the receiver, TLS inside it, and whose fault it is when there is none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from notification_outbox.exceptions import (
    ConfigurationError,
    InvalidMessage,
    PublishFailed,
    TransientPublishError,
)
from notification_outbox.explain import error_words
from notification_outbox.lifecycle import Answer, Fault
from notification_outbox.proxies import Proxy
from notification_outbox.publishers import WebhookPublisher
from notification_outbox.transport import GuardedTransport
from tests.settings import SIGNER

from .peer import Peer, Script, Talk, by_hand, listening, looking_up, posting, saying

HEADERS = [("Content-Type", "application/json")]
NAME = "hooks.acme.com"
MARK = "s3cr3t"


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


def relaying(port: int, heads: list[bytes]) -> Script:
    """Return a proxy that connects whoever asks to ``port`` of this machine, and keeps what it was asked."""

    async def script(talk: Talk) -> None:
        heads.append(await talk.reader.readuntil(b"\r\n\r\n"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await talk.send(b"HTTP/1.1 200 Connection established\r\nX-Proxy: 1\r\n\r\n")
            await asyncio.gather(pump(talk.reader, writer), pump(reader, talk.writer))
        finally:
            writer.transport.abort()

    return script


@asynccontextmanager
async def through(script: Script, **options: Any) -> AsyncIterator[tuple[Peer, GuardedTransport]]:
    """Open a transport that goes through a proxy with this script; names but the proxy's lead nowhere."""
    async with listening(script, tls=False) as proxy:
        spec = Proxy.parse(f"http://user:{MARK}%40x@proxy.lan:{proxy.port}")
        resolver = looking_up({"proxy.lan": ["127.0.0.1"]})
        async with posting(proxy=spec, resolver=resolver, **options) as transport:
            yield proxy, transport


@pytest.mark.parametrize("tls", [True, False])
async def test_a_message_goes_through_a_tunnel(tls: bool) -> None:
    """The proxy is told host and port and who we are, resolves the name itself, and sees nothing of the message."""
    heads: list[bytes] = []
    seen: list[bytes] = []

    async def script(talk: Talk) -> None:
        while request := await talk.request():
            seen.append(request)
            await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with listening(script, names=[NAME], tls=tls) as peer:
        opened = {"ports": [peer.port]} if tls else {"insecure_hosts": [f"{NAME}:{peer.port}"]}
        async with through(relaying(peer.port, heads), **opened) as (proxy, transport):
            url = f"http{'s' if tls else ''}://{NAME}:{peer.port}/{MARK}"
            for _ in range(3):
                response = await transport.post(by_hand(url), HEADERS, b"{}")
                assert response.answer == Answer(200, "answered", f"127.0.0.1:{proxy.port}")
            assert proxy.accepted == 1
    assert len(seen) == 3
    assert heads == [
        f"CONNECT {NAME}:{peer.port} HTTP/1.1\r\nHost: {NAME}:{peer.port}\r\n"
        "Proxy-Authorization: Basic dXNlcjpzM2NyM3RAeA==\r\n\r\n".encode()
    ]
    assert b"Proxy-Authorization" not in seen[0]


async def test_the_receivers_certificate_is_checked_through_the_tunnel() -> None:
    """Whoever the proxy connects us to must be who the URL says."""
    async with (
        listening(names=["other.acme.com"]) as peer,
        through(relaying(peer.port, []), ports=[peer.port]) as (_, transport),
    ):
        with pytest.raises(PublishFailed, match="tls"):
            await transport.post(by_hand(f"https://{NAME}:{peer.port}/"), HEADERS, b"{}")


@pytest.mark.parametrize(
    ("status", "fault"),
    [(403, Fault.REJECTION), (502, Fault.DESTINATION), (504, Fault.DESTINATION), (302, Fault.DESTINATION)],
)
async def test_a_tunnel_that_is_refused(status: int, fault: Fault) -> None:
    """What the proxy says of the destination is the destination's."""
    answer = f"HTTP/1.1 {status} No\r\nContent-Length: 5\r\n\r\nhello".encode()
    async with through(saying(answer)) as (_, transport):
        with pytest.raises(PublishFailed) as caught:
            await transport.post(by_hand(f"https://{NAME}/"), HEADERS, b"{}")
    assert (caught.value.code, caught.value.fault) == (f"proxy_{status}", fault)
    assert "proxy" in error_words(caught.value.code)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\n\r\nan answer that nobody asked for",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4000,
    ],
    ids=["407", "garbage", "nothing", "speaks first", "flood"],
)
async def test_a_proxy_that_does_not_do_its_part_is_our_fault(answer: bytes) -> None:
    """No attempt is burned and the lane waits."""
    async with through(saying(answer)) as (_, transport):
        with pytest.raises(TransientPublishError) as caught:
            await transport.post(by_hand(f"https://{NAME}/"), HEADERS, b"{}")
    assert caught.value.code.startswith("local_proxy")
    assert caught.value.holds == "lane"


@pytest.mark.parametrize("host", ["proxy.lan", "nowhere.lan"])
async def test_a_proxy_that_cannot_be_reached_is_our_fault(host: str) -> None:
    """Nobody listens, or its name leads nowhere."""
    async with listening(tls=False) as gone:
        pass
    resolver = looking_up({"proxy.lan": ["127.0.0.1"]})
    async with posting(proxy=Proxy(host, gone.port), resolver=resolver) as transport:
        with pytest.raises(TransientPublishError) as caught:
            await transport.post(by_hand(f"https://{NAME}/"), HEADERS, b"{}")
    assert caught.value.code == "local_proxy"


async def test_a_proxy_that_is_silent_ends_at_the_deadline() -> None:
    """Like a receiver that is."""

    async def silent(talk: Talk) -> None:
        await talk.gone()

    async with through(silent, timeout=0.4) as (_, transport):
        with pytest.raises(PublishFailed, match="timeout"):
            await transport.post(by_hand(f"https://{NAME}/"), HEADERS, b"{}")


async def test_the_url_is_still_judged() -> None:
    """A proxy opens no address that the policy refuses by its spelling."""
    async with through(saying(b"")) as (proxy, transport):
        for url in ("https://127.0.0.1/", "https://169.254.169.254/", "http://hooks.acme.com/"):
            with pytest.raises(PublishFailed, match="forbidden_address"):
                await transport.post(by_hand(url), HEADERS, b"{}")
        assert proxy.accepted == 0


@pytest.mark.parametrize(
    "url",
    [
        f"https://{MARK}:3128",
        f"http://{MARK}",
        f"http://{MARK}:99999",
        f"http://{MARK}:3128/x",
        f"http://[{MARK}:3128",
        f"socks5://{MARK}:1",
        "",
        5,
    ],
)
def test_what_is_no_proxy_is_refused_without_repeating_it(url: object) -> None:
    """Its password may be in there."""
    with pytest.raises(ConfigurationError, match="option 'proxy': expected http://host:port") as caught:
        WebhookPublisher(signer=SIGNER, proxy=url)  # type: ignore[arg-type]
    assert MARK not in str(caught.value)
    assert caught.value.__context__ is None or MARK not in str(caught.value.__context__)


def test_credentials_are_not_shown() -> None:
    """Neither name nor password."""
    spec = Proxy.parse(f"http://user:{MARK}@proxy.lan:3128")
    assert repr(spec) == "<Proxy proxy.lan:3128>"
    assert MARK not in f"{WebhookPublisher(signer=SIGNER, proxy=f'http://u:{MARK}@p:1')!r}"


def test_a_name_that_is_refused_at_enqueue_is_refused_with_a_proxy_too() -> None:
    """The static rules hold."""
    publisher = WebhookPublisher(signer=SIGNER, proxy="http://proxy.lan:3128")
    with pytest.raises(InvalidMessage):
        publisher._policy.parse("https://localhost/")
