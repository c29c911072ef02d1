"""The engine on a thread of its own, for callers that are coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ortolan.errors import CancelledError, EngineError, OrtolanError
from ortolan.runtime.engine.engine import Engine, EngineStats
from ortolan.runtime.engine.life import RequestHandle
from ortolan.runtime.engine.record import RequestRecord, record_of
from ortolan.runtime.machine import stay_on
from ortolan.runtime.params import Request, TokenEvent

OnEnd = Callable[[RequestRecord], None]

# Events that a stream holds before those that follow are merged into the last.
_MOST_UNREAD = 32


class AsyncStream:
    """A request's events, for one reader. `async for` ends after the last, or raises the error.

    A reader that falls behind gets fewer, longer events: what is held is at most some events
    and the answer's tokens, and nobody waits for the reader. Leaving early is `cancel` or
    `aclose`. on_end: called once, on the loop, when the request has ended. on_read: is told of
    each event when the reader takes it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cancel: Callable[[], None],
        on_end: OnEnd | None = None,
    ) -> None:
        self.on_end = on_end
        self._loop = loop
        self._cancel = cancel
        self._lock = threading.Lock()
        self._unread: deque[TokenEvent] = deque()
        self._ended = False
        self._error: OrtolanError | None = None
        self._news = asyncio.Event()
        self._told = False  # whether the loop has been told of what is unread
        self.unread_prompt = 0  # tokens of it, until the first event says that it was read
        self._begun: set[int] = set()  # choices that there was an event of
        self.on_read: Callable[[TokenEvent], None] = lambda event: None

    def cancel(self) -> None:
        """Give the slot back within one step. Harmless after the end, or a second time."""
        self._cancel()

    async def aclose(self) -> None:
        """The same."""
        self._cancel()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while True:
            with self._lock:
                self._told = False
                self._news.clear()
                if self._unread:
                    event = self._unread.popleft()
                    self.on_read(event)
                    return event
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise StopAsyncIteration
            await self._news.wait()

    # Called by the engine's thread.

    def put(self, event: TokenEvent) -> bool:
        """Add an event, merged into the choice's last unread one where many are unread.

        Returns whether it is its choice's first.
        """
        first = event.choice not in self._begun
        self._begun.add(event.choice)
        with self._lock:
            if len(self._unread) >= _MOST_UNREAD:
                for index in range(len(self._unread) - 1, -1, -1):
                    if self._unread[index].choice == event.choice:
                        self._unread[index] = self._unread[index].followed_by(event)
                        return first
            self._unread.append(event)
        return first

    def end(self, error: OrtolanError | None) -> None:
        """There will be no more events."""
        with self._lock:
            self._ended, self._error = True, error

    def wake_reader(self) -> bool:
        """Whether the reader has to be told; True once until it has looked."""
        with self._lock:
            told, self._told = self._told, True
            return not told

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The reader's."""
        return self._loop

    def tell(self) -> None:
        """On the reader's loop: there is something to look at."""
        self._news.set()


@dataclass(frozen=True)
class Work:
    """What an engine has been given to do: requests that have not ended, and tokens of prompts
    that have had no token of their answer yet.
    """

    requests: int
    unread_tokens: int


