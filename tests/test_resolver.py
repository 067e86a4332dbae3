"""The resolver: one lookup per name at a time, answers no policy could judge refused, nobody's error shared."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from ipaddress import ip_address

import pytest

from notification_outbox.exceptions import PublishFailed, TransientPublishError
from notification_outbox.lifecycle import Fault
from notification_outbox.resolver import MAX_ANSWERS, Lookup, Resolver


@asynccontextmanager
async def resolving(lookup: Lookup | None = None, threads: int = 16) -> AsyncIterator[Resolver]:
    resolver = Resolver(lookup, threads)
    try:
        yield resolver
    finally:
        await resolver.close()


def answering(*answers: str) -> Lookup:
    async def lookup(host: str) -> Iterable[str]:
        return answers

    return lookup


def failing(error: Exception) -> Lookup:
    async def lookup(host: str) -> Iterable[str]:
        raise error

    return lookup


async def test_answers_in_order() -> None:
    """The addresses come back in the order of the answer, each once."""
    async with resolving(answering("2606:4700::1", "1.1.1.1", "2606:4700::1")) as resolver:
        assert await resolver.resolve("hooks.acme.com") == (ip_address("2606:4700::1"), ip_address("1.1.1.1"))


async def test_system_resolver() -> None:
    """Without a lookup of its own the system is asked, in a thread that does not keep the process alive."""
    async with resolving() as resolver:
        answers = await resolver.resolve("localhost")
        assert set(answers) <= {ip_address("127.0.0.1"), ip_address("::1")}
        threads = [thread for thread in threading.enumerate() if thread.name == "outbox-resolver"]
        assert threads
        assert all(thread.daemon for thread in threads)


async def test_threads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more lookups run at a time than there are threads, and the others get their turn."""
    running, peak, lock, go = 0, 0, threading.Lock(), threading.Event()
    both = threading.Semaphore(0)

    def getaddrinfo(host: str, *args: object, **options: object) -> list[object]:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        both.release()
        assert go.wait(10)
        with lock:
            running -= 1
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.1.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with resolving(threads=2) as resolver:
        lookups = [asyncio.create_task(resolver.resolve(f"h{n}.acme.com")) for n in range(6)]
        for _ in range(2):
            await asyncio.to_thread(both.acquire)
        go.set()
        assert await asyncio.gather(*lookups) == [(ip_address("1.1.1.1"),)] * 6
    assert peak == 2


async def test_zone_of_the_system_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zone id that the system gives only as a number is refused like one in the text."""
    row = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 2))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [row])
    async with resolving() as resolver:
        with pytest.raises(PublishFailed) as caught:
            await resolver.resolve("hooks.acme.com")
    assert (caught.value.code, caught.value.fault) == ("forbidden_address", Fault.FORBIDDEN)


async def test_single_flight() -> None:
    """Callers who ask for a name under way share one lookup; the next caller starts a new one."""
    calls: list[str] = []
    both, go = asyncio.Event(), asyncio.Event()

    async def lookup(host: str) -> Iterable[str]:
        calls.append(host)
        if len(calls) == 2:
            both.set()
        await go.wait()
        return ["1.1.1.1"]

    async with resolving(lookup) as resolver:
        waiting = [asyncio.create_task(resolver.resolve("a.acme.com")) for _ in range(5)]
        other = asyncio.create_task(resolver.resolve("b.acme.com"))
        await both.wait()
        go.set()
        await asyncio.gather(*waiting, other)
        assert calls == ["a.acme.com", "b.acme.com"]
        await resolver.resolve("a.acme.com")
        assert calls == ["a.acme.com", "b.acme.com", "a.acme.com"]


async def test_cancelled_waiter_leaves_the_lookup() -> None:
    """A caller that gives up, even the first, takes nothing from the others."""
    started, go = asyncio.Event(), asyncio.Event()

    async def lookup(host: str) -> Iterable[str]:
        started.set()
        await go.wait()
        return ["1.1.1.1"]

    async with resolving(lookup) as resolver:
        first = asyncio.create_task(resolver.resolve("a.acme.com"))
        await started.wait()
        second = asyncio.create_task(resolver.resolve("a.acme.com"))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go.set()
        assert await second == (ip_address("1.1.1.1"),)


async def test_close_ends_waiting() -> None:
    """Closing ends lookups under way as our own failure, not as the caller's cancellation."""
    started = asyncio.Event()

    async def lookup(host: str) -> Iterable[str]:
        started.set()
        await asyncio.Event().wait()
        return []

    resolver = Resolver(lookup)
    waiting = asyncio.create_task(resolver.resolve("a.acme.com"))
    await started.wait()
    await resolver.close()
    with pytest.raises(TransientPublishError, match="local_closing"):
        await waiting


@pytest.mark.parametrize(
    ("lookup", "code", "fault"),
    [
        (answering(), "dns", Fault.NAME),
        (failing(socket.gaierror(socket.EAI_NONAME, "s3cr3t")), "dns", Fault.NAME),
        (failing(socket.gaierror(socket.EAI_AGAIN, "s3cr3t")), "dns", Fault.NAME),
        (failing(UnicodeError("s3cr3t")), "dns", Fault.NAME),
        (answering("s3cr3t"), "dns", Fault.NAME),
        (answering(*(f"1.1.1.{n}" for n in range(MAX_ANSWERS + 1))), "dns_too_many_answers", Fault.NAME),
        (answering("2606:4700::1", "fe80::1%lo"), "forbidden_address", Fault.FORBIDDEN),
    ],
)
async def test_failures(lookup: Lookup, code: str, fault: Fault) -> None:
    """A name without usable answers fails by a code of ours, with no foreign error behind it."""
    async with resolving(lookup) as resolver:
        with pytest.raises(PublishFailed) as caught:
            await resolver.resolve("hooks.acme.com")
    assert (caught.value.code, caught.value.fault) == (code, fault)
    assert caught.value.__context__ is None
    assert "s3cr3t" not in repr(caught.value)


async def test_as_many_answers_as_allowed() -> None:
    """Exactly as many answers as allowed are all given."""
    async with resolving(answering(*(f"1.1.1.{n}" for n in range(MAX_ANSWERS)))) as resolver:
        assert len(await resolver.resolve("hooks.acme.com")) == MAX_ANSWERS


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: OSError(errno.EMFILE, "s3cr3t"), "local_emfile"),
        (lambda: socket.gaierror(socket.EAI_MEMORY, "s3cr3t"), "local_dns"),
        (lambda: RuntimeError("can't start new thread"), "local_threads"),
    ],
)
async def test_our_own_lack(make: Callable[[], Exception], code: str) -> None:
    """When this machine has no means to ask, the lane waits and no attempt is counted."""
    async with resolving(failing(make())) as resolver:
        with pytest.raises(TransientPublishError) as caught:
            await resolver.resolve("hooks.acme.com")
    assert (caught.value.code, caught.value.holds) == (code, "lane")


async def test_errors_are_not_shared() -> None:
    """Each waiter of a failed lookup gets an error of its own."""
    async with resolving(answering()) as resolver:
        errors = await asyncio.gather(
            *(resolver.resolve("a.acme.com") for _ in range(3)), return_exceptions=True
        )
    assert len({id(error) for error in errors}) == 3
