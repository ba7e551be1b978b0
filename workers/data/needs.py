"""What a spec needs of its data, as far as the sizes of files tell: for a look before anything starts. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from workers.data.documents import document_files
from workers.data.errors import DataError
from workers.spec.kinds import BpeTokenizer, GptModel, PythonModel, TextData, TokensData
from workers.spec.models import JobSpec
from workers.spec.problems import SpecProblem, shown

DEFAULT_CONTEXT = 256  # tokens per sequence for a user's model without a `context` in its kwargs
ITEM_BYTES = {"uint16": 2, "uint32": 4}


def context_of(spec: JobSpec) -> int:
    """Tokens per sequence. Raises DataError."""
    match spec.model:
        case GptModel():
            return spec.model.context
        case PythonModel():
            context = spec.model.kwargs.get("context", DEFAULT_CONTEXT)
            if isinstance(context, bool) or not isinstance(context, int) or context < 1:
                raise DataError(f"model.kwargs.context is {context!r}; it must be a whole number of tokens")
            return context
        case _:
            raise DataError(f"model {spec.model.kind} reads no sequences")


def data_problems(spec: JobSpec) -> list[SpecProblem]:
    """What certainly cannot work: less text than one context, a vocabulary that no text of that size has."""
    try:
        match spec.data:
            case TextData():
                return _text_problems(spec, spec.data)
            case TokensData():
                return _token_problems(spec, spec.data)
            case _:
                return []
    except (DataError, OSError) as error:
        return [SpecProblem("/data/path", "", str(error))]


def _text_problems(spec: JobSpec, data: TextData) -> list[SpecProblem]:
    needed = context_of(spec) + 1
    vocabulary = data.tokenizer.vocab if isinstance(data.tokenizer, BpeTokenizer) else 0
    num_bytes = 0
    for file in document_files(data.path):
        num_bytes += os.stat(file).st_size + 1  # a separator ends each document
        if num_bytes >= max(needed, vocabulary):
            return []
    if num_bytes < needed:
        message = f"holds {num_bytes:,} bytes, fewer than one context of {needed - 1:,} tokens and its target"
        return [SpecProblem("/data/path", shown(data.path), message)]
    if num_bytes < vocabulary - 257:
        message = f"is more than a text of {num_bytes:,} bytes can have; use at most {num_bytes + 257:,}"
        return [SpecProblem("/data/tokenizer/vocab", shown(vocabulary), message)]
    return []


def _token_problems(spec: JobSpec, data: TokensData) -> list[SpecProblem]:
    from workers.data.token_file import read_side_file

    side = read_side_file(Path(data.path))
    count = os.stat(data.path).st_size // ITEM_BYTES[side.dtype]
    needed = context_of(spec) + 1
    if count >= needed:
        return []
    message = f"holds {count:,} tokens, fewer than one context of {needed - 1:,} and its target"
    return [SpecProblem("/data/path", shown(data.path), message)]
