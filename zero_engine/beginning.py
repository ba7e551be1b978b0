"""How an engine begins: the ranks tell each other what model they were given, and agree where first values come from.

built on every rank                      compare a hash per parameter (`broadcast=True`: take rank 0's)
on the meta device on every rank         every rank makes one unit at a time and keeps its part
built on some, on the meta device else   the first rank of each node that has it sends one unit at a time, through the
                                         node's memory; where a node has none, the first of all sends to everybody
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from zero_engine.comm import Comm
from zero_engine.comm_shm import connect_node
from zero_engine.config import ZeroConfig
from zero_engine.digest import tensor_part
from zero_engine.errors import DivergedError, ModelError
from zero_engine.first_values import (
    Built,
    ByModule,
    ByName,
    FirstValues,
    Initial,
    Made,
    Sent,
    SentOnNode,
    send_buffers,
)
from zero_engine.group import Membership, node_mark, require_equal, tell_all, unlike
from zero_engine.hollow import Hollowed, hollow, is_meta, move_buffers
from zero_engine.layout import Layout


def place_of(model: nn.Module, member: Membership, wanted: torch.device | str | None) -> torch.device:
    """Where to train: as wanted; where the model stands; for one on the meta device a GPU under NCCL, else the CPU.

    Raises ModelError when parameters stand on several devices.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 and not is_meta(model):
        raise ModelError(f"parameters stand on {sorted(map(str, devices))}; move the model to one device first")
    if wanted is not None:
        return torch.device(wanted)
    if not is_meta(model):
        return devices.pop() if devices else torch.device("cpu")
    if member.ranks > 1 and dist.get_backend(member.group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def begin(
    comm: Comm,
    member: Membership,
    layout: Layout,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    config: ZeroConfig,
    device: torch.device,
    initial: Initial | None,
) -> FirstValues:
    """Agree; the model has real parameters and buffers on `device` after it. `parameters`: by number. Collective.

    Raises DivergedError for ranks with different models or values, ModelError where nothing can give the values.
    """
    empty = is_meta(model)
    given = _given(comm, member, layout, model, empty, device)
    built = [rank for rank, each in enumerate(given) if each.built]
    hollowed = hollow(model, device) if empty else Hollowed({}, ())
    move_buffers(model, device)
    if not built:
        make = ByModule(model, config.seed, hollowed.writes) if initial is None else ByName(model, initial)
        make.fill_buffers(hollowed.buffers)
        return Made(comm, layout, make, device)
    sources = {each.node: rank for rank, each in reversed([*enumerate(given)]) if each.built}
    if len(built) < comm.ranks and len(sources) > 1 and not config.broadcast and all(e.node in sources for e in given):
        nodes = [each.node for each in given]
        node = connect_node(member.group, comm.rank, nodes)
        node.ledger, source = comm.ledger, nodes[: sources[nodes[comm.rank]]].count(nodes[comm.rank])
        send_buffers(node, model, source)
        return SentOnNode(comm, Sent(node, layout, source, parameters, torch.device("cpu")), device)
    if len(built) < comm.ranks:
        send_buffers(comm, model, built[0])
    if len(built) < comm.ranks or (config.broadcast and comm.ranks > 1):
        return Sent(comm, layout, built[0], parameters, device)
    values = [parameter.detach().reshape(-1) for parameter in parameters]
    parts = [tensor_part("initial", number, 0, each) for number, each in enumerate(values)]
    require_equal(comm, layout, parts, device)
    return Built(parameters)


@dataclass(frozen=True)
class _Given:
    """What one rank was given."""

    built: bool  # else on the meta device
    node: int


def _given(
    comm: Comm, member: Membership, layout: Layout, model: nn.Module, empty: bool, device: torch.device
) -> list[_Given]:
    """By rank. Raises DivergedError when the models are not the same."""
    buffers = [(name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in model.named_buffers()]
    mark = int(hashlib.sha256(f"{layout.fingerprint} {buffers}".encode()).hexdigest()[:12], 16)
    rows = tell_all(comm, torch.tensor([mark, int(empty), node_mark()], dtype=torch.int64, device=device))
    if any(row[0] != rows[0][0] for row in rows):
        specs = [each.spec for each in layout.canonical_entries]
        parts = {
            f"{what} of parameter '{spec.name}'": repr(value) for spec in specs for what, value in vars(spec).items()
        }
        parts |= {f"buffer '{name}'": f"{shape} {dtype}" for name, shape, dtype in buffers}
        words = unlike(member, parts) or "the order of parameters differs"
        raise DivergedError(f"the ranks built different models: {words}")
    return [_Given(not row[1], int(row[2])) for row in rows]
