"""The kinds of models and data that a job spec may name; `kind` tells them apart. A new kind is a class here."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from workers.spec.part import Fraction, SpecModel, wrong

Width = Annotated[int, Field(ge=1, le=2**20)]
OUR_PACKAGES = frozenset({"server", "workers", "zero_engine"})


class GptModel(SpecModel):
    """GPT-2 shaped: learned positions, LayerNorm 1e-5, biases, erf GELU. The vocabulary comes from the data."""

    kind: Literal["gpt"]
    layers: Annotated[int, Field(ge=1, le=10_000, description="transformer blocks")] = 6
    hidden: Annotated[int, Field(ge=1, le=2**20, description="width of the residual stream; a multiple of `heads`")] = (
        256
    )
    heads: Annotated[int, Field(ge=1, le=2**20, description="attention heads")] = 8
    context: Annotated[int, Field(ge=2, le=2**20, description="tokens per sequence")] = 256
    dropout: Annotated[Fraction, Field(description="probability, in embedding, attention and residual branches")] = 0.0
    tied: Annotated[bool, Field(description="the output projection shares the token embedding")] = True
    start: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None, description="folder with the first weights, as `shardyard export --format transformers` writes it"
    )

    @model_validator(mode="after")
    def heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads:
            divisors = [h for h in range(1, self.hidden + 1) if self.hidden % h == 0]
            best = min(divisors, key=lambda h: abs(h - self.heads))
            raise wrong(
                "/model/heads",
                f"hidden {self.hidden} is not divisible by heads {self.heads}; the nearest valid heads is {best}",
            )
        return self


class MlpModel(SpecModel):
    """A multi-layer perceptron with ReLU between linear layers; input and output width come from the data."""

    kind: Literal["mlp"]
    hidden: Annotated[
        list[Width], Field(min_length=1, max_length=1000, description="widths of the hidden layers, input side first")
    ] = [128, 64, 32]


def _is_entry(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise PydanticCustomError("entry", "must have the form module:function, for example my_model:build")
    return value


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    open_values: list[Any] = [value]
    while open_values:
        each = open_values.pop()
        if isinstance(each, float) and not math.isfinite(each):
            raise PydanticCustomError("finite_number", "every number in it must be finite")
        open_values += each.values() if isinstance(each, dict) else each if isinstance(each, list) else []
    return value


class PythonModel(SpecModel):
    """The user's own nn.Module, imported in rank processes only."""

    kind: Literal["python"]
    entry: Annotated[
        str, AfterValidator(_is_entry), Field(max_length=500, description="module:function that returns an nn.Module")
    ]
    path: Annotated[str, Field(min_length=1, max_length=4096, description="folder that holds the module")]
    kwargs: Annotated[dict[str, Any], AfterValidator(_finite), Field(description="passed to the function")] = {}

    @model_validator(mode="after")
    def entry_is_not_ours(self) -> Self:
        package = self.entry.partition(":")[0].partition(".")[0]
        if package in OUR_PACKAGES:
            raise wrong("/model/entry", f"the name {package} belongs to Shardyard itself; rename your package")
        return self


class CharTokenizer(SpecModel):
    """One token per byte: needs no training; vocabulary 256."""

    kind: Literal["bytes"]


class BpeTokenizer(SpecModel):
    """Byte-level BPE trained on the text itself."""

    kind: Literal["bpe"]
    vocab: Annotated[int, Field(ge=257, le=2**20, description="tokens, the 256 bytes among them")] = 4096


class FileTokenizer(SpecModel):
    """A tokenizer that is there already, as `tokenizers` writes it."""

    kind: Literal["file"]
    path: Annotated[str, Field(min_length=1, max_length=4096, description="tokenizer.json")]


class TextData(SpecModel):
    """Text: `stdlib` (the running Python's standard library), a text file, or a folder of text files."""

    kind: Literal["text"]
    path: Annotated[str, Field(min_length=1, max_length=4096, description="`stdlib`, a file or a folder")] = "stdlib"
    tokenizer: Annotated[BpeTokenizer | CharTokenizer | FileTokenizer, Field(discriminator="kind")] = BpeTokenizer(
        kind="bpe"
    )


class TokensData(SpecModel):
    """Token ids in a memory-mapped file; its dtype and vocabulary stand in a side file."""

    kind: Literal["tokens"]
    path: Annotated[
        str, Field(min_length=1, max_length=4096, description="file of token ids; its side file is PATH.json")
    ]
    validation: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None, description="a second file; without it the last 5 % of the first are held out"
    )


class DigitsData(SpecModel):
    """scikit-learn's bundled 8x8 images of digits: 64 inputs, 10 classes."""

    kind: Literal["digits"]


ModelSpec = Annotated[GptModel | MlpModel | PythonModel, Field(discriminator="kind")]
DataSpec = Annotated[TextData | TokensData | DigitsData, Field(discriminator="kind")]
