"""What a spec text becomes, and what a person is told about one that is wrong."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.spec import (
    JobSpec,
    SpecError,
    SpecProblem,
    SpecTooLarge,
    load_spec,
    parse_spec,
    path_problems,
    read_spec_file,
)

SHORT = """\
name: 日本語 🙂
model: {kind: gpt}
data: {kind: text}
train:
  steps: 3
"""


def refusal(text: str) -> tuple[SpecProblem, ...]:
    with pytest.raises(SpecError) as caught:
        load_spec(text)
    return caught.value.problems


def with_train(**fields: Any) -> str:
    return SHORT + "".join(f"  {name}: {json.dumps(value)}\n" for name, value in fields.items())


def test_the_shortest_useful_spec_has_five_lines_and_the_designs_defaults() -> None:
    """Property: the defaults of design section 4, V = 4 and C = 2 among them."""
    spec = load_spec(SHORT)
    assert len(SHORT.splitlines()) == 5
    assert (spec.name, spec.train.micro_batches, spec.chunk, spec.zero.stage) == ("日本語 🙂", 4, 2, "auto")
    assert spec.model.model_dump() == {
        "kind": "gpt",
        "layers": 6,
        "hidden": 256,
        "heads": 8,
        "context": 256,
        "dropout": 0.0,
        "tied": True,
        "start": None,
    }
    assert spec.checkpoint.model_dump() == {
        "every": 50,
        "keep_latest": 2,
        "keep_best": 0,
        "keep_every": 0,
        "when_busy": "wait",
        "when_failed": "continue",
    }
    assert spec.restart.model_dump() == {"user_failures": 0, "infrastructure_failures": 10}


def test_json_and_yaml_say_the_same() -> None:
    """Property: a spec written out as JSON reads back as itself."""
    spec = load_spec(SHORT)
    assert load_spec(spec.model_dump_json()) == spec
    assert parse_spec(json.loads(spec.model_dump_json())) == spec


def test_json_as_other_programs_write_it_is_read() -> None:
    """Property: escaped pairs, tabs, a byte order mark, a delete character: what is JSON is a spec."""
    data = json.loads(load_spec(SHORT).model_dump_json()) | {"name": "🙂\x7f/é"}
    assert load_spec(json.dumps(data)).name == data["name"]
    for text in (json.dumps(data, indent="\t"), json.dumps(data, ensure_ascii=False).replace("/", "\\/")):
        assert load_spec(text).name == load_spec(b"\xef\xbb\xbf" + text.encode()).name == data["name"]
    assert load_spec(SHORT.replace("\n", "\r\n")) == load_spec("\ufeff---\n" + SHORT) == load_spec(SHORT)


def test_a_mistake_in_json_has_its_line_too() -> None:
    """Property: the place of a field is found in indented JSON with escaped pairs, and of a field that stands twice."""
    text = json.dumps(json.loads(load_spec(SHORT).model_dump_json()) | {"name": "🙂"}, indent=2)
    (problem,) = refusal(text.replace('"seed"', '"sed"'))
    assert (problem.pointer, problem.suggestion) == ("/train/sed", "seed")
    assert text.replace('"seed"', '"sed"').splitlines()[(problem.line or 0) - 1].strip().startswith('"sed"')
    assert "stands twice" in refusal('{"name": "a", "name": "b"}')[0].message


def test_yaml_is_version_1_2() -> None:
    """Property: 1e-4 is a number, `no` is text, 0o17 is octal."""
    spec = load_spec(
        SHORT.replace("日本語 🙂", "no") + "  optimizer: {lr: 1e-4}\n  seed: 0o17\n  schedule: {kind: constant}\n"
    )
    assert (spec.name, spec.train.optimizer.lr, spec.train.seed) == ("no", 1e-4, 15)


@pytest.mark.parametrize(
    ("text", "pointer", "message", "suggestion", "line"),
    [
        (SHORT.replace("steps", "step"), "/train/step", "unknown field", "steps", 5),
        (SHORT + "  learing_rate: 1\n", "/train/learing_rate", "unknown field", "train.optimizer.lr", 6),
        (SHORT + "  optimizer: {learing_rate: 1}\n", "/train/optimizer/learing_rate", "unknown field", "lr", 6),
        (SHORT + "  optimizer: {kind: lions}\n", "/train/optimizer/kind", "one of adamw, adam, sgd, lion", "lion", 6),
        (
            SHORT + "  optimizer: {kind: lion, momentum: 0.9}\n",
            "/train/optimizer/momentum",
            'unknown field "momentum"; here stand kind, lr, betas, weight_decay',
            None,
            6,
        ),
        (SHORT + "  optimizer: {momentum: 0.9}\n", "/train/optimizer/momentum", "unknown field", None, 6),
        (
            SHORT + "  optimizer: {kind: sgd, momentum: 0, nesterov: true}\n",
            "/train/optimizer/nesterov",
            "set momentum",
            None,
            6,
        ),
        (SHORT + "  optimizer: sgd\n", "/train/optimizer", "must be a set of fields", None, 6),
        (SHORT + "stage: 2\n", "/stage", "unknown field", "zero.stage", 6),
        (SHORT + "zero: {ranks: 2}\n", "/zero/ranks", "unknown field", "resources.ranks", 6),
        (SHORT + "xyzzy: 2\n", "/xyzzy", "unknown field", None, 6),
        (SHORT.replace("日本語 🙂", "日" * 201), "/name", "must have at most 200 characters", None, 1),
        (SHORT.replace("gpt", "mlp, hidden: []"), "/model/hidden", "must have at least 1 item", None, 2),
        (
            SHORT + "  optimizer:\n    learning: 1\n    weight_deacy: 0\n",
            "/train/optimizer/weight_deacy",
            "unknown",
            "weight_decay",
            8,
        ),
        (SHORT.replace("gpt", "gtp"), "/model/kind", "must be one of gpt, mlp, python", "gpt", 2),
        (SHORT.replace("{kind: gpt}", "{layers: 2}"), "/model/kind", "required", None, 2),
        (SHORT.replace("{kind: gpt}", "gpt"), "/model", "must be a set of fields", None, 2),
        (
            SHORT.replace("kind: text", "kind: text, tokenizer: {kind: bpe, vocbab: 9}"),
            "/data/tokenizer/vocbab",
            "unknown",
            "vocab",
            3,
        ),
        (with_train(steps_=1), "/train/steps_", "unknown field", "steps", 6),
        (SHORT.replace("3", "'3'"), "/train/steps", "whole number", None, 5),
        (SHORT.replace("3", "0"), "/train/steps", "at least 1", None, 5),
        (SHORT.replace("3", "-1"), "/train/steps", "at least 1", None, 5),
        (SHORT.replace("3", "3.0"), "/train/steps", "whole number", None, 5),
        (SHORT.replace("3", "1e400"), "/train/steps", "number", None, 5),
        (SHORT.replace("3", "9" * 5000), "/train/steps", "too large", None, 5),
        (SHORT.replace("3", ""), "/train/steps", "whole number", None, 5),
        (SHORT + "  optimizer: {lr: .nan}\n", "/train/optimizer/lr", "finite", None, 6),
        (SHORT + "  optimizer: {lr: 1e400}\n", "/train/optimizer/lr", "finite", None, 6),
        (SHORT + "  optimizer: {betas: [0.9, 1.0]}\n", "/train/optimizer/betas/1", "less than 1", None, 6),
        (SHORT + "  optimizer: {lr: 1.0e-5}\n", "/train/schedule/min_lr", "at most 1e-05", None, 5),
        (SHORT + "  chunk: 1.5\n", "/train/chunk", "auto", None, 6),
        (SHORT + "zero: {stage: 4}\n", "/zero/stage", "must be auto, 0, 1, 2 or 3", None, 6),
        (SHORT + "zero: {stage: true}\n", "/zero/stage", "whole numbers", None, 6),
        (SHORT + "zero: {stage: atuo}\n", "/zero/stage", "must be auto", "auto", 6),
        (
            with_train(global_batch=18),
            "/train/global_batch",
            "18 is not divisible by micro_batch 4; the nearest valid global_batch is 16 or 20",
            None,
            6,
        ),
        (with_train(global_batch=3), "/train/global_batch", "the nearest valid global_batch is 4", None, 6),
        (SHORT + "resources: {ranks: 8}\n", "/resources/ranks", "ranks 8 is more than the 4 micro-batches", None, 6),
        (SHORT + "checkpoint: {keep_latest: 1}\n", "/checkpoint/keep_latest", "keep_latest 1 is below 2", None, 6),
        (
            SHORT.replace("gpt", "gpt, heads: 7"),
            "/model/heads",
            "hidden 256 is not divisible by heads 7; the nearest valid heads is 8",
            None,
            2,
        ),
        (SHORT.replace("gpt", "mlp"), "/data/kind", "model mlp cannot read data text", None, 3),
        (SHORT.replace("日本語 🙂", "'  '"), "/name", "blank", None, 1),
        (SHORT.replace("日本語 🙂", "''"), "/name", "blank", None, 1),
        (SHORT.replace("日本語 🙂", '"a\\0"'), "/name", "U+0000", None, 1),
        (SHORT.replace("日本語 🙂", '"\\uD800"'), "/name", "U+D800", None, 1),
        (SHORT + "name: again\n", "/name", "stands twice", None, 6),
        (SHORT + "zero: {offload: disk}\n", "/zero/offload", "none", None, 6),
        (
            with_train(eval={"every": 0}) + "checkpoint: {keep_best: 1}\n",
            "/checkpoint/keep_best",
            "eval.every",
            None,
            7,
        ),
        (
            SHORT.replace("{kind: gpt}", "{kind: python, entry: workers.x:build, path: /x}"),
            "/model/entry",
            "rename your package",
            None,
            2,
        ),
        (
            SHORT.replace("{kind: gpt}", "{kind: python, entry: my-model, path: /x}"),
            "/model/entry",
            "module:function",
            None,
            2,
        ),
        (
            SHORT.replace("{kind: gpt}", "{kind: python, entry: 'm:b', path: /x, kwargs: {a: [.inf]}}"),
            "/model/kwargs",
            "finite",
            None,
            2,
        ),
        ("name: [a\nmodel: x\n", "", "neither YAML nor JSON", None, 2),
        ("a: 1\n---\nb: 2\n", "", "second document", None, 2),
        ("<<: {a: 1}\n", "", "merge keys", None, 1),
        ("? [a]\n: 1\n", "", "field name must be text", None, 1),
        ("a: *b\n", "/a", "no anchor &b", None, 1),
        ("a\x01: 1\n", "", "neither YAML nor JSON", None, 1),
        ("- 1\n", "", "a set of fields", None, 1),
    ],
)
def test_a_mistake_is_named_at_its_field_and_line(
    text: str, pointer: str, message: str, suggestion: str | None, line: int
) -> None:
    """Property: pointer, sentence, nearest name and line, for every row of the table of bad input."""
    found = [problem for problem in refusal(text) if problem.pointer == pointer]
    assert found, refusal(text)
    assert message in found[0].message
    assert (found[0].suggestion, found[0].line) == (suggestion, line)


def test_every_mistake_is_reported_at_once() -> None:
    """Property: three wrong fields give three problems in one answer."""
    problems = refusal(SHORT.replace("gpt", "gpt, layer: 3") + "  seed: -1\nzero: {stage: 9}\n")
    assert {problem.pointer for problem in problems} == {"/model/layer", "/train/seed", "/zero/stage"}


def test_an_empty_text_is_refused() -> None:
    """Property: nothing at all is not a spec."""
    assert "a set of fields" in refusal("")[0].message


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1000,
        '{"a":' * 1000 + "1" + "}" * 1000,
        "\n".join(" " * depth + "a:" for depth in range(1000)),
        "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)),
        "a:\n" + "".join(f" k{i}: {i}\n" for i in range(80_000)),
        "a: [" + "1," * 500_000 + "1]",
    ],
    ids=["lists", "objects", "blocks", "aliases", "keys", "items"],
)
def test_a_text_built_to_hurt_is_refused_while_it_is_read(text: str) -> None:
    """Property: depth, aliases and the number of values are bounded, and the work too (in CPU seconds)."""
    before = time.process_time()
    assert refusal(text)
    assert time.process_time() - before < 20


def test_a_text_above_one_mebibyte_is_too_large() -> None:
    """Property: size is refused before anything is parsed, in characters of several bytes too."""
    with pytest.raises(SpecTooLarge):
        load_spec("x" * (2**20 + 1))
    with pytest.raises(SpecTooLarge):
        load_spec("é" * (2**19 + 1))
    with pytest.raises(SpecTooLarge):
        load_spec(b"\xff" * (2**20 + 1))
    assert "not UTF-8" in refusal_of_bytes(b"\xff")


def refusal_of_bytes(text: bytes) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(text)
    return caught.value.problems[0].message


def test_values_that_came_as_json_meet_the_same_limits() -> None:
    """Property: `parse_spec` refuses depth, NUL, NaN and names that are not text as `load_spec` does."""
    deep: Any = 1
    for _ in range(1000):
        deep = [deep]
    good = json.loads(load_spec(SHORT).model_dump_json())
    for bad in (
        {"name": deep},
        {"name": "a\0"},
        {1: 2},
        good | {"stop_grace_seconds": math.nan},
        good | {"priority": math.inf},
    ):
        with pytest.raises(SpecError):
            parse_spec(bad)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from([*JobSpec.model_fields, "nmae"]), VALUES))
def test_no_values_at_all_raise_anything_but_a_spec_error(data: dict[str, Any]) -> None:
    """Property: whatever stands in the fields, the answer is a spec or a list of problems that can be shown as JSON."""
    try:
        parse_spec(data)
    except SpecError as error:
        assert error.problems
        for problem in error.problems:
            json.dumps([problem.pointer, problem.value, problem.message], allow_nan=False)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.text(max_size=60))
def test_no_text_at_all_raises_anything_but_a_spec_error(text: str) -> None:
    """Property: any text is a spec or is refused with problems."""
    with pytest.raises(SpecError):
        load_spec(text)


def test_overrides_are_applied_and_an_auto_chunk_keeps_the_files_ranks(tmp_path: Path) -> None:
    """Property: C divides by the ranks of the file, whatever --ranks says; an explicit chunk wins."""
    file = tmp_path / "spec.yaml"
    file.write_text(SHORT + "resources: {ranks: 2}\n")
    assert read_spec_file(file).chunk == 2
    assert read_spec_file(file, ["resources.ranks=4"]).chunk == 2
    assert read_spec_file(file, ["resources.ranks=1", "train.global_batch=32"]).chunk == 4
    assert read_spec_file(file, ["resources.ranks=4", "train.chunk=1"]).chunk == 1
    spec = read_spec_file(file, ["zero.stage=3", "name=x y", "train.schedule={kind: constant}"])
    assert (spec.zero.stage, spec.name, spec.train.schedule.kind) == (3, "x y", "constant")
    for wrong in ("zero.stage", "=3", "zero..stage=3", "zero.sage=3"):
        with pytest.raises(SpecError):
            read_spec_file(file, [wrong])


SET = {
    "train.step=3": '--set train.step=3: /train/step: unknown field "step" (did you mean steps?)',
    "train.steps=x": "--set train.steps=x: /train/steps: must be a whole number",
    "train.steps=[": "--set train.steps=[: /train/steps: this is neither YAML nor JSON",
    "nowhere.deep=1": '--set nowhere.deep=1: /nowhere: unknown field "nowhere"',
    "train={steps: 3, seed: -1}": "--set train={steps: 3, seed: -1}: /train/seed: must be at least 0",
    "train.steps": "--set train.steps: (spec): an override has the form field.field=value",
}


@pytest.mark.parametrize(("override", "said"), SET.items())
def test_a_mistake_in_an_override_names_the_option_and_the_field(tmp_path: Path, override: str, said: str) -> None:
    """Property: no line of a text is named that nobody wrote; of two options the one that counts is."""
    file = tmp_path / "spec.yaml"
    file.write_text(SHORT)
    with pytest.raises(SpecError) as caught:
        read_spec_file(file, ["train.steps=y", override] if override == "train.steps=x" else [override])
    (problem,) = caught.value.problems
    assert str(problem).startswith(said) and problem.line is None


def test_a_mistake_in_the_text_keeps_its_line_beside_overrides(tmp_path: Path) -> None:
    """Property: `--ranks` is named as it was typed, and each problem by what gave its value."""
    file = tmp_path / "spec.yaml"
    file.write_text(SHORT.replace("steps: 3", "steps: x"))
    with pytest.raises(SpecError) as caught:
        read_spec_file(file, ["name=other"], ranks=0)
    assert [str(problem) for problem in caught.value.problems] == [
        "line 5: /train/steps: must be a whole number",
        "--ranks 0: /resources/ranks: must be at least 1",
    ]


def test_relative_paths_belong_to_the_folder_of_the_file(tmp_path: Path) -> None:
    """Property: `run` and `submit` make paths absolute; `stdlib` stays a word."""
    file = tmp_path / "spec.yaml"
    file.write_text(SHORT.replace("{kind: text}", "{kind: text, path: ../books}"))
    assert read_spec_file(file).data.path == str(tmp_path.parent / "books")  # type: ignore[union-attr]
    file.write_text(SHORT)
    assert read_spec_file(file).data.path == "stdlib"  # type: ignore[union-attr]


def test_a_path_is_refused_by_field_when_the_server_may_not_read_it(tmp_path: Path) -> None:
    """Property: relative, outside the roots (through a link too), missing, empty, wrong sort: by field."""
    roots = tmp_path / "roots"
    inside, outside = roots / "inside", tmp_path / "outside"
    inside.mkdir(parents=True)
    outside.mkdir()
    (inside / "text.txt").write_text("words " * 1000)
    (inside / "empty.txt").write_text("")
    (inside / "nothing").mkdir()
    (outside / "text.txt").write_text("secret")
    (inside / "link").symlink_to(outside)

    def said(path: str, kind: str = "text") -> str:
        spec = load_spec(SHORT.replace("{kind: text}", f"{{kind: {kind}, path: {json.dumps(path)}}}"))
        problems = path_problems(spec, [roots])
        assert all(problem.pointer == "/data/path" for problem in problems)
        return problems[0].message if problems else ""

    assert said("stdlib") == ""
    assert said(str(inside / "text.txt")) == ""
    assert said(str(inside)) == ""
    assert "absolute path" in said("text.txt")
    assert "outside the folders" in said(str(outside / "text.txt"))
    assert "outside the folders" in said(str(inside / "link" / "text.txt"))
    assert "outside the folders" in said(str(inside / ".." / ".." / "outside"))
    assert "outside the folders" in said(str(roots) + "x")
    assert "No such file" in said(str(inside / "missing"))
    assert "empty file" in said(str(inside / "empty.txt"))
    assert "empty folder" in said(str(inside / "nothing"))
    assert "file of token ids" in said(str(inside), kind="tokens")
    (inside / "short.txt").write_text("words")
    assert "holds 6 bytes, fewer than one context of 256 tokens" in said(str(inside / "short.txt"))
    assert "no side file text.txt.json" in said(str(inside / "text.txt"), kind="tokens")


def test_a_vocabulary_that_no_such_text_has_is_refused_by_field(tmp_path: Path) -> None:
    """Property: what the sizes of files rule out is said before anything starts."""
    text = tmp_path / "text.txt"
    text.write_text("word " * 100)
    spec = load_spec(SHORT.replace("{kind: text}", f"{{kind: text, path: {json.dumps(str(text))}}}"))
    (problem,) = path_problems(spec, None)
    assert (problem.pointer, problem.value) == (
        "/data/tokenizer/vocab",
        "4096",
    ) and "use at most 758" in problem.message


FIELDS = """
checkpoint.every checkpoint.keep_best checkpoint.keep_every checkpoint.keep_latest
checkpoint.when_busy checkpoint.when_failed data model
name priority resources.device resources.ranks
resources.threads_per_rank restart.infrastructure_failures restart.user_failures stop_grace_seconds tags train.chunk
train.deterministic train.eval.batches train.eval.every train.global_batch train.gradient_clipping train.micro_batch
train.optimizer train.precision
train.schedule
train.seed train.steps zero.activation_checkpointing zero.buffers zero.offload zero.self_test zero.stage
""".split()  # noqa: SIM905


def test_the_fields_of_a_spec_are_exactly_these() -> None:
    """Property: adding a field is a visible decision."""
    from pydantic import BaseModel

    def names(model: type[BaseModel], prefix: str) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found += names(inner, f"{prefix}{name}.")
            else:
                found.append(prefix + name)
        return found

    assert sorted(names(JobSpec, "")) == FIELDS
