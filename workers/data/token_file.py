"""Token ids in a memory-mapped file with a side file that says how to read them. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.data.errors import DataError

DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
SIDE_SUFFIX = ".json"  # train.bin has its side file in train.bin.json


@dataclass(frozen=True)
class SideFile:
    """What stands beside a token file."""

    dtype: str  # of one id: uint16 | uint32, little-endian
    vocabulary: int  # every id is below it


@dataclass(frozen=True)
class TokenFile:
    """An open token file."""

    path: Path
    side: SideFile
    tokens: NDArray[Any]  # 1-D, of the side file's dtype, mapped read-only


def smallest_dtype(vocabulary: int) -> str:
    """uint16 where it holds every id, else uint32."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def write_tokens(path: Path, parts: Iterable[NDArray[np.uint32]], vocabulary: int) -> int:
    """Write ids part by part, then the side file. Returns their number."""
    side = SideFile(smallest_dtype(vocabulary), vocabulary)
    count = 0
    with open(path, "wb") as file:
        for part in parts:
            file.write(part.astype(np.dtype(DTYPES[side.dtype]).newbyteorder("<")).tobytes())
            count += len(part)
    Path(f"{path}{SIDE_SUFFIX}").write_text(json.dumps(asdict(side)) + "\n")
    return count


def read_side_file(path: Path) -> SideFile:
    """The side file of a token file. Raises DataError when it is missing or makes no sense."""
    side_path = Path(f"{path}{SIDE_SUFFIX}")
    example = '{"dtype": "uint16", "vocabulary": 50257}'
    try:
        data = json.loads(side_path.read_text())
        side = SideFile(data["dtype"], data["vocabulary"])
    except FileNotFoundError:
        raise DataError(f"{path} has no side file {side_path.name}; it holds, for example, {example}") from None
    except KeyError as error:
        raise DataError(f"{side_path} has no {error.args[0]}; it holds, for example, {example}") from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{side_path} cannot be read ({error}); it holds, for example, {example}") from error
    if side.dtype not in DTYPES or not isinstance(side.vocabulary, int) or not 1 <= side.vocabulary <= 2**32:
        raise DataError(f"{side_path} must name a dtype of uint16 or uint32 and a vocabulary, for example {example}")
    return side


def open_tokens(path: Path) -> TokenFile:
    """Map a token file. Raises DataError when it or its side file cannot be used."""
    side = read_side_file(path)
    dtype = np.dtype(DTYPES[side.dtype]).newbyteorder("<")
    try:
        num_bytes = os.stat(path).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if num_bytes % dtype.itemsize:
        raise DataError(f"{path} has {num_bytes} bytes, which is not a whole number of {side.dtype} ids")
    if not num_bytes:
        return TokenFile(path, side, np.empty(0, dtype))
    return TokenFile(path, side, np.memmap(path, dtype=dtype, mode="r"))


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
