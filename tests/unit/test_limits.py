"""Bodies above the limit: counted while they are read, and answered so that the client can read the answer."""

from __future__ import annotations

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from server.errors import ApiError
from server.limits import DRAINED_BYTES, BodyLimit

PIECE = 2**20


class Sender:
    """A client that sends so many pieces of a mebibyte, and keeps what it is answered."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces
        self.answers: list[Message] = []

    async def receive(self) -> Message:
        self.left -= 1
        return {"type": "http.request", "body": b"x" * PIECE, "more_body": self.left > 0}

    async def send(self, message: Message) -> None:
        self.answers.append(message)


async def reads_all(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that reads the body whole."""
    while (await receive()).get("more_body"):
        pass
    await PlainTextResponse("read")(scope, receive, send)


async def post(sender: Sender, **headers: str) -> None:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "headers": raw}
    await BodyLimit(reads_all, lambda path: 2 * PIECE)(scope, sender.receive, sender.send)


async def test_a_body_announced_too_large_is_read_to_its_end_before_it_is_refused() -> None:
    """Property: nothing is left unread when the 413 goes out, so that closing does not reset the connection."""
    sender = Sender(8)
    await post(sender, content_length=str(8 * PIECE))
    assert (sender.left, sender.answers[0]["status"]) == (0, 413)


async def test_a_body_found_too_large_is_read_to_its_end_before_it_is_refused() -> None:
    """Property: the same for a body whose length nobody announced."""
    sender = Sender(8)
    with pytest.raises(ApiError, match="larger than"):
        await post(sender)
    assert sender.left == 0


async def test_an_endless_body_is_left_unread() -> None:
    """Property: what is read of a refused body is bounded, and nothing of it is kept."""
    sender = Sender(10**9)
    await post(sender, content_length=str(PIECE * 10**9))
    assert (10**9 - sender.left) * PIECE <= DRAINED_BYTES and sender.answers[0]["status"] == 413


async def test_a_client_that_waits_for_leave_is_not_told_to_send() -> None:
    """Property: with Expect: 100-continue a body too large is refused before a byte of it travels."""
    sender = Sender(8)
    await post(sender, content_length=str(8 * PIECE), expect="100-continue")
    assert (sender.left, sender.answers[0]["status"]) == (8, 413)
