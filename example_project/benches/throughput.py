"""The worker's throughput, against the same deliveries without a database and by a bare HTTP client."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import trustme
from django.db import transaction
from django.test import override_settings

from notification_outbox import Draft, enqueue_many
from notification_outbox.management.commands.run_outbox_worker import rare_collections
from notification_outbox.models import OutboxMessage
from notification_outbox.signing import HttpMessageSigner, SigningRequest
from notification_outbox.transport import GuardedTransport
from notification_outbox.urls import DestinationPolicy
from notification_outbox.worker import Worker

from .measuring import Bar, Result, medians, wall

RECEIVER = Path(__file__).resolve().parent / "receiver.py"
CONCURRENT = 64
MESSAGES = 5000


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
        policy = DestinationPolicy.from_options(
            ports=[443], allow_hosts=[host], allow_networks=[], insecure_hosts=[]
        )
        target = policy.parse(f"https://{host}/hooks?x=1")

        async def bare_aiohttp() -> None:
            context = ssl.create_default_context(cafile=ca_file)
            connector = aiohttp.TCPConnector(ssl=context, limit=CONCURRENT)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def post(n: int) -> None:
                    async with session.post(target.url, data=body) as response:
                        await response.read()

                await spread_over(MESSAGES, post)

        async def bare_loop() -> None:
            transport = GuardedTransport(policy, timeout=15.0, ca_file=ca_file)
            await transport.open()

            async def post(n: int) -> None:
                name = f"msg_{n:032x}"
                request = SigningRequest(target.url, target.authority, "application/json", body, name, name)
                headers = signer.sign(request, created=int(time.time()), nonce=name)
                await transport.post(target, [("Content-Type", "application/json"), *headers], body)

            await spread_over(MESSAGES, post)
            await transport.close()

        def fill() -> None:
            OutboxMessage.objects.all().delete()
            with transaction.atomic():
                enqueue_many(Draft("bench", body, to=target.url) for _ in range(MESSAGES))

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