class AsyncEngine:
    """Runs an engine's steps on a thread as long as there is work; safe for use by coroutines.

    cpus: the processors that the thread stays on; None: any. heartbeat_s: when the thread last
    showed life, on time.monotonic's clock; while `busy` it grows with every step. A step that
    raises what it should not breaks the engine: every request ends with the reason, and `stats`
    tells it.
    """

    def __init__(self, engine: Engine, cpus: frozenset[int] | None = None) -> None:
        self.heartbeat_s = time.monotonic()
        self._engine = engine
        self._cpus = cpus
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._streams: dict[RequestHandle, AsyncStream] = {}
        self._touched: set[AsyncStream] = set()
        self._work = Work(0, 0)
        self._work_lock = threading.Lock()
        self._refusal: str | None = None  # why no request is accepted any more
        self._closing = False
        self._over = False  # the thread looks into its inbox no more
        self._thread = threading.Thread(target=self._run, name="ortolan-engine", daemon=True)
        self._thread.start()

    async def submit(self, request: Request, on_end: OnEnd | None = None) -> AsyncStream:
        """Queue a request; its stream. Raises what `Engine.submit` does.

        on_end: called on this loop with the request's record when it has ended, read or not,
        before its stream ends; never if it is refused.
        """
        self._engine.check(request)
        if self._refusal is not None:
            raise EngineError(self._refusal)
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[AsyncStream] = loop.create_future()
        self._add_work(1, len(request.prompt_ids))
        if not self._tell(lambda: self._submit(request, loop, accepted, on_end)):
            self._add_work(-1, -len(request.prompt_ids))
            raise self._refused()
        try:
            return await asyncio.shield(accepted)
        except asyncio.CancelledError:
            # The caller went away while its request was on its way.
            accepted.add_done_callback(_cancel_accepted)
            raise

    def stats(self) -> EngineStats:
        """What the engine is doing and has done; numbers may be a step apart."""
        return self._engine.stats()

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._streams or self._inbox)

    @property
    def work(self) -> Work:
        """What there is to do at this moment."""
        return self._work

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing new, let running streams finish, then close."""
        self._refusal = "the engine is shutting down; try another one"
        deadline = time.monotonic() + timeout_s
        while self.busy and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await self.close()

    async def close(self) -> None:
        """End every request with an error and stop the thread. Harmless a second time."""
        self._refusal = self._refusal or "the engine is closed; load the model again"
        self._closing = True
        self._tell(lambda: None)
        await asyncio.to_thread(self._thread.join)

    def _tell(self, action: Callable[[], None]) -> bool:
        """Have the thread do something; False if it does nothing any more."""
        with self._wake:
            if self._over:
                return False
            self._inbox.append(action)
            self._wake.notify()
            return True

    def _add_work(self, requests: int, unread_tokens: int) -> None:
        with self._work_lock:  # it grows on the loop and shrinks on the thread
            known = self._work
            self._work = Work(known.requests + requests, known.unread_tokens + unread_tokens)

    def _refused(self) -> EngineError:
        return EngineError(self._refusal or "the engine is closed; load the model again")

    # On the engine's thread.

    def _run(self) -> None:
        stay_on(self._cpus)
        while not self._closing:
            with self._wake:
                while not self._inbox and not self._streams and not self._closing:
                    self.heartbeat_s = time.monotonic()
                    self._wake.wait(timeout=1.0)
            try:
                self._act()
                if self._streams:
                    self._engine.step()
            except Exception as exc:  # noqa: BLE001  a fault of ours must end every stream with a reason
                self._break(f"{type(exc).__name__}: {exc}")
            self.heartbeat_s = time.monotonic()
            self._wake_readers()
        with self._wake:
            self._over = True
        try:
            self._act()
            for handle in tuple(self._streams):
                self._engine.cancel(handle, CancelledError("the engine was closed"))
        except Exception as exc:  # noqa: BLE001  as above
            self._break(f"{type(exc).__name__}: {exc}")
        self._wake_readers()

    def _act(self) -> None:
        while self._inbox:
            try:
                self._inbox[0]()
            finally:
                self._inbox.popleft()  # only now: until then it makes us busy

    def _break(self, reason: str) -> None:
        """End every stream with the reason, even if the engine can do nothing any more."""
        self._refusal = self._refusal or f"the engine stopped working: {reason}"
        try:
            self._engine.stop(reason)
        except Exception as exc:  # noqa: BLE001  nobody may wait for an engine that has died
            error = EngineError(f"the engine stopped working: {reason}")
            error.__cause__ = exc
            for handle in tuple(self._streams):
                self._end(handle, error)

    def _submit(
        self,
        request: Request,
        loop: asyncio.AbstractEventLoop,
        accepted: asyncio.Future[AsyncStream],
        on_end: OnEnd | None,
    ) -> None:
        try:
            if self._closing:
                raise self._refused()
            handle = self._engine.submit(request)
        except Exception as exc:  # noqa: BLE001  whatever it is, the caller waits for it
            error = exc
            if not isinstance(exc, OrtolanError):
                error = EngineError(f"the request cannot be queued: {type(exc).__name__}: {exc}")
            self._add_work(-1, -len(request.prompt_ids))
            _on_loop(loop, partial(_settle, accepted, error))
            return
        stream = AsyncStream(loop, lambda: self._cancel(handle), on_end)
        stream.unread_prompt = len(request.prompt_ids)
        self._streams[handle] = stream
        handle.sink = lambda event: self._put(stream, event)
        handle.on_end = lambda: self._end(handle, handle.error)
        for event in handle.events:  # a request for no tokens has ended already
            self._put(stream, event)
        if handle.done:
            self._end(handle, handle.error)
        _on_loop(loop, partial(_settle, accepted, stream))

    def _cancel(self, handle: RequestHandle) -> None:
        self._tell(lambda: self._engine.cancel(handle))

    def _put(self, stream: AsyncStream, event: TokenEvent) -> None:
        first = stream.put(event)
        self._touched.add(stream)
        if first:
            self._add_work(0, -stream.unread_prompt)
            stream.unread_prompt = 0
            # Its prompt was read just now; the step goes on with other prompts and all the rows,
            # and a first token must not wait for them.
            self._wake_readers()

    def _end(self, handle: RequestHandle, error: OrtolanError | None) -> None:
        stream = self._streams.pop(handle, None)
        if stream is not None:
            self._add_work(-1, -stream.unread_prompt)
            if stream.on_end is not None:
                _on_loop(stream.loop, partial(stream.on_end, record_of(handle)))
            stream.end(error)
            self._touched.add(stream)

    def _wake_readers(self) -> None:
        """Tell each loop once of all its streams that have something to read."""
        told: dict[asyncio.AbstractEventLoop, list[AsyncStream]] = {}
        for stream in self._touched:
            if stream.loop.is_closed():
                stream.cancel()  # nobody is left to do it
            elif stream.wake_reader():
                told.setdefault(stream.loop, []).append(stream)
        self._touched.clear()
        for loop, streams in told.items():
            _on_loop(loop, partial(_tell_all, streams))


def _tell_all(streams: list[AsyncStream]) -> None:
    for stream in streams:
        stream.tell()


def _on_loop(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed, and its readers with it
        loop.call_soon_threadsafe(action)


def _settle(accepted: asyncio.Future[AsyncStream], result: AsyncStream | Exception) -> None:
    """Give a caller what came of its request, unless it has gone away."""
    if accepted.done():
        return
    if isinstance(result, Exception):
        accepted.set_exception(result)
    else:
        accepted.set_result(result)


def _cancel_accepted(accepted: asyncio.Future[AsyncStream]) -> None:
    if not accepted.cancelled() and accepted.exception() is None:
        accepted.result().cancel()
