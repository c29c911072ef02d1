"""Who calls, and what they may: keys, tenants and limits, the same for every protocol.

The servers' doors (`http_auth`, `grpc_auth`) find the caller before anything of a call is read,
and `Service.submit` asks it for every request, however that arrived.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from ortolan.errors import AuthenticationError, RateLimitError
from ortolan.runtime.engine.async_engine import AsyncStream
from ortolan.runtime.params import Request
from ortolan.runtime.serve.api_keys import ApiKey, read_keys
from ortolan.runtime.serve.rate_limit import Bucket

Submit = Callable[[Request], Awaitable[AsyncStream]]

_NO_KEY = "this server wants a key; send the header Authorization: Bearer KEY"
_UNKNOWN = "the key is not known here; ask whoever runs this server for one"


class Account:
    """A key and what is left of its minute."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.key = key
        self._requests = key.requests_per_minute and Bucket(key.requests_per_minute, clock)
        self._tokens = key.tokens_per_minute and Bucket(key.tokens_per_minute, clock)

    def take_request(self) -> None:
        """Raises RateLimitError if the minute's requests are used up."""
        if self._requests:
            self._check(self._requests, "requests")
            self._requests.take(1)

    def check_tokens(self) -> None:
        """Raises RateLimitError if the minute's tokens are used up."""
        if self._tokens:
            self._check(self._tokens, "tokens")

    def take_tokens(self, count: int) -> None:
        """They count once they are processed; see Bucket."""
        if self._tokens:
            self._tokens.take(count)

    def _check(self, bucket: Bucket, what: str) -> None:
        if wait_s := bucket.wait_s:
            raise RateLimitError(
                f"the key has had its {bucket.per_minute} {what} per minute; try again in "
                f"{wait_s:.1f} s",
                wait_s,
            )


class Caller:
    """One call by a key's holder, which has paid for its first request.

    key: whose it is. account: finds the key's account, None once the key was withdrawn.
    """

    def __init__(self, key: ApiKey, account: Callable[[], Account | None]) -> None:
        self.tenant = key.tenant
        self._account = account
        self._paid = True

    async def submit(self, request: Request, submit: Submit) -> AsyncStream:
        """Submit it for this caller: prompts are shared within the tenant only, tokens counted.

        Raises AuthenticationError if the key was withdrawn since, RateLimitError, and what
        `submit` does.
        """
        account = self._account()
        if account is None:
            raise AuthenticationError(_UNKNOWN)
        if not self._paid:  # one call may ask several times
            account.take_request()
        self._paid = False
        account.check_tokens()
        # Taken before the engine is asked: of requests that come together, not all may pass.
        account.take_tokens(len(request.prompt_ids))
        try:
            stream = await submit(replace(request, salt=_salt(account.key.tenant, request.salt)))
        except BaseException:
            account.take_tokens(-len(request.prompt_ids))
            raise
        stream.on_read = lambda event: account.take_tokens(len(event.token_ids))
        return stream


def _salt(tenant: str, salt: str) -> str:
    """As long as any other, whatever the client's own; a tenant's name has no zero in it."""
    return hashlib.sha256(f"{tenant}\0{salt}".encode("utf-8", "surrogatepass")).hexdigest()


# Whose call the running task answers; None where no key is needed. Tasks inherit it.
CALLER: ContextVar[Caller | None] = ContextVar("ortolan_caller", default=None)


class Keys:
    """The keys of a file. For one event loop. Raises UsageError as `read_keys` does."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._accounts: dict[bytes, Account] = {}
        self.reload()

    def __len__(self) -> int:
        return len(self._accounts)

    def reload(self) -> None:
        """Read the file again. Raises UsageError, and the keys stay as they were.

        A key whose line is the same keeps what is left of its minute; one that is gone begins no
        request any more, also in calls that are under way.
        """
        keys = read_keys(self._path)
        before = self._accounts
        self._accounts = {
            digest: before[digest]
            if digest in before and before[digest].key == key
            else Account(key, self._clock)
            for digest, key in keys.items()
        }

    def admit(self, authorizations: Sequence[bytes]) -> Caller:
        """The caller with these Authorization headers, whose minute has room for a request.

        Raises AuthenticationError, RateLimitError.
        """
        digest = hashlib.sha256(_bearer(authorizations)).digest()
        account = self._accounts.get(digest)
        # The time of a look-up tells nothing: Python hashes bytes under a secret of the process,
        # and what is looked up is a digest, which tells nothing of a key.
        if account is None or not hmac.compare_digest(account.key.sha256, digest):
            raise AuthenticationError(_UNKNOWN)
        account.take_request()
        return Caller(account.key, lambda: self._accounts.get(digest))


def _bearer(authorizations: Sequence[bytes]) -> bytes:
    if len(authorizations) != 1:  # of two, a proxy in between may have checked the other one
        raise AuthenticationError(_NO_KEY)
    scheme, _, key = authorizations[0].strip().partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise AuthenticationError(_NO_KEY)
    return key.strip()
