"""Our models: shapes known without torch, first bits by name, GPT-2's form."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from workers.build import build_model, loss_of, optimizer_of
from workers.data.batches import ArrayBatches, Batch, BatchShape, TokenBatches
from workers.model_plan import estimate_in
from workers.models.python import EntryError, build_user_model, gives_its_own_loss
from workers.shapes import gpt_parameters, mlp_parameters
from workers.spec import GptModel, JobSpec, MlpModel, PythonModel, load_spec
from zero_engine.flat import layout_of
from zero_engine.layout import Layout


def spec_of(model: str, data: str = "{kind: text}", train: str = "{steps: 3}") -> JobSpec:
    return load_spec(f"name: x\nmodel: {model}\ndata: {data}\ntrain: {train}\n")


def tokens(vocabulary: int, context: int) -> TokenBatches:
    import numpy as np

    row = np.arange(1000) % vocabulary
    shape = BatchShape(1, 4, 2)
    return TokenBatches(row, row, vocabulary=vocabulary, context=context, shape=shape, content_hash="0")


def digits() -> ArrayBatches:
    import numpy as np

    targets = np.arange(100, dtype=np.int64) % 10
    return ArrayBatches(np.zeros((100, 64), np.float32), targets, shape=BatchShape(1, 4, 2), content_hash="0")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "vocabulary"), [(1, 8, 2, 257), (3, 24, 4, 300), (2, 32, 1, 1000)]
)
def test_the_shapes_of_a_gpt_are_those_of_the_module(
    tied: bool, layers: int, hidden: int, heads: int, vocabulary: int
) -> None:
    """Property: names, shapes, units, groups and ties that the planner computes are what the engine finds."""
    shape = GptModel(kind="gpt", layers=layers, hidden=hidden, heads=heads, context=16, tied=tied)
    spec = spec_of(shape.model_dump_json())
    module = build_model(spec, tokens(vocabulary, 16))
    found = layout_of(module, (), optimizer_of(spec.train.optimizer))
    assert Layout.build(gpt_parameters(shape, vocabulary)).to_json() == found.to_json()


@pytest.mark.parametrize("hidden", [[3], [128, 64, 32], [5, 5, 5, 5]])
def test_the_shapes_of_an_mlp_are_those_of_the_module(hidden: list[int]) -> None:
    """Property: as for the GPT."""
    shape = MlpModel(kind="mlp", hidden=hidden)
    spec = spec_of(shape.model_dump_json(), "{kind: digits}")
    found = layout_of(build_model(spec, digits()), (), optimizer_of(spec.train.optimizer))
    assert Layout.build(mlp_parameters(shape, 64, 10)).to_json() == found.to_json()


def test_the_first_bits_of_a_parameter_depend_on_seed_and_name_alone() -> None:
    """Property: the same block in a deeper model starts with the same bits; another seed with others."""
    small = build_model(spec_of("{kind: gpt, layers: 2, hidden: 16, heads: 2, context: 8}"), tokens(300, 8))
    torch.manual_seed(99)
    again = build_model(spec_of("{kind: gpt, layers: 2, hidden: 16, heads: 2, context: 8}"), tokens(300, 8))
    other = build_model(
        spec_of("{kind: gpt, layers: 2, hidden: 16, heads: 2, context: 8}", train="{steps: 3, seed: 2}"), tokens(300, 8)
    )
    deep = build_model(spec_of("{kind: gpt, layers: 3, hidden: 16, heads: 2, context: 8}"), tokens(300, 8))
    name = "h.1.attn.c_attn.weight"
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), again.parameters(), strict=True))
    assert torch.equal(small.get_parameter(name), deep.get_parameter(name))
    assert not torch.equal(small.get_parameter(name), other.get_parameter(name))


def test_a_fresh_gpt_knows_nothing() -> None:
    """Property: the first loss is about the logarithm of the vocabulary, and no position sees what follows it."""
    spec = spec_of("{kind: gpt, layers: 2, hidden: 32, heads: 4, context: 16}")
    data = tokens(500, 16)
    model = build_model(spec, data).eval()
    with torch.no_grad():
        loss = loss_of(model)(model, data.micro_batch(0, 0))
        ids = torch.randint(0, 500, (1, 16), generator=torch.Generator().manual_seed(0))
        changed = ids.clone()
        changed[0, 10] = (ids[0, 10] + 1) % 500
        before, after = model(ids), model(changed)
    assert abs(float(loss) - math.log(500)) < 0.2
    assert torch.equal(before[:, :10], after[:, :10]) and not torch.equal(before[:, 10:], after[:, 10:])


def test_norms_and_biases_do_not_decay() -> None:
    """Property: with a zero gradient a step shrinks weights and leaves norms and biases as they are."""
    from zero_engine import Engine, ZeroConfig

    spec = spec_of("{kind: gpt, layers: 1, hidden: 16, heads: 2, context: 8}")
    model = build_model(spec, tokens(300, 8))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    engine = Engine(model, ZeroConfig(micro_batches=1), optimizer_of(spec.train.optimizer))
    for _ in engine.micro_batches():
        engine.backward(engine.module(torch.zeros(1, 8, dtype=torch.long)).sum() * 0.0)
    engine.step(lr=1.0)
    for name, each in model.named_parameters():
        shrinks = each.dim() >= 2
        assert torch.allclose(each, before[name] * (0.9 if shrinks else 1.0), atol=1e-7), name
    engine.close()


USER = """
import torch
from torch import nn

