"""Exports that `transformers` loads, and folders that a job begins with."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from server.cli.errors import BadInput
from server.cli.fork_commands import with_folder
from server.errors import ApiError
from server.exporting import Archive, archive
from tests.unit.checkpoint_by_hand import ByHand
from workers.build import build_model
from workers.data.tokenizer import tokenizer_for
from workers.planner import parameters_of
from workers.spec import BpeTokenizer, CharTokenizer, JobSpec, path_problems
from workers.transformers_folder import read_folder
from zero_engine.export import Export
from zero_engine.layout import Layout
from zero_engine.manifest import Manifest
from zero_engine.shard import Source
from zero_engine.store import LocalStore

TEXT = "def f(x):\n    return '世界 🙂' + x  # naïve\n" * 40
CONTEXT = 16


def spec_of(folder: Path, tied: bool = True, **tokenizer: Any) -> JobSpec:
    """A gpt on a small text below `folder`."""
    text = folder / "text.txt"
    text.write_text(TEXT)
    shape = {"layers": 2, "hidden": 24, "heads": 3, "context": CONTEXT, "tied": tied}
    data = {"kind": "text", "path": str(text), "tokenizer": tokenizer or {"kind": "bpe", "vocab": 280}}
    return JobSpec.model_validate(
        {"name": "gpt", "model": {"kind": "gpt", **shape}, "data": data, "train": {"steps": 5}}
    )


@dataclass(frozen=True)
class Vocabulary:
    """The part of the data that building a model needs."""

    inputs: int
    outputs: int = 0


def model_of(spec: JobSpec, vocabulary: int) -> nn.Module:
    return build_model(spec, Vocabulary(vocabulary)).eval()  # type: ignore[arg-type]


@dataclass(frozen=True)
class OfModel(ByHand):
    """A checkpoint of a model's weights; the moments are what ByHand makes."""

    model: nn.Module = field(default_factory=nn.Module)

    def sources(self, rank: int) -> list[Source]:
        flat = torch.zeros(self.layout.padded)
        parameters = dict(self.model.named_parameters())
        for place in self.layout.canonical_entries:
            flat[place.start : place.start + place.spec.numel] = parameters[place.spec.name].detach().flatten()
        sources = []
        for source in super().sources(rank):
            start, stop = source.first * self.layout.block, source.first * self.layout.block + len(source.data) // 4
            data = memoryview(bytearray(flat[start:stop].numpy().tobytes()))
            weights = source.kind == "master"
            sources.append(Source(source.kind, "F32", source.first, source.block_bytes, data) if weights else source)
        return sources


def saved(folder: Path, spec: JobSpec, vocabulary: int) -> tuple[nn.Module, LocalStore, Manifest]:
    """The model of a spec with weights that are far from zero, its checkpoint, and its tokenizer beside the shards."""
    model = model_of(spec, vocabulary)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0).add_(0.01)
    store = LocalStore(folder / "store")
    made = OfModel(store, layout=Layout.build(parameters_of(spec)), model=model)
    assert not isinstance(spec.data.kind, int) and spec.data.kind == "text"
    tokenizer_for(spec.data.tokenizer, [TEXT]).save(folder / "tokenizer.json")
    store.put(f"{made.folder}/tokenizer.json", (folder / "tokenizer.json").read_bytes())
    return model, store, made.publish()


