"""A `gpt` as a folder that the `transformers` library loads, and such a folder as the beginning of a job. Torch-free.

Our model is GPT-2 with erf GELU (`activation_function: "gelu"`), and its projections keep weights as (inputs, outputs),
which is what the library's Conv1D keeps; so names change and no number does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.spec.kinds import GptModel

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
INNER = "transformer."  # the library's name of the model inside GPT2LMHeadModel
HEAD = "lm_head.weight"
END_OF_TEXT = "<|endoftext|>"
GELUS = ("gelu",)  # names of the erf form
IGNORED = (".attn.bias", ".attn.masked_bias")  # buffers that older files carry
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class FolderError(Exception):
    """A folder is no such model; the text says which part and why."""


@dataclass(frozen=True)
class ModelFolder:
    """What a folder says of its model."""

    path: Path
    layers: int
    hidden: int
    heads: int
    context: int
    vocabulary: int
    tied: bool
    dropout: float

    @property
    def weights(self) -> Path:
        """The file of the tensors."""
        return self.path / WEIGHTS_FILE

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's file, if the folder has one."""
        file = self.path / TOKENIZER_FILE
        return file if file.is_file() else None

    def fields(self) -> dict[str, Any]:
        """The `model` part of a spec that begins with this folder."""
        shape = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "context", "tied", "dropout")}
        return {"kind": "gpt", **shape, "start": str(self.path)}


def library_name(name: str) -> str:
    """The library's name of one of our parameters."""
    return name if name == HEAD else INNER + name


def own_name(name: str) -> str:
    """Our name of one of the library's parameters."""
    return name.removeprefix(INNER)


def read_folder(path: Path) -> ModelFolder:
    """What config.json says. Raises FolderError when it is no GPT-2 that our `gpt` computes alike."""
    try:
        config = json.loads((path / CONFIG_FILE).read_text())
    except OSError as error:
        raise FolderError(f"{path / CONFIG_FILE} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FolderError(f"{path / CONFIG_FILE} is no JSON: {error}") from error
    if not isinstance(config, dict) or config.get("model_type") != "gpt2":
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise FolderError(f"{path} holds a model of type {kind!r}; only gpt2 can begin a gpt")
    _check(config, path)
    try:
        return ModelFolder(
            path=path.absolute(),
            layers=int(config["n_layer"]),
            hidden=int(config["n_embd"]),
            heads=int(config["n_head"]),
            context=int(config["n_positions"]),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", True)),
            dropout=float(config.get("resid_pdrop", 0.0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FolderError(f"{path / CONFIG_FILE} lacks {error}") from error


def _check(config: Mapping[str, Any], path: Path) -> None:
    """Settings under which our model computes something else."""
    inner = config.get("n_inner")
    wrong = {
        "activation_function": config.get("activation_function", "gelu_new") not in GELUS,
        "layer_norm_epsilon": float(config.get("layer_norm_epsilon", 1e-5)) != 1e-5,
        "n_inner": inner is not None and inner != 4 * int(config.get("n_embd", 0)),
        "scale_attn_weights": not config.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": bool(config.get("scale_attn_by_inverse_layer_idx", False)),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise FolderError(f"{path / CONFIG_FILE}: {name} is {config.get(name)!r}, which our gpt does not compute")


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Our name and the shape of each tensor of a weights file. Raises FolderError."""
    from zero_engine.tensorfile import NotATensorFile, decode_header, header_bytes

    try:
        with open(file, "rb") as stream:
            first = stream.read(8)
            entries, _ = decode_header(first + stream.read(header_bytes(first) - 8))
    except OSError as error:
        raise FolderError(f"{file} cannot be read: {error.strerror}") from error
    except NotATensorFile as error:
        raise FolderError(f"{file} is no safetensors file: {error}") from error
    kept = [entry for entry in entries if not entry.name.endswith(IGNORED)]
    return {own_name(entry.name): entry.shape for entry in kept}


def misfit(model: GptModel, vocabulary: int, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The first parameter of the spec's model that the file does not have in its shape, in words; None: all fit."""
    from workers.shapes import gpt_parameters

    for parameter in gpt_parameters(model, vocabulary):
        shape = shapes.get(parameter.name)
        if shape is None:
            return f"the file has no {parameter.name}"
        if shape != parameter.shape:
            return f"{parameter.name} is {list(shape)} in the file, {list(parameter.shape)} by the spec"
    return None


def config_of(model: GptModel, vocabulary: int, separator: int, dtype: str | None) -> bytes:
    """config.json of an export."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_positions": model.context,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "tie_word_embeddings": model.tied,
        "bos_token_id": separator,
        "eos_token_id": separator,
        "dtype": TORCH_DTYPES[dtype or "fp32"],
    }
    return _json(config)


def tokenizer_files(stored: bytes, context: int) -> tuple[dict[str, bytes], int]:
    """The tokenizer's files for the library, and the id that ends a document."""
    data = json.loads(stored)
    if data.get("type") == "bytes":
        data, end, separator = _byte_tokenizer(), None, 0
    else:
        special = {item["content"]: int(item["id"]) for item in data.get("added_tokens", [])}
        end, separator = (END_OF_TEXT, special[END_OF_TEXT]) if END_OF_TEXT in special else (None, 0)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    config |= {} if end is None else {"eos_token": end, "bos_token": end}
    config["clean_up_tokenization_spaces"] = False
    return {TOKENIZER_FILE: _json(data), TOKENIZER_CONFIG_FILE: _json(config)}, separator


def _byte_tokenizer() -> dict[str, Any]:
    """One token per byte, as `tokenizers` writes it: byte-level BPE without a merge."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": []}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }


def byte_characters() -> Sequence[str]:
    """The character that byte-level BPE writes for each byte (Radford et al. 2019); printable ones stay as they are."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, indent=1).encode() + b"\n"
