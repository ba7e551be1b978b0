"""The documents of a text: which files belong, what they hold, which are held out. Standard library only."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.data.errors import DataError

VALIDATION_SHARE = 0.05
_STDLIB_LEFT_OUT = ("test", "site-packages", "__pycache__")
_SNIFF_BYTES = 8192


@dataclass(frozen=True)
class Split:
    """Documents to train on and documents held out; the latter may be empty."""

    train: list[str]
    validation: list[str]


def document_files(path: str) -> list[Path]:
    """The files of `stdlib`, of one file, or of a folder with all below it, in the order of their names.

    Hidden files, links and files with a NUL byte near their start are left out of a folder. Raises DataError.
    """
    if path == "stdlib":
        return list(_stdlib())
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"data.path {path} does not exist on this machine")
    files = [file for file in _below(root) if not _is_binary(file)]
    if not files:
        raise DataError(f"data.path {path} holds no text file")
    return files


def _stdlib() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _STDLIB_LEFT_OUT)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _below(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file() and not file.is_symlink():
                yield file


def _is_binary(file: Path) -> bool:
    with open(file, "rb") as opened:
        return b"\0" in opened.read(_SNIFF_BYTES)


def read_documents(files: Sequence[Path]) -> list[bytes]:
    """The content of each file; empty ones are left out. Raises DataError when nothing is left or one is unreadable."""
    contents = []
    for file in files:
        try:
            contents.append(file.read_bytes())
        except OSError as error:
            raise DataError(f"data.path: {file} cannot be read: {error.strerror}") from error
    contents = [content for content in contents if content.strip()]
    if not contents:
        raise DataError("data.path holds no text: every file is empty")
    return contents


def split(contents: Sequence[bytes]) -> Split:
    """Hold out 5 % of the bytes: whole documents in the order of their hashes, or the end of a single one.

    Text that is not UTF-8 is read with replacement characters.
    """
    if len(contents) == 1:
        return _split_lines(contents[0])
    ordered = sorted(contents, key=lambda content: hashlib.sha256(content).digest())
    wanted, held_out, num_bytes = VALIDATION_SHARE * sum(map(len, ordered)), 0, 0
    while num_bytes < wanted and held_out < len(ordered) - 1:
        num_bytes += len(ordered[held_out])
        held_out += 1
    texts = [content.decode("utf-8", "replace") for content in ordered]
    return Split(texts[held_out:], texts[:held_out])


def _split_lines(content: bytes) -> Split:
    aim = int(len(content) * (1 - VALIDATION_SHARE))
    cut = content.find(b"\n", aim) + 1 or content.rfind(b"\n", 0, aim) + 1 or len(content)
    if cut == len(content):  # the only line end after the aim is the last byte
        cut = content.rfind(b"\n", 0, aim) + 1 or len(content)
    parts = (content[:cut].decode("utf-8", "replace"), content[cut:].decode("utf-8", "replace"))
    return Split([parts[0]], [parts[1]] if parts[1] else [])


def content_key(contents: Sequence[bytes], *settings: str) -> str:
    """64 hex digits that name these documents, in any order, under these settings."""
    digest = hashlib.sha256("\0".join(settings).encode())
    for part in sorted(hashlib.sha256(content).digest() for content in contents):
        digest.update(part)
    return digest.hexdigest()
