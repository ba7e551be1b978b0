"""From text files to token files, once per node and content. No torch.

A prepared folder holds tokenizer.json, train.bin and validation.bin with their side files, and prepared.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from workers.data.cache import Note, files_key, noted, published
from workers.data.documents import content_key, document_files, read_documents, split
from workers.data.errors import DataError
from workers.data.token_file import TokenFile, file_hash, open_tokens, write_tokens
from workers.data.tokenizer import tokenizer_for
from workers.spec import FileTokenizer, TextData

FORMAT = "2"  # rises when the same text would give other tokens
PREPARED_FILE = "prepared.json"


@dataclass(frozen=True)
class PreparedText:
    """Tokens of a text, split, with the hash that a checkpoint carries."""

    train: TokenFile
    validation: TokenFile
    tokenizer: Path
    content_hash: str  # 64 hex digits over tokens and tokenizer
    num_documents: int
    num_bytes: int


def prepare_text(spec: TextData, cache: Path, announce: Callable[[str], None] = lambda message: None) -> PreparedText:
    """The tokens of a text, made on first use and found again afterwards.

    Unchanged files are not even read again. Raises DataError when the text cannot give what the spec asks for.
    """
    files = document_files(spec.path)
    settings = (FORMAT, version("tokenizers"), _identity(spec))

    def prepare() -> Note:
        contents = read_documents(files)
        folder = cache / "text" / content_key(contents, *settings)
        if not folder.is_dir():
            announce(f"tokenizing {len(contents):,} documents of {sum(map(len, contents)) / 1e6:,.1f} MB")
        try:
            published(folder, lambda draft: _fill(draft, spec, contents))
        except OSError as error:
            raise DataError(f"the cache folder {cache} cannot be written: {error.strerror}") from error
        return {"folder": folder.name}

    def is_there(note: Note) -> bool:
        return (cache / "text" / str(note.get("folder")) / PREPARED_FILE).is_file()

    note = noted(cache, files_key(files, *settings), prepare, is_there)
    return _opened(cache / "text" / str(note["folder"]))


def _identity(spec: TextData) -> str:
    """What of the tokenizer decides about the tokens; of a file its content, wherever it lies."""
    if not isinstance(spec.tokenizer, FileTokenizer):
        return spec.tokenizer.model_dump_json()
    try:
        return "file " + file_hash(Path(spec.tokenizer.path))
    except OSError as error:
        raise DataError(f"data.tokenizer.path {spec.tokenizer.path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class _Summary:
    content_hash: str
    num_documents: int
    num_bytes: int


def _fill(folder: Path, spec: TextData, contents: list[bytes]) -> None:
    parts = split(contents)
    tokenizer = tokenizer_for(spec.tokenizer, parts.train)
    tokenizer.save(folder / "tokenizer.json")
    for name, documents in (("train", parts.train), ("validation", parts.validation)):
        write_tokens(folder / f"{name}.bin", tokenizer.encode(documents), tokenizer.vocabulary)
    content_hash = combined_hash(folder / "tokenizer.json", folder / "train.bin", folder / "validation.bin")
    summary = _Summary(content_hash, len(contents), sum(map(len, contents)))
    (folder / PREPARED_FILE).write_text(json.dumps(asdict(summary)) + "\n")


def combined_hash(*files: Path) -> str:
    """64 hex digits over the content of files, in this order."""
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


def _opened(folder: Path) -> PreparedText:
    summary = _Summary(**json.loads((folder / PREPARED_FILE).read_text()))
    return PreparedText(
        train=open_tokens(folder / "train.bin"),
        validation=open_tokens(folder / "validation.bin"),
        tokenizer=folder / "tokenizer.json",
        content_hash=summary.content_hash,
        num_documents=summary.num_documents,
        num_bytes=summary.num_bytes,
    )
