"""From the data part of a spec to `Data`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workers.data.batches import ArrayBatches, BatchShape, Data, TokenBatches, tokens_split
from workers.data.cache import files_key, noted
from workers.data.digits import load_digits
from workers.data.errors import DataError
from workers.data.needs import context_of
from workers.data.text import combined_hash, prepare_text
from workers.data.token_file import SIDE_SUFFIX, open_tokens
from workers.spec import DigitsData, JobSpec, TextData, TokensData


def open_data(spec: JobSpec, cache: Path, announce: Callable[[str], None] = lambda message: None) -> Data:
    """The data of a spec, prepared under the node's lock when it is new. Raises DataError with the field at fault.

    `announce` is told what takes long.
    """
    shape = BatchShape(spec.train.seed, spec.train.micro_batches, spec.train.micro_batch)
    match spec.data:
        case DigitsData():
            digits = load_digits()
            return ArrayBatches(digits.images, digits.labels, shape=shape, content_hash=digits.content_hash)
        case TextData():
            text = prepare_text(spec.data, cache, announce)
            return TokenBatches(
                text.train.tokens,
                text.validation.tokens,
                vocabulary=text.train.side.vocabulary,
                context=context_of(spec),
                shape=shape,
                content_hash=text.content_hash,
                tokenizer=text.tokenizer,
            )
        case TokensData():
            return _open_tokens(spec, spec.data, shape, cache)


def _open_tokens(spec: JobSpec, data: TokensData, shape: BatchShape, cache: Path) -> TokenBatches:
    train = open_tokens(Path(data.path))
    if data.validation is None:
        tokens, held_out = tokens_split(train.tokens, train.path)
        files = [train.path]
    else:
        second = open_tokens(Path(data.validation))
        if second.side.vocabulary > train.side.vocabulary:
            raise DataError(
                f"data.validation has vocabulary {second.side.vocabulary}, data.path only {train.side.vocabulary}"
            )
        tokens, held_out = train.tokens, second.tokens
        files = [train.path, second.path]
    files += [Path(f"{file}{SIDE_SUFFIX}") for file in files]
    note = noted(
        cache, files_key(files, "tokens"), lambda: {"hash": combined_hash(*files)}, lambda note: "hash" in note
    )
    return TokenBatches(
        tokens,
        held_out,
        vocabulary=train.side.vocabulary,
        context=context_of(spec),
        shape=shape,
        content_hash=str(note["hash"]),
    )
