"""A real S3 server process (moto) on loopback, for tests of the object store."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from typing import Self
from urllib.error import URLError

from tests.ports import quiet_port
from tests.waiting import PATIENCE_SECONDS, wait_for

BUCKET = "checkpoints"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret-word", "AWS_REGION": "us-east-1"}


# The bucket is there before the port is: a client that waits for the store never meets one without its bucket.
PROGRAM = """
import sys
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import main
port, bucket = sys.argv[1:]
s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(bucket, "us-east-1")
main(["-H", "127.0.0.1", "-p", port])
"""


@dataclass
class S3Server:
    """Sets the variables that S3 clients read while it lives, and puts the old ones back."""

    port: int
    process: subprocess.Popen[bytes] | None = None
    bucket: str = BUCKET
    before: dict[str, str | None] = field(default_factory=dict)

    @staticmethod
    def plan() -> S3Server:
        """A server on a free port; it comes up when entered. Raises ImportError without moto."""
        import moto.server  # noqa: F401  says early that it is missing

        return S3Server(quiet_port())

    def up(self) -> None:
        """Start the process and wait until it answers."""
        command = [sys.executable, "-c", PROGRAM, str(self.port), self.bucket]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._answers, "the S3 server answers")

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=PATIENCE_SECONDS).close()
        except (URLError, ConnectionError):
            assert self.process is not None and self.process.poll() is None, "the S3 server ended"
            return False
        return True

    def down(self) -> None:
        """Kill the process; what it held is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        wanted = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true"}
        self.before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        for name, value in self.before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        self.down()
