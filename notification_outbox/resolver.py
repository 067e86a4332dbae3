"""From a host name to its addresses: the system's resolver, in threads of our own, one lookup per name.

``getaddrinfo`` blocks for as long as a name server is silent, so it runs in a bounded set of daemon threads
that neither take the loop's threads away nor keep the process alive. Nothing is cached: the answer is judged
and dialled at once, or a second answer could differ from the judged one. Whether an address may be dialled is
not decided here (``urls.DestinationPolicy``); only answers that no policy could judge are refused.
"""

from __future__ import annotations

import asyncio
import errno
import queue
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeAlias

from .exceptions import OutboxError, PublishFailed, TransientPublishError
from .lifecycle import Fault

MAX_ANSWERS = 32

Address: TypeAlias = IPv4Address | IPv6Address
Lookup: TypeAlias = Callable[[str], Awaitable[Iterable[str]]]


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a lookup failed. Every waiter gets an error of its own: a shared one collects tracebacks."""

    code: str
    fault: Fault | None = None

    def error(self) -> OutboxError:
        if self.fault is None:
            return TransientPublishError(self.code, holds="lane")
        return PublishFailed(self.code, self.fault)


NO_SUCH_NAME = _Failure("dns", Fault.NAME)
TOO_MANY_ANSWERS = _Failure("dns_too_many_answers", Fault.NAME)
SCOPED_ANSWER = _Failure("forbidden_address", Fault.FORBIDDEN)


class Resolver:
    """Looks names up for one event loop. ``lookup``, for tests, replaces the system's resolver.

    At most ``threads`` lookups run at a time; further ones wait their turn, within their callers' deadlines.
    """

    def __init__(self, lookup: Lookup | None = None, threads: int = 16) -> None:
        self._pool = _Threads(threads)
        self._lookup = lookup or self._ask_system
        self._flights: dict[str, asyncio.Task[tuple[Address, ...] | _Failure]] = {}

    async def resolve(self, host: str) -> tuple[Address, ...]:
        """Return the addresses of ``host``, in the order the system prefers (RFC 6724), at least one.

        Callers that ask for a name already being looked up share that lookup; one that is cancelled leaves it
        to the others. Raises PublishFailed: ``dns`` when there is no answer, ``dns_too_many_answers`` beyond
        32 (both NAME), ``forbidden_address`` (FORBIDDEN) when one has a zone id; TransientPublishError
        ``local_...`` when this machine has no means left to ask.
        """
        flight = self._flights.get(host)
        if flight is None:
            flight = asyncio.create_task(self._fly(host), name="outbox-resolve")
            self._flights[host] = flight
            flight.add_done_callback(lambda _: self._flights.pop(host, None))
        answer = await asyncio.shield(flight)
        if isinstance(answer, _Failure):
            raise answer.error()
        return answer

    async def close(self) -> None:
        """Forget all lookups and let the threads go; one stuck in a lookup ends with it."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        self._pool.close()

    async def _fly(self, host: str) -> tuple[Address, ...] | _Failure:
        try:
            rows = list(dict.fromkeys(await self._lookup(host)))
            answers = tuple(ip_address(row) for row in rows)
        except socket.gaierror as error:
            return _Failure("local_dns") if error.errno == socket.EAI_MEMORY else NO_SUCH_NAME
        except OSError as error:  # EAI_SYSTEM arrives as the errno beneath it
            return _Failure(f"local_{errno.errorcode.get(error.errno or 0, 'dns').lower()}")
        except RuntimeError:  # no further thread can be started
            return _Failure("local_threads")
        except asyncio.CancelledError:  # by close(): callers are shielded from it
            return _Failure("local_closing")
        except ValueError:  # a name no resolver can be asked for, or an answer that is no address
            return NO_SUCH_NAME
        if not answers:
            return NO_SUCH_NAME
        if len(answers) > MAX_ANSWERS:
            return TOO_MANY_ANSWERS
        if any(isinstance(answer, IPv6Address) and answer.scope_id is not None for answer in answers):
            return SCOPED_ANSWER
        return answers

    async def _ask_system(self, host: str) -> Iterable[str]:
        return await asyncio.wrap_future(self._pool.submit(_getaddrinfo, host))


def _getaddrinfo(host: str) -> list[str]:
    answers = []
    for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        text = str(address[0])
        # an IPv6 row's fourth part is its zone; most systems write it into the text as well, some do not
        if len(address) == 4 and address[3] and "%" not in text:
            text += f"%{address[3]}"
        answers.append(text)
    return answers


class _Threads:
    """A bounded pool of daemon threads: the standard one is joined at exit, however long a lookup hangs."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._jobs: queue.SimpleQueue[tuple[Future[list[str]], Callable[[str], list[str]], str] | None]
        self._jobs = queue.SimpleQueue()
        self._started = 0
        self._idle = threading.Semaphore(0)

    def submit(self, call: Callable[[str], list[str]], host: str) -> Future[list[str]]:
        """Run ``call(host)`` in a thread, now or when one is free."""
        job: Future[list[str]] = Future()
        self._jobs.put((job, call, host))
        if not self._idle.acquire(blocking=False) and self._started < self._size:
            self._started += 1
            threading.Thread(target=self._work, name="outbox-resolver", daemon=True).start()
        return job

    def close(self) -> None:
        """Let every thread end after what it is doing."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while task := self._jobs.get():
            job, call, host = task
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(call(host))
                except Exception as error:
                    job.set_exception(error)
            self._idle.release()
