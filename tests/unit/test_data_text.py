"""From text to tokens: which documents, which are held out, what is cached, what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import PATIENCE_SECONDS
from workers.data.batches import BatchShape, TokenBatches
from workers.data.documents import content_key, document_files, read_documents, split
from workers.data.errors import DataError
from workers.data.opening import open_data
from workers.data.text import prepare_text
from workers.data.token_file import open_tokens, write_tokens
from workers.data.tokenizer import vocabulary_in
from workers.spec import BpeTokenizer, CharTokenizer, JobSpec, TextData, load_spec

SCRIPTS = "Grüße, 世界! Привет — مرحبا 🙂\r\n\tconst x = 1;\n<|endoftext|> is text here\n"


def write_folder(folder: Path, documents: int = 40) -> Path:
    """Documents in several scripts, a hidden file, a binary one, an empty one and links."""
    (folder / "deep").mkdir(parents=True)
    for number in range(documents):
        place = folder if number % 2 else folder / "deep"
        (place / f"{number}.txt").write_text(SCRIPTS * 5 + f"document {number} of many\n" * 20)
    (folder / ".hidden.txt").write_text("secret")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "empty.txt").write_text("")
    (folder / "link.txt").symlink_to("/etc/hostname")
    return folder


def text_of(path: Path, vocab: int = 300) -> TextData:
    return TextData(kind="text", path=str(path), tokenizer=BpeTokenizer(kind="bpe", vocab=vocab))


def test_a_folder_gives_its_text_files_alone(tmp_path: Path) -> None:
    """Property: no hidden file, no link out of the folder, nothing binary; the order is that of the names."""
    files = document_files(str(write_folder(tmp_path / "texts")))
    names = [file.name for file in files]
    assert len(names) == 41 and not {".hidden.txt", "picture.png", "link.txt"} & set(names)
    assert files == document_files(str(tmp_path / "texts"))


def test_the_standard_library_is_read_without_its_tests() -> None:
    """Property: `stdlib` is the .py files of this Python, without `test` and site-packages."""
    files = document_files("stdlib")
    assert len(files) > 400 and all(file.suffix == ".py" for file in files)
    root = Path(os.path.commonpath(files))
    parts = {part for file in files for part in file.relative_to(root).parts[:-1]}
    assert not {"test", "site-packages", "__pycache__"} & parts


def test_documents_are_held_out_whole_and_by_content(tmp_path: Path) -> None:
    """Property: 5 % of the bytes in whole documents, none in both parts, the same whatever the files are called."""
    contents = read_documents(document_files(str(write_folder(tmp_path / "texts"))))
    parts = split(contents)
    assert not set(parts.train) & set(parts.validation)
    assert len(parts.train) + len(parts.validation) == len(contents) == 40
    share = sum(map(len, parts.validation)) / sum(len(text) for text in parts.train + parts.validation)
    assert 0.04 < share < 0.09
    assert split(list(reversed(contents))) == parts
    assert content_key(contents) == content_key(list(reversed(contents))) != content_key(contents[1:])


@pytest.mark.parametrize(
    ("content", "train", "validation"),
    [
        (b"line\n" * 100, "line\n" * 96, "line\n" * 4),
        (b"a\nb", "a\n", "b"),
        (b"one line without an end", "one line without an end", None),
        (b"one line\n", "one line\n", None),
    ],
)
def test_a_single_file_is_cut_at_a_line_end(content: bytes, train: str, validation: str | None) -> None:
    """Property: the last 5 % from the next line end on; nothing is held out where there is no such cut."""
    parts = split([content])
    assert (parts.train, parts.validation) == ([train], [] if validation is None else [validation])


def test_tokens_give_the_text_back(tmp_path: Path) -> None:
    """Property: every script, line end and control character survives; the separator's name in a text is text."""
    from tokenizers import Tokenizer

    prepared = prepare_text(text_of(write_folder(tmp_path / "texts")), tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer))
    separator = tokenizer.token_to_id("<|endoftext|>")
    ids = prepared.train.tokens.tolist() + prepared.validation.tokens.tolist()
    documents: list[list[int]] = [[]]
    for token in ids:
        if token == separator:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    texts = sorted(tokenizer.decode(document, skip_special_tokens=False) for document in documents)
    files = [file for file in document_files(str(tmp_path / "texts")) if file.stat().st_size]
    assert texts == sorted(file.read_bytes().decode() for file in files)


def test_bytes_need_no_training(tmp_path: Path) -> None:
    """Property: one token per byte, byte 0 between documents."""
    (tmp_path / "a.txt").write_text(SCRIPTS)
    spec = TextData(kind="text", path=str(tmp_path / "a.txt"), tokenizer=CharTokenizer(kind="bytes"))
    prepared = prepare_text(spec, tmp_path / "cache")
    found = prepared.train.tokens.astype(np.uint8).tobytes() + prepared.validation.tokens.astype(np.uint8).tobytes()
    assert found.replace(b"\0", b"") == SCRIPTS.encode()
    assert prepared.train.side.dtype == "uint16"


