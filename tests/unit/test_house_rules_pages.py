"""House rules of the words around the code: the README's tree, the generated pages, the frozen list of spec fields."""

from __future__ import annotations

import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from workers.spec import JobSpec

ROOT = Path(__file__).resolve().parents[2]

SPEC_FIELDS = """
name tags priority stop_grace_seconds
model model[gpt].kind model[gpt].layers model[gpt].hidden model[gpt].heads model[gpt].context model[gpt].dropout
model[gpt].tied model[gpt].start model[mlp].kind model[mlp].hidden
model[python].kind model[python].entry model[python].path model[python].kwargs
data data[text].kind data[text].path data[text].tokenizer data[text].tokenizer[bpe].kind data[text].tokenizer[bpe].vocab
data[text].tokenizer[bytes].kind data[text].tokenizer[file].kind data[text].tokenizer[file].path
data[tokens].kind data[tokens].path data[tokens].validation data[digits].kind
train train.steps train.global_batch train.micro_batch train.chunk train.precision train.gradient_clipping train.seed
train.deterministic train.eval train.eval.every train.eval.batches
train.optimizer train.optimizer[adamw].kind train.optimizer[adamw].lr train.optimizer[adamw].betas
train.optimizer[adamw].weight_decay
train.optimizer[adam].kind train.optimizer[adam].lr train.optimizer[adam].betas train.optimizer[adam].weight_decay
train.optimizer[sgd].kind train.optimizer[sgd].lr train.optimizer[sgd].momentum train.optimizer[sgd].nesterov
train.optimizer[sgd].weight_decay
train.optimizer[lion].kind train.optimizer[lion].lr train.optimizer[lion].betas train.optimizer[lion].weight_decay
train.schedule train.schedule[cosine].kind train.schedule[cosine].warmup_steps train.schedule[cosine].min_lr
train.schedule[constant].kind
zero zero.stage zero.offload zero.activation_checkpointing zero.buffers zero.self_test
resources resources.ranks resources.device resources.threads_per_rank
checkpoint checkpoint.every checkpoint.keep_latest checkpoint.keep_best checkpoint.keep_every
checkpoint.when_busy checkpoint.when_failed
restart restart.user_failures restart.infrastructure_failures
"""


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models that an annotation mentions, in unions and lists too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of a model's fields; `[kind]` marks one of several models."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in models_in(field.annotation):
            kind = inner.model_fields.get("kind")
            tag = "" if kind is None else f"[{typing.get_args(kind.annotation)[0]}]"
            yield from fields_of(inner, f"{prefix}{name}{tag}.")


def test_a_new_spec_field_is_a_visible_decision() -> None:
    """Few dials: who adds one changes this list, the reference page and the changelog with it."""
    assert set(fields_of(JobSpec)) == set(SPEC_FIELDS.split())


def test_the_generated_pages_are_current() -> None:
    """What `make docs` would write is what is committed."""
    run = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def readme_tree() -> dict[str, str]:
    """Path -> description of the tree in README.md; the tree is its one code block with the word `shardyard/`."""
    block = re.search(r"```text\nshardyard/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no tree"
    found: dict[str, str] = {}
    parents: list[str] = []
    for line in block[1].splitlines():
        match = re.match(r"((?:│   |    )*)(?:├── |└── )(\S+)\s*(.*)$", line)
        assert match, f"not a line of a tree: {line!r}"
        depth = len(match[1]) // 4
        parents = [*parents[:depth], match[2].rstrip("/")]
        found["/".join(parents)] = match[3]
    return found


def real_tree() -> set[str]:
    """Every top-level entry, and every folder inside a top-level folder, of what git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    parts = [Path(name).parts for name in names if (ROOT / name).is_file()]
    return {part[0] for part in parts} | {"/".join(part[:2]) for part in parts if len(part) > 2}


def test_the_tree_in_the_readme_is_the_real_one() -> None:
    """Nothing missing, nothing that is gone, and a few words for each."""
    shown = readme_tree()
    assert set(shown) == real_tree()
    assert not [path for path, text in shown.items() if len(text) < 10]


def test_links_between_pages_lead_somewhere() -> None:
    """Relative links of every page and of the README name existing files."""
    pages = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
    faults = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not faults
