"""Every kind of parameter survives a save, a reshard and an export."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.distributed import read_by_document
from tests.distributed.engine_cases import adamw, built, engine_of, reference_of, tied, tokens, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import AdamW, Engine, ZeroConfig
from zero_engine.catalog import list_checkpoints, read_manifest, verify
from zero_engine.export import Export
from zero_engine.manifest import Progress
from zero_engine.store import LocalStore


class Odd(nn.Module):
    """Frozen, scalar, empty, unused, half-precision, integer and buffer state, in units and out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(13, 13)
        self.base.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.layers[1].bias.requires_grad_(False)  # type: ignore[union-attr]
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(5))
        self.codes = nn.Parameter(torch.arange(9), requires_grad=False)
        self.low = nn.Parameter(torch.randn(13, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) + self.low.float()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def odd() -> nn.Module:
    return Odd()


def odd_engine(rank: Rank, stage: int, model: nn.Module) -> Engine:
    return Engine(model, ZeroConfig(stage=stage, micro_batches=4, chunk=1), AdamW(lr=0.05), rank.group)


def odd_loss(model: nn.Module, step: int, index: int) -> Tensor:
    x = torch.randn(3, 13, generator=torch.Generator().manual_seed(100 * step + index))
    loss: Tensor = model(x).square().mean()
    return loss


def scrambled(model: nn.Module) -> nn.Module:
    """The same model with every value replaced: what survives a load was not there before."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(2)
    return model


def save_odd(rank: Rank, store: str, stage: int) -> tuple[str, str]:
    """Digest at the save after 2 steps, and after 2 more."""
    engine = odd_engine(rank, stage, built(odd))
    train(engine, 2, odd_loss)
    saved = engine.save(store, progress=Progress(data_cursor=8, data_hash="h", tokenizer="t", extra={"名": [1]})).digest
    train(engine, 2, odd_loss)
    end = engine.digest()
    engine.close()
    return saved, end


def resume_odd(rank: Rank, store: str, stage: int) -> tuple[str, str, dict[str, list[float]]]:
    engine = odd_engine(rank, stage, scrambled(built(odd)))
    loaded = engine.restore(store)
    assert loaded.manifest.progress == Progress(8, "h", {}, "t", {"名": [1]}) and loaded.refused == ()
    saved = engine.digest()
    frozen = {name: tensor.float().reshape(-1).tolist() for name, tensor in engine.full_state_dict().items()}
    resident = engine.module.get_parameter("base.weight").float().reshape(-1).tolist()
    assert resident == frozen["base.weight"], "a frozen weight that computes is not the one that was saved"
    train(engine, 2, odd_loss)
    end = engine.digest()
    engine.close()
    return saved, end, frozen


@pytest.mark.parametrize(("first", "second"), [((1, 0), (4, 3)), ((4, 3), (3, 1)), ((3, 2), (2, 0)), ((2, 1), (4, 2))])
def test_odd_parameters_survive_a_reshard(
    pool: Pool, memory_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    """Frozen weights and buffers come from the checkpoint on every rank, and the run goes on bit for bit."""
    saved, end = pool.run(first[0], save_odd, str(memory_path), first[1])[0]
    model = built(odd)
    for found in pool.run(second[0], resume_odd, str(memory_path), second[1]):
        assert found[:2] == (saved, end)
        values = found[2]
        for name in ("base.weight", "base.bias", "layers.1.bias", "codes", "unused"):
            assert values[name] == model.get_parameter(name).float().reshape(-1).tolist(), name
        assert values["count"] == [3.0] and values["mean"] == model.get_buffer("mean").tolist()
        assert "scratch" not in values and values["nothing"] == []


def save_with_states(rank: Rank, store: str, stage: int) -> dict[str, dict[str, Tensor]]:
    """Save after 2 steps; whole parameters and moments as the engine gives them, by kind."""
    engine = odd_engine(rank, stage, built(odd))
    train(engine, 2, odd_loss)
    engine.save(store, step=2, fence=7, progress=Progress(data_cursor=8))
    found = {kind: engine.full_state_dict(kind) for kind in ("parameter", "exp_avg", "exp_avg_sq")}
    engine.close()
    return found


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (3, 2), (2, 3)])
def test_the_document_alone_is_enough_to_read_a_checkpoint(
    pool: Pool, memory_path: Path, ranks: int, stage: int
) -> None:
    """A reader that knows docs/checkpoint-format.md and nothing of ours finds every value, and nothing else."""
    states = pool.run(ranks, save_with_states, str(memory_path), stage)[0]
    (folder,) = [path for path in memory_path.iterdir() if path.is_dir()]
    found, model = read_by_document.read(folder), built(odd)
    assert found.padding <= {0}
    assert set(found.buffers) == {"count", "mean"} and found.buffers["count"] == (3,)
    for name, parameter in model.named_parameters():
        kinds = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "parameter"}
        for kind, ours in kinds.items() if parameter.requires_grad else [("frozen", "parameter")]:
            values = torch.tensor(found.parameters[kind].pop(name)).to(states[ours][name].dtype)
            assert torch.equal(values, states[ours][name].reshape(-1)), (kind, name)
    assert not any(found.parameters.values())
    assert found.body["scalars"]["completed_steps"] == 2 and found.body["progress"]["data_cursor"] == 8


def export_all(rank: Rank, folder: str, stage: int, precision: str) -> dict[str, Tensor]:
    """Checkpoint, engine export and state dict of one state; the state dict."""
    config = ZeroConfig(stage=stage, micro_batches=4, chunk=2, precision=precision)
    engine = engine_of(rank, config)
    train(engine, 2)
    engine.save(f"{folder}/store")
    engine.export_safetensors(f"{folder}/engine.safetensors")
    state = engine.full_state_dict()
    train(engine, 1)
    engine.close()
    return state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3), (3, 2)])
def test_exports_agree_and_load_in_a_plain_model(
    pool: Pool, memory_path: Path, ranks: int, stage: int, precision: str
) -> None:
    """From the store, the engine, the state dict: the same tensors, tied ones once; equal logits in a plain model."""
    states = pool.run(ranks, export_all, str(memory_path), stage, precision)
    store = LocalStore(memory_path / "store")
    (name,) = list_checkpoints(store)
    (memory_path / "store.safetensors").write_bytes(b"".join(Export(store, read_manifest(store, name.folder)).pieces()))
    from_store, from_engine = (
        load_file(memory_path / "store.safetensors"),
        load_file(memory_path / "engine.safetensors"),
    )
    assert set(from_store) == set(from_engine) == {key for key, _ in built(tied).named_parameters()}
    plain = built(tied)
    assert plain.load_state_dict(from_store, strict=False).missing_keys == ["head.weight"]
    for key, tensor in from_store.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, from_engine[key])
        assert all(torch.equal(tensor, state[key]) for state in states)
    assert all(torch.equal(state["head.weight"], state["tokens.weight"]) for state in states)
    other = built(tied)
    other.load_state_dict(states[0])
    inputs, _ = tokens(9, 9)
    assert torch.equal(plain(inputs), other(inputs))


def load_peak(rank: Rank, store: str, stage: int) -> tuple[int, int]:
    """KiB that a load adds at its peak and in the end, over an engine that trains."""
    config = ZeroConfig(stage=stage, micro_batches=4, chunk=2)
    engine = engine_of(rank, config, width=512, depth=4)
    train(engine, 1)  # steady state: everything that a step touches is resident
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    engine.restore(store)
    found = _status("VmHWM") - before, _status("VmRSS") - before
    engine.close()
    return found


def _status(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def save_wide(rank: Rank, store: str) -> int:
    """Bytes of a checkpoint of 12.7 M parameters."""
    engine = engine_of(rank, ZeroConfig(stage=1, micro_batches=4, chunk=2), width=512, depth=4)
    size = engine.save(store).total_bytes
    engine.close()
    return size


def test_a_load_needs_no_more_than_a_bucket(pool: Pool, memory_path: Path) -> None:
    """Blocks are read into the memory where they belong: the peak over steady state is a bucket (4 MiB).

    The allocator may keep as much again in holes; a copy of a rank's part would be 70 MiB.
    """
    total = pool.run(3, save_wide, str(memory_path))[0]  # so that every rank reads from several shards
    for stage in (0, 1, 2, 3):
        for peak_kib, left_kib in pool.run(2, load_peak, str(memory_path), stage):
            assert peak_kib < 8192, f"stage {stage}: {peak_kib} KiB over, of {total >> 10} KiB"
            assert left_kib < 8192


KILLED = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, {root!r})
from tests.distributed.checkpoint_faults import KilledAt
from tests.distributed.engine_cases import adamw, built, tied, train
from zero_engine import Engine, ZeroConfig
from zero_engine.store import LocalStore
import os

torch.set_num_threads(1)
engine = Engine(built(tied), ZeroConfig(stage=2, micro_batches=2, chunk=1), adamw())
train(engine, 1)
engine.save({store!r}, fence=1)
train(engine, 1)
allowed = 0
while True:
    child = os.fork()
    if child == 0:
        engine.save(LocalStore({store!r}, KilledAt(allowed, maker=-1)), step=10 + allowed, fence=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(allowed, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, flush=True)
    if not os.WIFSIGNALED(status):
        break
    allowed += 1
"""


def test_a_rank_killed_at_any_call_of_its_save_leaves_no_half_checkpoint(memory_path: Path) -> None:
    """kill -9 of the training process itself at every call: what is listed verifies, the older one is always there."""
    root = str(Path(__file__).resolve().parents[2])
    program = KILLED.format(root=root, store=str(memory_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ends = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(ends) > 15 and all(how == signal.SIGKILL for _, how in ends[:-1]) and ends[-1][1] == 0
    store = LocalStore(memory_path)
    names = list_checkpoints(store)
    assert names[-1].step == 1 and names[0].step == 10 + ends[-1][0]
    assert all(verify(store, name.folder).ok for name in names)
    assert len(names) <= 4, "only a death after the manifest's rename leaves a checkpoint"
    assert os.listdir(memory_path)


def resume_twice(rank: Rank, store: str, stages: tuple[int, int]) -> tuple[list[float], str, int]:
    """Steps 3 to 4 and 5 to 6 by two resumed engines; the losses, the digest, and the steps left after them."""
    losses = []
    for stage, until in zip(stages, (4, 6), strict=True):
        engine = Engine.load(store, built(tied), ZeroConfig(stage=stage, micro_batches=4, chunk=2), adamw(), rank.group)
        losses += [result.loss for result in train(engine, until - engine.completed_steps)]
        engine.save(store)
        digest = engine.digest()
        engine.close()
    last = Engine.load(store, built(tied), ZeroConfig(stage=0, micro_batches=4, chunk=2), adamw(), rank.group)
    left = 6 - last.completed_steps
    last.close()
    return losses, digest, left


def test_a_run_resumed_twice_is_the_uninterrupted_run(pool: Pool, memory_path: Path) -> None:
    """Losses and digest as if nothing had happened; after the last step nothing is left to do."""
    config = ZeroConfig(micro_batches=4, chunk=2)
    whole = _uninterrupted(config)
    pool.run(2, _save_at_two, str(memory_path))
    for losses, digest, left in pool.run(3, resume_twice, str(memory_path), (3, 1)):
        assert losses == whole[0][2:] and digest == whole[1] and left == 0


def _uninterrupted(config: ZeroConfig) -> tuple[list[float], str]:
    reference = reference_of(config)
    losses = [result.loss for result in train(reference, 6)]
    return losses, reference.digest()


def _save_at_two(rank: Rank, store: str) -> None:
    engine = engine_of(rank, ZeroConfig(stage=2, micro_batches=4, chunk=2))
    train(engine, 2)
    engine.save(store)
    engine.close()
