"""Certificates that are made for a test run, by the command openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1\n"


class Certificates:
    """An authority in a folder: ca.pem, server.pem, client.pem, expired.pem with their .key;
    stranger.pem is signed by itself. server.pem is for localhost and 127.0.0.1.
    """

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl command to make certificates with")
        self.folder = folder
        for name in ("ca", "stranger"):
            made = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2")
            self.openssl("req", "-x509", *_KEY, *made, "-subj", f"/CN={name}")
        (folder / "names").write_text(_NAMES)
        for name, days in (("server", "2"), ("client", "2"), ("expired", "-1")):
            made = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
            self.openssl("req", *_KEY, *made, "-subj", f"/CN={name}")
            signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
            made = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-days", days)
            self.openssl("x509", "-req", *signed, *made)

    def __getitem__(self, name: str) -> str:
        """A file's path."""
        return str(self.folder / name)

    def openssl(self, *args: str) -> None:
        """Run the command in the folder."""
        subprocess.run(["openssl", *args], cwd=self.folder, check=True, capture_output=True)
