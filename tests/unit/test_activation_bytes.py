"""What a micro-batch holds and computes: from shapes, on tensors without contents, and as torch's tracker sees it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed._tools.mem_tracker import MemTracker

from workers.activation_bytes import Batch, gpt_activations, mlp_activations
from workers.models.gpt import Gpt
from workers.models.mlp import Mlp
from workers.spec import GptModel
from zero_engine import ZeroConfig
from zero_engine.activations import Activations
from zero_engine.dry_run import Empty, dry_run, taken
from zero_engine.units import find_units

POLICIES = ("none", "full", "selective", "every:2")


class Pictures(nn.Module):
    """A user's model: convolutions in units and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.units = nn.ModuleList(Stage(16) for _ in range(3))
        self.head = nn.Linear(16 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.view(-1, 1, 8, 8))
        for unit in self.units:
            x = unit(x)
        logits: Tensor = self.head(x.flatten(1))
        return logits


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(width, 2 * width, 3, padding=1), nn.Conv2d(2 * width, width, 1)
        self.norm = nn.GroupNorm(4, width)
        self.register_buffer("scale", torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.norm(self.narrow(F.silu(self.wide(x)))) * self.scale
        return y


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(inputs)
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


def tracked(model: nn.Module, batch: Sequence[Tensor], policy: str) -> int:
    """Bytes at the peak beside weights, buffers and the batch, by torch's own tracker on the CPU."""
    activations = Activations(list(find_units(model, ()).values()), policy)
    handles = [taken(parameter) for parameter in model.parameters() if parameter.requires_grad]
    tracker = MemTracker()
    tracker.track_external(model, *batch)
    with tracker:
        loss_of(model, *batch).backward()  # type: ignore[no-untyped-call]
    activations.remove()
    for handle in handles:
        handle.remove()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    names = {str(kind).rpartition(".")[2]: size for kind, size in peak.items()}
    assert {"Total", "PARAM", "BUFFER", "OTH"} <= set(names), names
    return int(names["Total"] - names["PARAM"] - names["BUFFER"] - names["OTH"])


def gpt(context: int, vocabulary: int, layers: int = 3, dropout: float = 0.0, width: int = 64) -> GptModel:
    return GptModel(kind="gpt", layers=layers, hidden=width, heads=2, context=context, dropout=dropout)


def module_of(shape: GptModel, vocabulary: int) -> Gpt:
    return Gpt(
        vocabulary=vocabulary, layers=shape.layers, hidden=shape.hidden, heads=shape.heads, context=shape.context,
        dropout=shape.dropout, tied=shape.tied,
    )  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", ["gpt", "gpt with dropout", "mlp", "a user's"])
def test_a_pass_without_contents_finds_the_peak_of_torchs_tracker(model: str, policy: str) -> None:
    """Property: within 5 %, for each way of checkpointing; the model keeps its parameters and methods."""
    torch.manual_seed(0)
    if "gpt" in model:
        built: nn.Module = module_of(gpt(32, 300, dropout=0.1 if "dropout" in model else 0.0), 300)
        for parameter in built.parameters():
            nn.init.normal_(parameter, std=0.02)
        batch: tuple[Tensor, ...] = (torch.randint(0, 300, (4, 32)), torch.randint(0, 300, (4, 32)))
    else:
        built = Mlp(inputs=64, hidden=(128, 64, 32), outputs=10) if model == "mlp" else Pictures()
        batch = (torch.randn(16, 64), torch.randint(0, 10, (16,)))
    before = list(built.parameters())
    shapes = [Empty(tuple(each.shape), each.dtype) for each in batch]
    found = dry_run(built, loss_of, shapes, ZeroConfig(activation_checkpointing=policy))
    assert all(a is b for a, b in zip(before, built.parameters(), strict=True))
    assert found.peak_bytes == pytest.approx(tracked(built, batch, policy), rel=0.05)
    assert 0 < found.kept_bytes <= found.peak_bytes


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("policy", POLICIES)
def test_shapes_alone_give_the_peak_of_a_gpt(policy: str, dropout: float) -> None:
    """Property: within 5 % of the pass, where the loss, the head or a block is the largest moment; with dropout on a
    CPU, whose attention stores its scores, within 10 %.
    """
    for context, vocabulary, samples, layers, width in (
        (32, 300, 4, 3, 64),
        (256, 257, 1, 2, 32),
        (16, 2048, 2, 2, 128),
    ):
        shape = gpt(context, vocabulary, layers, dropout, width)
        for precision in ("fp32", "bf16") if not dropout else ("fp32",):
            with torch.device("meta"):
                module = module_of(shape, vocabulary)
            batch = [Empty((samples, context), torch.int64)] * 2
            found = dry_run(module, loss_of, batch, ZeroConfig(activation_checkpointing=policy, precision=precision))
            item_bytes = 4 if precision == "fp32" else 2
            estimate = gpt_activations(shape, vocabulary, Batch(samples, item_bytes, policy, "cpu"))
            assert estimate == pytest.approx(found.peak_bytes, rel=0.1 if dropout else 0.05), (context, precision)


@pytest.mark.parametrize("policy", POLICIES)
def test_shapes_alone_give_the_peak_of_an_mlp(policy: str) -> None:
    """Property: within 5 % of the pass, for wide, narrow and deep ones."""
    for widths, samples in (((64, 128, 64, 32, 10), 4), ((64, 512, 512, 10), 128), ((64, 8, 10), 16)):
        with torch.device("meta"):
            module = Mlp(inputs=64, hidden=widths[1:-1], outputs=10)
        batch = [Empty((samples, 64), torch.float32), Empty((samples,), torch.int64)]
        found = dry_run(module, loss_of, batch, ZeroConfig(activation_checkpointing=policy))
        estimate = mlp_activations(widths, Batch(samples, 4, policy, "cpu"))
        assert estimate == pytest.approx(found.peak_bytes, rel=0.05), widths


def test_operations_of_an_mlp_are_two_for_each_weight_and_sample_three_times() -> None:
    """Property: forward, and backward twice but for the inputs' gradient; a pass that recomputes all counts more."""
    widths, samples = (64, 128, 32, 10), 8
    batch = [Empty((samples, 64), torch.float32), Empty((samples,), torch.int64)]
    with torch.device("meta"):
        module = Mlp(inputs=64, hidden=widths[1:-1], outputs=10)
    weights = [before * after for before, after in pairwise(widths)]
    found = dry_run(module, loss_of, batch, ZeroConfig())
    assert found.flops == 2 * samples * (3 * sum(weights) - weights[0])


def test_a_model_that_reads_values_is_not_estimated() -> None:
    """Property: the pass raises, and leaves the model usable."""

    class Reads(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum())

    model = Reads(inputs=4, hidden=(4,), outputs=2)
    with pytest.raises(DataDependentOutputException):
        dry_run(model, loss_of, [Empty((2, 4), torch.float32), Empty((2,), torch.int64)], ZeroConfig())
    assert not [name for name, each in model.named_parameters() if type(each.data) is not Tensor]
    assert model(torch.ones(2, 4)).shape == (2, 2)
