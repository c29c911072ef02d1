"""What a client shows and whom it trusts."""

from __future__ import annotations

import logging

import pytest
from certificates import Certificates

from ortolan.client.access import Access
from ortolan.client.aio import AsyncClient
from ortolan.client.sync import Client
from ortolan.errors import UsageError

KEY = "a-key-of-twenty-signs"


@pytest.mark.parametrize(
    ("address", "settings", "warned"),
    [
        ("127.0.0.1:1", {"api_key": KEY}, False),
        ("[::1]:1", {"api_key": KEY}, False),
        ("localhost:1", {"api_key": KEY}, False),
        ("unix:/run/socket", {"api_key": KEY}, False),
        ("10.0.0.1:1", {}, False),
        ("10.0.0.1:1", {"api_key": KEY, "tls": True}, False),
        ("10.0.0.1:1", {"api_key": KEY}, True),
        ("models.example:1", {"api_key": KEY}, True),
        ("localhost.example:1", {"api_key": KEY}, True),
    ],
)
def test_key_in_clear_text_on_a_network_is_said(
    address: str, settings: dict[str, object], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever listens on the way has the key from then on; the warning itself must not hold it."""
    with caplog.at_level(logging.WARNING):
        Client(address, **settings).close()  # type: ignore[arg-type]
    assert [address in record.getMessage() for record in caplog.records] == [True] * warned
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_ca": "absent"}, "tls_ca absent cannot be used (No such file"),
        ({"tls_ca": "client.key"}, "client.key cannot be used"),
        ({"client_cert": "client.pem"}, "client_cert and client_key go together"),
        (
            {"client_cert": "client.pem", "client_key": "server.key"},
            "in PEM that go together",
        ),
        ({"api_key": "two\nlines"}, "api_key holds signs that no key has"),
    ],
)
def test_unfit_access_is_refused_when_the_client_is_made(
    certificates: Certificates, settings: dict[str, str], said: str
) -> None:
    """gRPC itself would say of a bad file that no server can be reached."""
    files = {
        name: certificates[value] if "." in value else value for name, value in settings.items()
    }
    with pytest.raises(UsageError) as caught:
        Client("127.0.0.1:1", **files)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_key_is_in_no_representation() -> None:
    """Tracebacks and logs show what objects say of themselves."""
    assert KEY not in repr(Access(api_key=KEY))
    assert KEY not in repr(vars(AsyncClient("127.0.0.1:1", api_key=KEY)))
