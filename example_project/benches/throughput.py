"""The worker's throughput, against the same deliveries without a database and by a bare HTTP client."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import trustme
from django.db import transaction
from django.test import override_settings

from notification_outbox import Draft, Message, enqueue_many
from notification_outbox.management.commands.run_outbox_worker import rare_collections
from notification_outbox.models import OutboxMessage
from notification_outbox.publishers import WebhookPublisher
from notification_outbox.signing import HttpMessageSigner
from notification_outbox.worker import Worker

from .measuring import Bar, Result, medians, wall

RECEIVER = Path(__file__).resolve().parent / "receiver.py"
CONCURRENT = 64
MESSAGES = 20_000


@contextmanager
def receiving() -> Iterator[tuple[str, str]]:
    """Start the receiver as a process; yield ``host:port`` and the file of its authority."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        certificate, ca_file = Path(folder) / "certificate.pem", Path(folder) / "ca.pem"
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(ca_file))
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(certificate))
        process = subprocess.Popen(
            [sys.executable, str(RECEIVER), str(certificate)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield f"localhost:{process.stdout.readline().strip()}", str(ca_file)
        finally:
            process.kill()
            process.communicate()


async def spread_over(count: int, work: Callable[[int], Any]) -> None:
    """Do ``work(n)`` for each n below ``count``, ``CONCURRENT`` at a time."""
    numbers = iter(range(count))

    async def one_after_another() -> None:
        for n in numbers:
            await work(n)

    await asyncio.gather(*(one_after_another() for _ in range(CONCURRENT)))


def bench_throughput() -> Result:
    """Messages a second to a local TLS receiver, 1 KB, signed with ed25519: worker, bare loops, 64 concurrent."""
    signer = HttpMessageSigner.from_secret("bench")
    body = b'{"filling":"' + b"x" * 1000 + b'"}'
    with receiving() as (host, ca_file):
        options = {"signer": signer, "ca_file": ca_file, "allow_hosts": [host]}
        url = f"https://{host}/hooks?x=1"
        message = Message(
            id="",
            notification_type="bench",
            publisher="default",
            destination=url,
            body=body,
            created_at=datetime.now(UTC),
        )

        async def bare_aiohttp() -> None:
            context = ssl.create_default_context(cafile=ca_file)
            connector = aiohttp.TCPConnector(ssl=context, limit=CONCURRENT)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def post(n: int) -> None:
                    async with session.post(url, data=body) as response:
                        await response.read()

                await spread_over(MESSAGES, post)

        async def bare_loop() -> None:
            # the very requests of the worker: transport, headers, signer
            publisher = WebhookPublisher(**options)
            await publisher.open()

            async def post(n: int) -> None:
                await publisher.publish(replace(message, id=f"msg_{n:032x}"))

            await spread_over(MESSAGES, post)
            await publisher.close()

        def fill() -> None:
            OutboxMessage.objects.all().delete()
            with transaction.atomic():
                enqueue_many(Draft("bench", body, to=url) for _ in range(MESSAGES))

        def worker() -> None:
            asyncio.run(Worker(concurrency=CONCURRENT, until="empty").run())
            undelivered = OutboxMessage.objects.exclude(state="delivered").count()
            if undelivered:
                raise SystemExit(f"bench: {undelivered} messages were not delivered")

        def measured(work: Callable[[], object]) -> float:
            if work is worker:
                fill()
            return wall(work)

        outbox = {"PUBLISHERS": {"default": {"OPTIONS": options}}}
        # the garbage collector as run_outbox_worker sets it, for every contestant
        with override_settings(NOTIFICATION_OUTBOX=outbox), rare_collections():
            spent = medians(
                {
                    "aiohttp": lambda: asyncio.run(bare_aiohttp()),
                    "loop": lambda: asyncio.run(bare_loop()),
                    "worker": worker,
                },
                measured,
                rounds=3,
            )
    return Result(
        ratios={
            "worker/loop": spent["loop"] / spent["worker"],
            "worker/aiohttp": spent["aiohttp"] / spent["worker"],
        },
        bars={"worker/loop": Bar("at least", 0.6), "worker/aiohttp": Bar("at least", 0.4)},
    )
