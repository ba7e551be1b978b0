"""Text to token ids: byte-level BPE, or plain bytes. Both read any script without an unknown token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.data.errors import DataError
from workers.spec import BpeTokenizer, CharTokenizer, FileTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

PATH_FIELD = "/data/tokenizer/path"
END_OF_TEXT = "<|endoftext|>"
_BATCH = 64  # pieces encoded at once
_PIECE_CHARACTERS = 1 << 18  # a longer document is encoded in pieces of whole lines of about this size


class Tokenizer(Protocol):
    """What turns documents into one row of ids."""

    vocabulary: int  # ids are below it

    def encode(self, documents: Iterable[str]) -> Iterator[NDArray[np.uint32]]:
        """The ids of all documents in order, in parts; every document ends with the id that separates documents."""

    def save(self, path: Path) -> None:
        """Write it as a file that `tokenizers` reads."""


def tokenizer_for(spec: BpeTokenizer | CharTokenizer | FileTokenizer, documents: Sequence[str]) -> Tokenizer:
    """A tokenizer for these documents: trained on them, or as the file has it.

    Raises DataError when the text is too small for the vocabulary asked for, or the file is no tokenizer.
    """
    match spec:
        case CharTokenizer():
            return ByteTokenizer()
        case FileTokenizer(path=path):
            return _from_file(Path(path))
        case BpeTokenizer():
            return BytePairTokenizer(_trained(spec, documents))


def vocabulary_in(path: str) -> int:
    """Token ids of a tokenizer's file, without loading it. Raises DataError."""
    try:
        data = json.loads(Path(path).read_text())
        if data.get("type") == "bytes":
            return ByteTokenizer.vocabulary
        special = [item["id"] for item in data.get("added_tokens", [])]
        return 1 + max(int(each) for each in [*data["model"]["vocab"].values(), *special])
    except OSError as error:
        raise DataError(f"data.tokenizer.path {path} cannot be read: {error.strerror}", PATH_FIELD) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"data.tokenizer.path {path} is no tokenizer that `tokenizers` wrote", PATH_FIELD) from error


def _from_file(path: Path) -> Tokenizer:
    if vocabulary_in(str(path)) == ByteTokenizer.vocabulary and json.loads(path.read_text()).get("type") == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as HuggingFace

    try:
        return BytePairTokenizer(HuggingFace.from_file(str(path)))
    except Exception as error:  # `tokenizers` raises plain Exceptions
        raise DataError(f"data.tokenizer.path {path} cannot be loaded: {error}", PATH_FIELD) from error


def _trained(spec: BpeTokenizer, documents: Sequence[str]) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer as HuggingFace
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = HuggingFace(models.BPE())
    made: Any = tokenizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(documents), trainer)
    found = tokenizer.get_vocab_size()
    if found < spec.vocab:
        raise DataError(
            f"data.tokenizer.vocab is {spec.vocab}, but this text has only {found} different tokens to offer; "
            f"use at most {found}, or more text"
        )
    return tokenizer


class BytePairTokenizer:
    """Byte-level BPE (Sennrich et al. 2016, on bytes as GPT-2 does), trained by `tokenizers`."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # the separator's name inside a text is text
        self.vocabulary = tokenizer.get_vocab_size()
        separator = tokenizer.token_to_id(END_OF_TEXT)
        if separator is None:
            raise DataError(f"the tokenizer has no {END_OF_TEXT}, which separates documents")
        self.separator = separator

    def encode(self, documents: Iterable[str]) -> Iterator[NDArray[np.uint32]]:
        batch: list[str] = []
        ends: list[bool] = []  # whether a document ends with the piece
        for document in documents:
            pieces = list(_pieces([document]))
            batch += pieces
            ends += [False] * (len(pieces) - 1) + [True]
            if len(batch) >= _BATCH:
                yield self._encoded(batch, ends)
                batch, ends = [], []
        if batch:
            yield self._encoded(batch, ends)

    def _encoded(self, pieces: list[str], ends: list[bool]) -> NDArray[np.uint32]:
        ids: list[int] = []
        for encoding, end in zip(
            self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False), ends, strict=True
        ):
            ids += encoding.ids
            if end:
                ids.append(self.separator)
        return np.asarray(ids, dtype=np.uint32)

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path))


class ByteTokenizer:
    """One token per byte of the UTF-8 text; byte 0 separates documents."""

    vocabulary = 256

    def encode(self, documents: Iterable[str]) -> Iterator[NDArray[np.uint32]]:
        for document in documents:
            yield np.frombuffer(document.encode() + b"\0", dtype=np.uint8).astype(np.uint32)

    def save(self, path: Path) -> None:
        path.write_text('{"type": "bytes"}\n')


def _pieces(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        start = 0
        while len(document) - start > _PIECE_CHARACTERS:
            cut = document.rfind("\n", start, start + _PIECE_CHARACTERS) + 1
            cut = cut if cut > start else start + _PIECE_CHARACTERS
            yield document[start:cut]
            start = cut
        yield document[start:]
