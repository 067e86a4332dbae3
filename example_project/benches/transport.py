"""The guarded transport's cost, against HTTP clients without a guard."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import httpx

from notification_outbox.management.commands.run_outbox_worker import rare_collections
from notification_outbox.publishers.httpx_face import GuardedHTTPTransport
from notification_outbox.transport import GuardedTransport
from notification_outbox.urls import DestinationPolicy

from .measuring import Bar, Result, cpu, medians
from .throughput import CONCURRENT, receiving, spread_over

POSTS = 4_000
BODY = b'{"filling":"' + b"x" * 1000 + b'"}'
HEADERS = [("Content-Type", "application/json"), ("Accept-Encoding", "identity"), ("User-Agent", "bench")]
Post = Callable[[], Awaitable[Any]]


def bench_transport() -> Result:
    """CPU of a POST of 1 KB over TLS, 64 concurrent: bare aiohttp, our post(), our httpx face, httpx's own."""
    with receiving() as (host, ca_file):
        url = f"https://{host}/hooks?x=1"
        policy = DestinationPolicy.from_options(allow_hosts=[host])
        context = ssl.create_default_context(cafile=ca_file)

        @asynccontextmanager
        async def bare_aiohttp() -> Any:
            connector = aiohttp.TCPConnector(ssl=context, limit=CONCURRENT)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def post() -> None:
                    async with session.post(url, data=BODY, headers=HEADERS) as response:
                        await response.read()

                yield post

        @asynccontextmanager
        async def ours() -> Any:
            transport = GuardedTransport(policy, timeout=15.0, ca_file=ca_file)
            await transport.open()
            destination = policy.parse(url)
            yield lambda: transport.post(destination, HEADERS, BODY)
            await transport.close()

        @asynccontextmanager
        async def face() -> Any:
            async with GuardedHTTPTransport(ca_file=ca_file, allow_hosts=[host]) as transport:
                yield lambda: transport.handle_async_request(
                    httpx.Request("POST", url, headers=HEADERS, content=BODY)
                )

        @asynccontextmanager
        async def stock_httpx() -> Any:
            async with httpx.AsyncClient(
                verify=context, limits=httpx.Limits(max_connections=CONCURRENT)
            ) as http:
                yield lambda: http.post(url, content=BODY, headers=HEADERS)

        def contestant(client: Callable[[], AbstractAsyncContextManager[Post]]) -> Callable[[], None]:
            async def play() -> None:
                async with client() as post:
                    await spread_over(POSTS, lambda n: post())

            return lambda: asyncio.run(play())

        clients = {"aiohttp": bare_aiohttp, "post": ours, "face": face, "httpx": stock_httpx}
        with rare_collections():
            spent = medians({name: contestant(client) for name, client in clients.items()}, cpu, rounds=5)
    return Result(
        ratios={f"{name}/aiohttp": spent[name] / spent["aiohttp"] for name in ("post", "face", "httpx")},
        bars={"post/aiohttp": Bar("at most", 1.3)},
    )