def test_a_prepared_text_is_found_again_by_content(tmp_path: Path) -> None:
    """Property: a second use does no work; renamed files give the same folder; changed ones another hash."""
    folder, said = write_folder(tmp_path / "texts"), list[str]()
    first = prepare_text(text_of(folder), tmp_path / "cache", said.append)
    again = prepare_text(text_of(folder), tmp_path / "cache", said.append)
    moved = prepare_text(text_of(folder.rename(tmp_path / "moved")), tmp_path / "cache", said.append)
    assert len(said) == 1
    assert first.content_hash == again.content_hash == moved.content_hash
    (tmp_path / "moved" / "1.txt").write_text("other words\n" * 50)
    changed = prepare_text(text_of(tmp_path / "moved"), tmp_path / "cache", said.append)
    assert len(said) == 2 and changed.content_hash != first.content_hash


def test_a_cache_that_lost_its_files_is_made_again(tmp_path: Path) -> None:
    """Property: a note about a folder that is gone is not believed."""
    import shutil

    folder = write_folder(tmp_path / "texts")
    first = prepare_text(text_of(folder), tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache" / "text")
    assert prepare_text(text_of(folder), tmp_path / "cache").content_hash == first.content_hash


def test_what_a_killed_process_left_is_removed_a_day_later(tmp_path: Path) -> None:
    """Property: an old draft goes when the next text is prepared, a fresh one may still be written to."""
    old, fresh = (tmp_path / "cache" / "text" / f".draft-{name}" for name in ("old", "fresh"))
    for draft in (old, fresh):
        draft.mkdir(parents=True)
    os.utime(old, (0, 0))
    prepare_text(text_of(write_folder(tmp_path / "texts")), tmp_path / "cache")
    assert not old.exists() and fresh.exists()


def prepare_and_tell(path: str, cache: str, said: Any) -> None:
    prepare_text(text_of(Path(path)), Path(cache), said.put)


def test_one_process_of_a_node_tokenizes(tmp_path: Path) -> None:
    """Property: of four processes that start together, one does the work and the others wait for it."""
    folder = write_folder(tmp_path / "texts")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    said = context.Queue()
    args = (str(folder), str(tmp_path / "cache"), said)
    processes = [context.Process(target=prepare_and_tell, args=args) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert said.get(timeout=PATIENCE_SECONDS).startswith("tokenizing") and said.empty()
    assert not list((tmp_path / "cache" / "text").glob(".draft*"))


def test_what_the_text_cannot_give_is_refused_by_field(tmp_path: Path) -> None:
    """Property: missing, empty, without text, too small for the vocabulary: each says so and what to do."""
    empty, nothing = tmp_path / "empty.txt", tmp_path / "nothing"
    empty.write_text(" \n")
    nothing.mkdir()
    small = tmp_path / "small.txt"
    small.write_text("a few words\n" * 3)
    for path, words in ((tmp_path / "x", "does not exist"), (empty, "no text"), (nothing, "no text file")):
        with pytest.raises(DataError, match=words):
            prepare_text(text_of(path), tmp_path / "cache")
    with pytest.raises(DataError, match=r"data\.tokenizer\.vocab is 4096, but this text has only"):
        prepare_text(text_of(small, vocab=4096), tmp_path / "cache")


def spec_for(data: str, context: int = 8, micro_batch: int = 2) -> JobSpec:
    text = f"name: x\nmodel: {{kind: gpt, context: {context}}}\ndata: {data}\n"
    return load_spec(text + f"train: {{steps: 3, global_batch: {2 * micro_batch}, micro_batch: {micro_batch}}}\n")


def token_file(folder: Path, count: int, vocabulary: int = 1000, name: str = "train.bin") -> Path:
    path = folder / name
    write_tokens(path, [np.arange(count, dtype=np.uint32) % vocabulary], vocabulary)
    return path


def test_targets_are_the_inputs_one_place_further(tmp_path: Path) -> None:
    """Property: each row is a run of the file, and its targets are the ids that follow."""
    data = open_data(spec_for(f"{{kind: tokens, path: {token_file(tmp_path, 500)}}}"), tmp_path / "cache")
    inputs, targets = data.micro_batch(3, 1)
    assert inputs.shape == targets.shape == (2, 8) and inputs.dtype.is_signed
    assert (inputs[:, 1:] == targets[:, :-1]).all() and (targets == inputs + 1).all()
    again = data.micro_batch(3, 1)
    assert (again.inputs == inputs).all()
    assert (data.validation_batch(0).inputs >= 475).all()  # the last 5 %, never trained on


def test_micro_batches_of_a_pass_share_no_sample(tmp_path: Path) -> None:
    """Property: the order depends on the step and the number alone, and inside a pass nothing comes twice."""
    data = open_data(spec_for(f"{{kind: tokens, path: {token_file(tmp_path, 801)}}}"), tmp_path / "cache")
    assert isinstance(data, TokenBatches)
    starts = [int(row[0]) for step in range(25) for index in (0, 1) for row in data.micro_batch(step, index).inputs]
    first_pass = starts[: data.num_samples]
    assert len(set(first_pass)) == data.num_samples == 95


def test_validation_shorter_than_one_context_turns_evaluation_off(tmp_path: Path) -> None:
    """Property: no validation batch, no error; fewer samples than a micro-batch are one batch."""
    short = open_data(spec_for(f"{{kind: tokens, path: {token_file(tmp_path, 100)}}}"), tmp_path / "cache")
    assert short.validation_batches == 0
    one = token_file(tmp_path, 10, name="validation.bin")
    spec = spec_for(f"{{kind: tokens, path: {token_file(tmp_path, 200)}, validation: {one}}}", micro_batch=4)
    data = open_data(spec, tmp_path / "cache")
    assert (data.validation_batches, data.validation_batch(0).inputs.shape) == (1, (1, 8))


def test_a_token_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Property: no side file, a wrong one, half an id, an id outside the vocabulary, too short: each is named."""
    cache = tmp_path / "cache"

    def refusal(path: Path) -> str:
        with pytest.raises(DataError) as caught:
            open_data(spec_for(f"{{kind: tokens, path: {path}}}"), cache).micro_batch(0, 0)
        return str(caught.value)

    path = token_file(tmp_path, 100)
    side = Path(f"{path}.json")
    assert "fewer than one context" in refusal(token_file(tmp_path, 8, name="short.bin"))
    side.write_text(json.dumps({"dtype": "uint16", "vocabulary": 5}))
    assert "holds token id" in refusal(path)
    path.write_bytes(path.read_bytes() + b"x")
    assert "whole number of uint16" in refusal(path)
    side.write_text('{"dtype": "float32", "vocabulary": 5}')
    assert "uint16 or uint32" in refusal(path)
    side.write_text("{")
    assert "cannot be read" in refusal(path)
    side.unlink()
    assert "no side file train.bin.json" in refusal(path)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    """Property: uint16 holds ids up to 65,535; from 65,537 tokens on the file has uint32."""
    assert open_tokens(token_file(tmp_path, 10, 2**16, "a")).side.dtype == "uint16"
    wide = tmp_path / "b"
    write_tokens(wide, [np.array([70_000], dtype=np.uint32)], 2**17)
    assert (open_tokens(wide).side.dtype, open_tokens(wide).tokens.tolist()) == ("uint32", [70_000])


def test_the_hash_of_token_files_follows_their_content(tmp_path: Path) -> None:
    """Property: a resume can tell other data from the same data under another name."""
    spec = spec_for(f"{{kind: tokens, path: {token_file(tmp_path, 500)}}}")
    first = open_data(spec, tmp_path / "cache").content_hash
    assert open_data(spec, tmp_path / "cache").content_hash == first
    token_file(tmp_path, 500, 999)
    assert open_data(spec, tmp_path / "cache").content_hash != first


def test_digits_are_split_and_scaled() -> None:
    """Property: 1797 images, every tenth held out, pixels 0 to 1, classes 0 to 9; no scikit-learn import."""
    import subprocess
    import sys

    program = (
        "import sys; from workers.data.digits import load_digits; d = load_digits();"
        "print(d.images.shape, d.images.min(), d.images.max(), sorted(set(d.labels.tolist())) == list(range(10)),"
        "'sklearn' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["(1797,", "64)", "0.0", "1.0", "True", "False"]
    spec = load_spec("name: x\nmodel: {kind: mlp}\ndata: {kind: digits}\ntrain: {steps: 1}\n")
    data = open_data(spec, Path("/nonexistent"))
    assert (data.inputs, data.outputs, data.validation_batches) == (64, 10, 179 // 4)
    assert data.micro_batch(0, 0).inputs.shape == (4, 64)


def test_a_shape_counts_samples_across_steps() -> None:
    """Property: sample numbers of micro-batches follow each other without gap, whatever the ranks."""
    shape = BatchShape(seed=1, micro_batches=3, micro_batch=5)
    firsts = [shape.first_sample(step, index) for step in range(3) for index in range(3)]
    assert firsts == list(range(0, 45, 5))


def test_a_file_that_is_no_tokenizer_is_named_at_its_own_field(tmp_path: Path) -> None:
    """An error of the API points at data.tokenizer.path then, not at the text's."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError) as refused:
        vocabulary_in(str(tmp_path / "tokenizer.json"))
    assert refused.value.pointer == "/data/tokenizer/path"
