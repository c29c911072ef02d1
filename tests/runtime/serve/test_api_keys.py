"""The file of keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ortolan.errors import UsageError
from ortolan.runtime.serve.api_keys import ApiKey, read_keys

KEY = "a-key-of-twenty-signs"
DIGEST = hashlib.sha256(KEY.encode())


def test_key_and_its_digest_mean_the_same(tmp_path: Path) -> None:
    """Whoever wants no secrets in the file writes digests."""
    (tmp_path / "plain").write_text(f'[alice]\nkey = "{KEY}"\n')
    (tmp_path / "digest").write_text(f'[alice]\nsha256 = "{DIGEST.hexdigest().upper()}"\n')
    expected = {DIGEST.digest(): ApiKey("alice", DIGEST.digest(), "alice")}
    assert read_keys(tmp_path / "plain") == read_keys(tmp_path / "digest") == expected


def test_tenant_and_limits_are_read(tmp_path: Path) -> None:
    text = f'[a.b]\nkey = "{KEY}"'  # a dot makes a table within a table, and needs quotes
    file = tmp_path / "keys.toml"
    file.write_text(text.replace("[a.b]", '["a.b"]') + '\ntenant = "t"\ntokens_per_minute = 9\n')
    (key,) = read_keys(file).values()
    assert (key.name, key.tenant, key.requests_per_minute, key.tokens_per_minute) == (
        *("a.b", "t"),
        *(None, 9),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("[alice]\nkey = 1", "alice.key must be"),
        ('[alice]\nkey = "short"', "16 to 512"),
        ('[alice]\nkey = "with a blank in between"', "16 to 512"),
        ('[alice]\nsha256 = "ab"', "64 digits of hex"),
        ("[alice]", "either key or sha256"),
        (f'[alice]\nkey = "{KEY}"\nsha256 = "{"0" * 64}"', "either key or sha256"),
        (f'[alice]\nkey = "{KEY}"\nlimit = 3', "alice.limit is unknown; known are key, sha256"),
        (f'[alice]\nkey = "{KEY}"\nrequests_per_minute = 0', "requests_per_minute must be a whole"),
        (f'[alice]\nkey = "{KEY}"\ntokens_per_minute = true', "tokens_per_minute must be a whole"),
        (f'[alice]\nkey = "{KEY}"\ntenant = "a b"', "alice.tenant must be text"),
        (f'[alice]\nkey = "{KEY}"\n[bob]\nkey = "{KEY}"', "bob has the key of alice"),
        (f'["a b"]\nkey = "{KEY}"', "a b is no name"),
        (f'alice = "{KEY}"', "alice is no table"),
        (f'[alice]\nkey = "{KEY}" x', "is not TOML, at line 2"),
    ],
)
def test_unfit_file_is_refused_in_one_sentence_without_its_keys(
    tmp_path: Path, text: str, said: str
) -> None:
    """What a server says at its start ends up in logs, where no key may be."""
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_keys(file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent cannot be read \(No such file"):
        read_keys(tmp_path / "absent")
