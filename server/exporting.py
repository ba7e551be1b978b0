"""A checkpoint as a folder of files that others read, streamed as one tar of known length. No torch.

`folder` has our canonical names; `transformers` is a GPT-2 that the library of that name loads.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from server.errors import ApiError
from workers.planner import vocabulary_of
from workers.spec import GptModel, JobSpec
from workers.transformers_folder import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    config_of,
    library_name,
    tokenizer_files,
)
from zero_engine.export import Export
from zero_engine.manifest import Manifest
from zero_engine.store import NotFound, Store

Format = Literal["safetensors", "folder", "transformers"]
Dtype = Literal["fp32", "bf16", "fp16"]
END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Archive:
    """A tar that is ready to be streamed: the small files, then the weights."""

    files: dict[str, bytes]
    weights: Export

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the whole tar."""
        sizes = [*((name, len(data)) for name, data in self.files.items()), (WEIGHTS_FILE, self.weights.num_bytes)]
        return sum(len(_head(name, size)) + size + _padding(size) for name, size in sizes) + len(END)

    def pieces(self) -> Iterator[bytes]:
        """The tar from its first byte to its last. Raises CheckpointError when a block is damaged."""
        for name, data in self.files.items():
            yield _head(name, len(data)) + data + bytes(_padding(len(data)))
        yield _head(WEIGHTS_FILE, self.weights.num_bytes)
        yield from self.weights.pieces()
        yield bytes(_padding(self.weights.num_bytes)) + END


def archive(store: Store, manifest: Manifest, spec: JobSpec, kind: Format, dtype: Dtype | None) -> Archive:
    """The folder of a checkpoint. Raises ApiError 422 when the model is none that `transformers` knows, StoreError."""
    stored = _tokenizer(store, manifest)
    if kind == "transformers":
        return _for_transformers(store, manifest, spec, dtype, stored)
    files = {CONFIG_FILE: _config(manifest, spec, dtype)}
    if stored is not None:
        files[TOKENIZER_FILE] = stored
    return Archive(files, Export(store, manifest, dtype))


def _for_transformers(
    store: Store, manifest: Manifest, spec: JobSpec, dtype: Dtype | None, stored: bytes | None
) -> Archive:
    if not isinstance(spec.model, GptModel):
        kind = spec.model.kind
        message = f"Only a gpt becomes a folder for transformers; this job's model is {kind}. Use format=folder."
        raise ApiError(422, message, code="export_refused")
    tokenizer, separator = ({}, 0) if stored is None else tokenizer_files(stored, spec.model.context)
    config = config_of(spec.model, vocabulary_of(spec), separator, dtype)
    return Archive({CONFIG_FILE: config, **tokenizer}, Export(store, manifest, dtype, library_name))


def _tokenizer(store: Store, manifest: Manifest) -> bytes | None:
    try:
        return store.get(f"{manifest.folder}/{TOKENIZER_FILE}")
    except NotFound:
        return None


def _config(manifest: Manifest, spec: JobSpec, dtype: Dtype | None) -> bytes:
    """What the weights are of, for people and programs of ours."""
    config: dict[str, Any] = {
        "format": "shardyard-export",
        "version": 1,
        "step": manifest.step,
        "digest": manifest.digest,
        "dtype": dtype,
        "model": spec.model.model_dump(mode="json"),
        "data": spec.data.model_dump(mode="json"),
    }
    return json.dumps(config, ensure_ascii=False, indent=1).encode() + b"\n"


def _head(name: str, size: int) -> bytes:
    """The header of one file: the same bytes for the same checkpoint, so no time and no owner."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE
