"""Models on the meta device: they start in shards, unit by unit, with the bits of their twins that were built."""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.distributed.engine_cases import VOCABULARY, Tied, adamw, built, train
from tests.distributed.rank_pool import Pool, Rank
from workers.build import Start, build_model, loss_of, optimizer_of, start_of
from workers.data.batches import BatchShape, TokenBatches
from workers.models.gpt import Gpt
from workers.models.initial import gpt_values
from workers.planner import engine_config
from workers.spec import load_spec
from zero_engine import SGD, Engine, ZeroConfig, beginning, builds_here, group, initialise
from zero_engine.arenas import Arenas
from zero_engine.errors import DivergedError, EngineError, ModelError

NUMBERS = {"micro_batches": 6, "chunk": 2, "gradient_clipping": 0.5}
GPT = {"vocabulary": VOCABULARY, "layers": 3, "hidden": 16, "heads": 2, "context": 8, "dropout": 0.1, "tied": True}


class Scaled(nn.Module):
    """A module of the user's own: a parameter and two buffers that `reset_parameters` writes, one of integers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.register_buffer("phase", torch.empty(width))
        self.register_buffer("order", torch.empty(width, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain, 1.0, 0.1)
        with torch.no_grad():
            self.phase.copy_(torch.linspace(0, 1, len(self.phase)))
            self.order.copy_(torch.arange(len(self.order)).flip(0))

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.order] * self.gain + self.phase.to(x.dtype)


class Whole(Tied):
    """Tied across the root, odd sizes, dropout, a frozen parameter, buffers."""

    def __init__(self) -> None:
        super().__init__(width=16, depth=3, dropout=0.1)
        self.blocks[1].norm.requires_grad_(False)
        self.scaled = Scaled(16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scaled(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Rotary(nn.Module):
    """Nothing here has `reset_parameters`: loose parameters, and a buffer that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, 16))
        self.layers = nn.ModuleList(Turned(16) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens[ids]
        for layer in self.layers:
            x = layer(x)
        return x @ self.tokens.T


class Turned(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.register_buffer("angle", torch.arange(float(width)).cos())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(x @ self.weight) * self.angle + x
        return y


def on_meta(model: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return model()


def gpt() -> nn.Module:
    return Gpt(**GPT)  # type: ignore[arg-type]


def _reset_digest(rank: Rank, config: ZeroConfig, meta: bool) -> Any:
    Arenas.fresh_byte = 0xFF
    try:
        model = on_meta(Whole) if meta else initialise(built(Whole), config.seed)
        engine = Engine(model, config, adamw(), rank.group)
        first = engine.digest()
        losses = [result.loss for result in train(engine, 2)]
        assert model.head.weight is model.tokens.weight
        answer = (first, engine.digest(), losses, engine.memory() == engine.plan.memory[rank.rank])
        engine.close()
    finally:
        Arenas.fresh_byte = 0
    return answer


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_on_the_meta_device_starts_and_trains_as_its_built_twin(pool: Pool, stage: int) -> None:
    """Property: the same digests before and after training at every stage and rank count, ties and buffers included."""
    for precision in ("fp32", "bf16"):
        config = ZeroConfig(stage, precision=precision, seed=5, **NUMBERS)
        (wanted,) = pool.run(1, _reset_digest, config, False)
        assert wanted[3]
        for ranks in range(1, 5) if precision == "fp32" else (2,):
            assert pool.run(ranks, _reset_digest, config, True) == [wanted] * ranks


def _gpt_digest(rank: Rank, config: ZeroConfig, meta: bool) -> tuple[str, str]:
    values = gpt_values(7, 3)
    if meta:
        engine = Engine(on_meta(gpt), config, adamw(), rank.group, initial=values)
    else:
        model = gpt()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                values(name, parameter)
        engine = Engine(model, config, adamw(), rank.group)
    first = engine.digest()
    train(engine, 2)
    digests = (first, engine.digest())
    engine.close()
    return digests


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_our_models_have_the_bits_of_the_eager_build(pool: Pool, stage: int) -> None:
    """Property: a GPT made by parameter name in shards equals the GPT that is built whole."""
    config = ZeroConfig(stage, **NUMBERS)
    (wanted,) = pool.run(1, _gpt_digest, config, False)
    for ranks in (1, 4):
        assert pool.run(ranks, _gpt_digest, config, True) == [wanted] * ranks


USERS_OWN = """
import torch
from torch import nn

class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("angle", torch.arange(16.0).cos())
    def forward(self, x):
        return x + torch.tanh(x @ self.weight) * self.angle

def build(reads=False):
    model = nn.Sequential(nn.Embedding(300, 16), nn.Sequential(*(Turned() for _ in range(3))), nn.Linear(16, 300))
    if reads:
        model.scale = model[2].bias.sum().item()  # needs values: cannot be built on the meta device
    return model
"""


def _digest_of_job(rank: Rank, text: str, whole: bool) -> tuple[str, str, bool]:
    spec = load_spec(text)
    row = np.arange(400) % 300
    shape = BatchShape(1, spec.train.global_batch, spec.train.micro_batch)
    data = TokenBatches(row, row, vocabulary=300, context=8, shape=shape, content_hash="0")
    stage = spec.zero.stage
    assert stage != "auto"
    start = Start(build_model(spec, data)) if whole else start_of(spec, data, lambda: rank.rank == 0)
    empty = next(start.model.parameters()).is_meta
    config, optimizer = engine_config(spec, spec.chunk, stage), optimizer_of(spec.train.optimizer)
    engine = Engine(start.model, config, optimizer, rank.group, initial=start.initial)
    first, loss = engine.digest(), loss_of(engine.module)
    train(engine, 2, lambda module, step, index: loss(module, data.micro_batch(step, index)))
    answer = (first, engine.digest(), empty)
    engine.close()
    return answer


@pytest.mark.parametrize("model", ["ours", "users", "users that reads"])
def test_a_job_starts_in_shards_with_the_bits_of_the_whole_model(pool: Pool, tmp_path: Path, model: str) -> None:
    """Property: what ranks of a job start from is the built model's bits at every stage; at stage 3 one rank builds a
    user's model, unless its code needs values everywhere; ours is built by none.
    """
    module = f"meta_job_{len(model)}"  # ranks of the pool import it once and for all
    (tmp_path / f"{module}.py").write_text(USERS_OWN)
    kwargs = "reads: true" if "reads" in model else ""
    entry = f"{{kind: python, entry: '{module}:build', path: {tmp_path}, kwargs: {{{kwargs}}}}}"
    ours = "{kind: gpt, layers: 2, hidden: 16, heads: 2, context: 8, dropout: 0.1}"
    text = f"name: x\nmodel: {ours if model == 'ours' else entry}\ndata: {{kind: text}}\ntrain: {{steps: 2}}\n"
    (wanted,) = pool.run(1, _digest_of_job, text + "zero: {stage: 0}", True)
    empties = {"ours": {0: [True] * 3, 3: [True] * 3}, "users": {0: [False] * 3, 3: [False, True, True]}}
    for stage in (0, 3):
        found = pool.run(3, _digest_of_job, text + f"zero: {{stage: {stage}}}", False)
        assert [each[:2] for each in found] == [wanted[:2]] * 3
        assert [each[2] for each in found] == empties.get(model, {}).get(stage, [False] * 3)


def _sent_digest(rank: Rank, config: ZeroConfig, who_builds: tuple[int, ...] | None) -> tuple[str, str, list[float]]:
    builds = who_builds is None or rank.rank in who_builds
    model = built(Rotary) if builds else on_meta(Rotary)
    engine = Engine(model, config, adamw(), rank.group)
    first = engine.digest()
    train(engine, 2)
    angles = [float(layer.angle.sum()) for layer in model.layers]
    digests = (first, engine.digest(), angles)
    engine.close()
    return digests


@pytest.mark.parametrize("transport", ["shared", "group"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_builds_and_the_others_are_sent_their_shards(pool: Pool, stage: int, transport: str) -> None:
    """Property: where modules cannot reset themselves, one built model is enough, whichever rank has it."""
    config = ZeroConfig(stage, transport=transport, **NUMBERS)
    for ranks, who_builds in ((2, (0,)), (3, (1,)), (4, (0, 2))):
        wanted = pool.run(ranks, _sent_digest, config, None)
        assert pool.run(ranks, _sent_digest, config, who_builds) == wanted
        assert len({digest for digest, *_ in wanted}) == 1


def _on_two_nodes(rank: Rank, config: ZeroConfig, differ: bool) -> tuple[str, bool] | str:
    """Ranks 0 and 1 on one machine, 2 and 3 on another, as far as beginning goes; the first of each builds."""
    marks = [patch.object(module, "node_mark", lambda: rank.rank // 2) for module in (group, beginning)]
    with marks[0], marks[1]:
        builds = builds_here(rank.group)
        model = built(Rotary) if builds else on_meta(Rotary)
        if differ and rank.rank == 2:
            model.get_parameter("layers.1.weight").data[0, 0] += 1
        try:
            engine = Engine(model, config, adamw(), rank.group)
        except DivergedError as error:
            return str(error)
    digest = engine.digest()
    train(engine, 1)
    engine.close()
    return digest, builds


def test_a_model_that_cannot_be_made_in_parts_is_built_once_a_node(pool: Pool) -> None:
    """Property: the first rank of each machine builds and sends through its memory; two that differ are an error."""
    config = ZeroConfig(3, **NUMBERS)
    wanted = pool.run(4, _sent_digest, config, (0,))[0][0]
    found = pool.run(4, _on_two_nodes, config, False)
    assert found == [(wanted, True), (wanted, False), (wanted, True), (wanted, False)]
    for text in pool.run(4, _on_two_nodes, config, True):
        assert "'layers.1.weight' differs between rank 0 and rank 2" in text


class Forgetful(nn.Module):
    """`reset_parameters` leaves the bias and half of the weight as they were built."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.zeros(4))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:2].normal_()


class WrittenAgain(nn.Module):
    """A constructor that starts a child in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        nn.init.normal_(self.inner.weight, std=0.02)


class Stray(nn.Module):
    """A tensor that no state dict knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.tables = [torch.arange(4.0)]


class Half(nn.Module):
    """One parameter built on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4, device="cpu"))


class ResetsItsChild(nn.Module):
    """`reset_parameters` reaches into another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.inner.weight)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Rotary, r"'layers.0' \(Turned\) owns .*'layers.0.weight' and has no reset_parameters.*rank 0 alone"),
        (lambda: nn.Sequential(nn.Linear(2, 2), Forgetful()), r"'1' \(Forgetful\) owns '1.weight', '1.bias' and has"),
        (WrittenAgain, r"'inner.weight' was written 2 times .* reset_parameters writes it 1 times"),
        (Stray, r"attribute 'tables' of module 'the model itself' is a tensor on the meta device"),
        (Half, r"parameter 'inner.weight' is on the meta device and others are not"),
        (ResetsItsChild, r"\(ResetsItsChild\) owns 'scale' and has a reset_parameters that writes to other modules"),
    ],
)
def test_what_cannot_start_from_the_meta_device_is_refused_by_name(model: Callable[[], nn.Module], words: str) -> None:
    """Property: never a silent other start; the text names the parameter, buffer or module and what to do."""
    with pytest.raises(ModelError, match=words):
        Engine(on_meta(model), ZeroConfig(), adamw())


def test_reset_leaves_the_generator_and_the_model_as_they_were() -> None:
    """Property: making first values draws from no generator of the caller's, and a refusal changes nothing."""
    torch.manual_seed(3)
    model, other = nn.Sequential(nn.Linear(3, 3), Forgetful()), torch.random.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError):
        initialise(model[1], 1)
    assert torch.equal(torch.random.get_rng_state(), other)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _rank_zero_differs(rank: Rank, config: ZeroConfig) -> str:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    try:
        Engine(model, config, adamw(), rank.group, initial=lambda name, out: out.fill_(rank.rank * ("1.b" in name)))
    except EngineError as error:
        return f"{type(error).__name__}: {error}"
    return "began"


def test_ranks_that_make_different_values_are_told_which(pool: Pool) -> None:
    """Property: what ranks make by themselves is compared, parameter by parameter."""
    for said in pool.run(2, _rank_zero_differs, ZeroConfig(3, micro_batches=2)):
        assert said.startswith("DivergedError") and "'1.bias' differs between rank 0 and rank 1" in said


M_MMAP_THRESHOLD = -3  # of glibc's mallopt
UNIT_BYTES, UNITS = 4 << 20, 24  # of the model below, fp32
HOLES_BYTES = 8 << 20  # that the allocator may give back meanwhile, of what earlier tests used


class Taken(NamedTuple):
    """Bytes of one process."""

    peak: int  # of construction, beyond what it has afterwards
    kept: int  # afterwards, beyond what it had and what the engine owns, of which some is not touched yet


def _taken(rank: Rank, config: ZeroConfig, how: str) -> Taken:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(UNITS)))

    gc.collect()  # engines of earlier tests
    allocator = ctypes.CDLL(None)
    allocator.mallopt(M_MMAP_THRESHOLD, 1 << 20)  # large blocks come from the kernel and go back to it
    allocator.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high water mark starts again here
    before = _status("VmRSS")
    real = how == "built" or (how == "sent" and rank.rank == 0)
    engine = Engine(built(model) if real else on_meta(model), config, SGD(), rank.group)
    after = _status("VmRSS")
    taken = Taken(_status("VmHWM") - after, after - before - sum(engine.memory().values()))
    engine.close()
    return taken


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_construction_takes_at_most_one_unit_more_than_the_engine_keeps(pool: Pool) -> None:
    """Property: no rank holds the model, neither for a moment nor afterwards; a model that is built first is seen."""
    config = ZeroConfig(3, micro_batches=2, transport="group")
    most = UNIT_BYTES + HOLES_BYTES
    pool.run(2, _taken, config, "meta")  # code and caches of a first run are not the model's
    for taken in (*pool.run(2, _taken, config, "meta"), pool.run(2, _taken, config, "sent")[1]):
        assert taken.peak < most and taken.kept < UNITS // 2 * UNIT_BYTES
    assert min(taken.peak for taken in pool.run(2, _taken, config, "built")) > most
