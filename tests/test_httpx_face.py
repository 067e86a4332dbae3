"""The guarded transport behind an ``httpx`` client."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from notification_outbox.exceptions import ConfigurationError
from notification_outbox.publishers.httpx_face import GuardedHTTPTransport

from .peer import Peer, Script, Talk, authority, listening, polite, saying

MARK = "s3cr3t"


@asynccontextmanager
async def client(script: Script = polite, **options: Any) -> AsyncIterator[tuple[Peer, httpx.AsyncClient]]:
    """Listen as localhost with ``script``, and open a client that may go there."""
    async with listening(script) as peer:
        with TemporaryDirectory() as folder:
            ca_file = Path(folder) / "ca.pem"
            authority().cert_pem.write_to_path(str(ca_file))
            transport = GuardedHTTPTransport(
                ca_file=str(ca_file), **{"allow_hosts": [f"localhost:{peer.port}"], **options}
            )
        async with httpx.AsyncClient(transport=transport) as client:
            yield peer, client


async def test_a_post_and_its_answer() -> None:
    """Target, headers and body go out as httpx has them, the answer comes back with its body."""
    seen: list[bytes] = []

    async def script(talk: Talk) -> None:
        while request := await talk.request():
            seen.append(request)
            await talk.send(
                b"HTTP/1.1 404 Nope\r\nX-A: b\r\nContent-Length: 5\r\n\r\nhello"
                if len(seen) > 1
                else b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
            )

    async with client(script) as (peer, http):
        url = f"https://localhost:{peer.port}/a%2Fb?x=%7E"
        first = await http.post(url, json={"a": 1}, headers={"X-Key": "1"})
        second = await http.post(url, content=b"")
        assert peer.accepted == 1
    assert (first.status_code, first.text) == (200, "abc")
    assert (second.status_code, second.text, second.headers["x-a"]) == (404, "hello", "b")
    assert seen[0].startswith(b"POST /a%2Fb?x=%7E HTTP/1.1\r\n")
    assert b"X-Key: 1\r\n" in seen[0]
    assert seen[0].endswith(b'{"a":1}')


@pytest.mark.parametrize("url", ["https://127.0.0.1/", "http://hooks.acme.com/", "https://169.254.169.254/x"])
async def test_what_must_not_be_reached_is_not(url: str) -> None:
    """As for webhooks: the rule is named, and nothing of the URL."""
    async with client() as (peer, http):
        with pytest.raises(httpx.UnsupportedProtocol) as caught:
            await http.post(url + MARK)
        assert peer.accepted == 0
    assert MARK not in str(caught.value)


async def test_only_posts() -> None:
    """Other methods are not guarded, so they are not sent."""
    async with client() as (peer, http):
        with pytest.raises(httpx.UnsupportedProtocol, match="POST"):
            await http.get(f"https://localhost:{peer.port}/")
        assert peer.accepted == 0


async def test_a_compressed_answer_is_not_inflated() -> None:
    """A bomb comes as the few bytes it is."""
    bomb = gzip.compress(b"\0" * 10_000_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    async with client(saying(head + bomb)) as (peer, http):
        assert (await http.post(f"https://localhost:{peer.port}/")).content == bomb


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", httpx.ReadError),
        (b"HTTP/1.1 999 No\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70_000, httpx.ReadError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", httpx.ReadError),
    ],
    ids=["nothing", "999", "too large", "cut off"],
)
async def test_failures_are_those_of_httpx(answer: bytes, error: type[httpx.TransportError]) -> None:
    """So that a caller handles them as it handles others."""
    async with client(saying(answer)) as (peer, http):
        with pytest.raises(error):
            await http.post(f"https://localhost:{peer.port}/", content=MARK)


async def test_an_answer_that_ends_with_its_connection() -> None:
    """Neither length nor chunks: the end of the connection is the end of the body (RFC 9112, section 6.3)."""
    async with client(saying(b"HTTP/1.1 200 OK\r\n\r\nabc")) as (peer, http):
        assert (await http.post(f"https://localhost:{peer.port}/")).text == "abc"


def test_wrong_options_are_named() -> None:
    """As for the publisher."""
    with pytest.raises(ConfigurationError, match="timeout"):
        GuardedHTTPTransport(timeout="soon")