def unpacked(made: Archive, folder: Path) -> Path:
    """The folder in a tar, whose length was announced."""
    data = b"".join(made.pieces())
    assert len(data) == made.num_bytes
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_same_logits(tmp_path: Path, tied: bool) -> None:
    """Every weight lands where it belongs, tied or not; ids of the text included."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = spec_of(tmp_path, tied)
    ours, store, manifest = saved(tmp_path, spec, 280)
    folder = unpacked(archive(store, manifest, spec, "transformers", None), tmp_path / "export")
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"][:CONTEXT]])
    with torch.no_grad():
        expected, found = ours(ids), theirs(ids).logits
    assert expected.abs().max() > 1.0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (theirs.lm_head.weight is theirs.transformer.wte.weight) == tied


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_the_exported_tokenizer_gives_the_ids_of_training_and_the_text_back(tmp_path: Path, kind: str) -> None:
    """Both kinds; any script; the end of a document is the token that separated them."""
    from transformers import AutoTokenizer

    chosen = BpeTokenizer(kind="bpe", vocab=280) if kind == "bpe" else CharTokenizer(kind="bytes")
    vocabulary = 280 if kind == "bpe" else 256
    spec = spec_of(tmp_path, True, **chosen.model_dump())
    _, store, manifest = saved(tmp_path, spec, vocabulary)
    folder = unpacked(archive(store, manifest, spec, "transformers", "bf16"), tmp_path / "export")
    theirs = AutoTokenizer.from_pretrained(folder)
    (ours,) = tokenizer_for(chosen, [TEXT]).encode([TEXT])
    ids = theirs(TEXT)["input_ids"]
    assert ids == ours[:-1].tolist() and theirs.decode(ids) == TEXT
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == ours[-1]


def test_a_job_begins_with_the_weights_and_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    """Bit for bit what was exported; the spec's model is what config.json says, and its ids are those of the folder."""
    spec = spec_of(tmp_path)
    ours, store, manifest = saved(tmp_path, spec, 280)
    folder = unpacked(archive(store, manifest, spec, "transformers", None), tmp_path / "export")
    tokenizer = {"kind": "file", "path": str(folder / "tokenizer.json")}
    begun = spec_of(tmp_path, True, **tokenizer)
    begun = begun.model_copy(update={"model": begun.model.model_validate(read_folder(folder).fields())})
    assert path_problems(begun, [tmp_path]) == []
    assert with_folder(spec.model_dump(mode="json"), folder) == begun.model_dump(mode="json")
    with pytest.raises(BadInput, match="cannot be read"):
        with_folder(spec.model_dump(mode="json"), tmp_path)
    again = model_of(begun, 280)
    for name, parameter in ours.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter), name
    assert tokenizer_for(begun.data.tokenizer, []).vocabulary == 280  # type: ignore[union-attr]


def test_a_folder_that_does_not_fit_is_refused_by_field_before_anything_starts(tmp_path: Path) -> None:
    """Another width, another vocabulary, another activation, weights that are no file: each says what is wrong."""
    spec = spec_of(tmp_path)
    _, store, manifest = saved(tmp_path, spec, 280)
    folder = unpacked(archive(store, manifest, spec, "transformers", None), tmp_path / "export")
    fields = read_folder(folder).fields()

    def refusal(**changes: Any) -> str:
        model = spec.model.model_validate({**fields, **changes})
        (problem,) = path_problems(spec.model_copy(update={"model": model}), [tmp_path])
        assert problem.pointer == "/model/start"
        return problem.message

    assert "use 2" in refusal(layers=3)
    assert "use 24" in refusal(hidden=48)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "activation_function": "gelu_new"}))
    assert "activation_function is 'gelu_new'" in refusal()
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert "only gpt2" in refusal()
    (folder / "config.json").write_text(json.dumps(config))
    larger = spec_of(tmp_path, True, kind="bpe", vocab=300)
    model = spec.model.model_validate(fields)
    (problem,) = path_problems(larger.model_copy(update={"model": model}), [tmp_path])
    assert "wte.weight is [280, 24] in the file, [300, 24] by the spec" in problem.message
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "no safetensors file" in refusal()


def test_a_plain_folder_has_canonical_names_tied_weights_once_and_the_tokenizer(tmp_path: Path) -> None:
    """For programs of ours; a model that the library does not know is refused for it by name."""
    spec = spec_of(tmp_path)
    _, store, manifest = saved(tmp_path, spec, 280)
    made = archive(store, manifest, spec, "folder", None)
    folder = unpacked(made, tmp_path / "export")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert json.loads((folder / "config.json").read_text())["model"]["hidden"] == 24
    assert isinstance(made.weights, Export)
    names = [entry.name for entry in made.weights.entries]
    assert "wte.weight" in names and "lm_head.weight" not in names
    mlp = JobSpec.model_validate(
        {"name": "m", "model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 1}}
    )
    with pytest.raises(ApiError, match="Only a gpt"):
        archive(store, manifest, mlp, "transformers", None)
