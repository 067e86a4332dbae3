"""A real HTTP receiver on loopback, in a thread and an event loop of its own.

It owns one listening port on 127.0.0.1 (and ::1 where there is one), a throw-away certificate, and the list
of what arrived, byte for byte as it stood on the wire. It speaks just enough HTTP/1.1 for a polite sender:
keep-alive and Content-Length. It never judges a request: tests do. Misbehaving peers are made by hand where
they are needed, not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import inspect
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import trustme

NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Received:
    """One request as it came: ``target`` raw as on the wire, ``headers`` in order, ``at`` epoch seconds."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    at: float = field(default_factory=time.time)

    def header(self, name: str) -> str | None:
        """Return the first value of header ``name``, whatever its case, or None."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


Reply: TypeAlias = int | tuple[int, dict[str, str]]


def accept(received: Received) -> Reply:
    """Answer 200: what a receiver does until told otherwise."""
    return 200


class Receiver:
    """``with Receiver() as receiver:`` listens until the block ends.

    ``answer`` may be replaced at any time by a callable from ``Received`` to a status or (status, headers).
    It may be a coroutine function, or block: a plain function runs in a thread of its own, so a request held
    there holds no other. One that raises drops the connection. Answers have empty bodies.
    """

    def __init__(self, *, tls: bool = True, names: tuple[str, ...] = NAMES) -> None:
        self.answer: Callable[[Received], Reply | Awaitable[Reply]] = accept
        self.requests: list[Received] = []
        self.connections = 0
        self.port = 0
        self._tls = tls
        self._names = names
        self._arrived = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="receiver", daemon=True)
        self._folder = tempfile.TemporaryDirectory(prefix="receiver-")
        self._servers: list[asyncio.Server] = []
        self._talks: set[asyncio.Task[None]] = set()

    @property
    def host(self) -> str:
        """``localhost:PORT``, as an ``allow_hosts`` entry has it."""
        return f"localhost:{self.port}"

    @property
    def ca_file(self) -> str:
        """Path of a PEM file with the authority that signed this receiver's certificate."""
        return str(Path(self._folder.name) / "ca.pem")

    def url(self, target: str = "/") -> str:
        """Return the URL of ``target`` (path and query, used as given) here."""
        return f"{'https' if self._tls else 'http'}://{self.host}{target}"

    def wait_for(self, count: int, timeout: float = 30) -> list[Received]:
        """Block until ``count`` requests came, and return them; AssertionError after ``timeout`` seconds.

        An async test calls it through ``asyncio.to_thread``: it blocks its thread.
        """
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.requests) >= count, timeout):
                raise AssertionError(f"{len(self.requests)} of {count} requests came within {timeout} s")
            return list(self.requests)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._folder.cleanup()

    async def _listen(self) -> None:
        context = self._certify() if self._tls else None
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0, ssl=context, backlog=1024)
        self._servers.append(server)
        self.port = server.sockets[0].getsockname()[1]
        # a machine without IPv6, or with that port taken there, is served on IPv4 alone
        with contextlib.suppress(OSError):
            twin = await asyncio.start_server(self._meet, "::1", self.port, ssl=context, backlog=1024)
            self._servers.append(twin)

    def _certify(self) -> ssl.SSLContext:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.ca_file)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*self._names).configure_cert(context)
        return context

    async def _hang_up(self) -> None:
        for server in self._servers:
            server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        # closed transports say goodbye in the next turns of the loop
        for _ in range(3):
            await asyncio.sleep(0)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        task.add_done_callback(self._talks.discard)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while received := await self._read(reader):
                with self._arrived:
                    self.requests.append(received)
                    self._arrived.notify_all()
                writer.write(_render(await self._reply(received)))
                await writer.drain()
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            pass  # the sender left in the middle: its business
        except asyncio.CancelledError:
            pass  # this receiver is closing; asyncio's streams would log a cancelled callback
        finally:
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> Received | None:
        """Return the next request, or None when the sender hung up between two."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, target, _version = first.split(" ", 2)
        headers = [(name, value.strip(" ")) for name, _, value in (line.partition(":") for line in lines)]
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        return Received(method, target, headers, await reader.readexactly(length))

    async def _reply(self, received: Received) -> Reply:
        answer = self.answer
        if answer is accept or inspect.iscoroutinefunction(answer):
            reply = answer(received)
        else:
            reply = await self._in_thread(answer, received)
        return await reply if inspect.isawaitable(reply) else reply

    def _in_thread(self, answer: Callable[[Received], Any], received: Received) -> asyncio.Future[Any]:
        """Run a plain ``answer`` in a daemon thread: a forgotten event must not keep the process alive."""
        done: asyncio.Future[Any] = self._loop.create_future()

        def run() -> None:
            try:
                value, error = answer(received), None
            except BaseException as caught:  # handed to the connection, which drops
                value, error = None, caught
            with contextlib.suppress(RuntimeError):  # the receiver closed meanwhile
                self._loop.call_soon_threadsafe(_resolve, done, value, error)

        threading.Thread(target=run, name="receiver-answer", daemon=True).start()
        return done


def _resolve(done: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(value)
    else:
        done.set_exception(error)


def _render(reply: Reply) -> bytes:
    status, headers = reply if isinstance(reply, tuple) else (reply, {})
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unnamed"
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    if status not in (204, 304):
        lines.append("Content-Length: 0")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