def build(width=4):
    return nn.Linear(width, 3)

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, inputs, targets):
        return (self.layer(inputs).sum(-1) - targets).square().mean()

def with_loss():
    return WithLoss()

def no_module():
    return 3

def raises():
    raise ValueError("the user's own words")

class Tuple(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs), inputs

class Losses(WithLoss):
    def forward(self, inputs, targets):
        return (self.layer(inputs).sum(-1) - targets).square()

def gives_a_tuple(width=4):
    return Tuple(width, 3)

def gives_losses():
    return Losses()
"""


def user(folder: Path, entry: str, **kwargs: object) -> PythonModel:
    return PythonModel(kind="python", entry=entry, path=str(folder), kwargs=kwargs)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a module of its own name; what it puts on the path goes away again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "the_users_model.py").write_text(USER)
    yield tmp_path
    sys.modules.pop("the_users_model", None)


def test_a_users_model_is_built_with_its_kwargs_and_the_seed(folder: Path) -> None:
    """Property: equal seeds give equal weights on every rank."""
    one = build_user_model(user(folder, "the_users_model:build", width=5), seed=3)
    two = build_user_model(user(folder, "the_users_model:build", width=5), seed=3)
    assert isinstance(one, nn.Linear) and one.in_features == 5
    assert torch.equal(one.weight, two.weight)  # type: ignore[arg-type]


def test_a_model_that_takes_targets_gives_its_own_loss(folder: Path) -> None:
    """Property: forward(inputs, targets) is the loss itself, forward(inputs) is logits for a cross-entropy."""
    batch = Batch(torch.ones(2, 4), torch.tensor([0, 1]))
    own = build_user_model(user(folder, "the_users_model:with_loss"), seed=1)
    plain = build_user_model(user(folder, "the_users_model:build"), seed=1)
    assert gives_its_own_loss(own) and not gives_its_own_loss(plain)
    assert torch.equal(loss_of(own)(own, batch), own(batch.inputs, batch.targets))
    expected = nn.functional.cross_entropy(plain(batch.inputs), batch.targets)
    assert torch.equal(loss_of(plain)(plain, batch), expected)


def test_a_model_that_returns_something_else_is_told_what_to_return(folder: Path) -> None:
    """Property: what came, of which class, and what must come, for training and for a plan."""
    batch = Batch(torch.ones(2, 4), torch.tensor([0, 1]))
    wrong = {
        "gives_a_tuple": r"class Tuple\) returned a tuple of 2 from forward\(inputs\); return the logits alone",
        "gives_losses": r"class Losses\) returned a tensor of shape \(2,\) from .*; return the loss alone",
    }
    for entry, words in wrong.items():
        model = build_user_model(user(folder, f"the_users_model:{entry}"), seed=1)
        with pytest.raises(EntryError, match=words):
            loss_of(model)(model, batch)
    wide = user(folder, "the_users_model:gives_a_tuple", width=64)
    spec = spec_of("{kind: mlp}", "{kind: digits}").model_copy(update={"model": wide})
    with pytest.raises(EntryError, match=r"returned a tuple of 2"):
        estimate_in(build_user_model(wide, seed=1), spec)


def test_an_entry_that_gives_no_model_is_named(folder: Path) -> None:
    """Property: no function, no module, a module from elsewhere: EntryError; the user's exceptions stay as they are."""
    for entry, words in (("the_users_model:missing", "no function"), ("the_users_model:no_module", "returned int")):
        with pytest.raises(EntryError, match=words):
            build_user_model(user(folder, entry), seed=1)
    with pytest.raises(EntryError, match=r"not in model\.path"):
        build_user_model(user(folder, "json:loads"), seed=1)
    with pytest.raises(ValueError, match="own words"):
        build_user_model(user(folder, "the_users_model:raises"), seed=1)
    with pytest.raises(EntryError, match=f"no_such.at_all:build: there is no module no_such in model.path {folder}"):
        build_user_model(user(folder, "no_such.at_all:build"), seed=1)
    (folder / "users_lacking.py").write_text("import no_such_library")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):  # of their code, with its own traceback
        build_user_model(user(folder, "users_lacking:build"), seed=1)
    (folder / "workers").mkdir()
    with pytest.raises(EntryError, match="belongs to Shardyard"):
        build_user_model(user(folder, "the_users_model:build"), seed=1)
