"""Who trains together: the group, this rank's place in it, the transport between its ranks, and equal beginnings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist

from zero_engine.adamw import Optimizer
from zero_engine.comm import Comm, Gather, reason_of
from zero_engine.comm_group import GroupComm
from zero_engine.comm_shm import connect
from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError, DivergedError, EngineError, PeerError, UsageError
from zero_engine.gloo_wire import GlooWire
from zero_engine.layout import Layout, Range
from zero_engine.sockets import place
from zero_engine.wire import Bell, NcclWire, NoWire, meeting_place

UNLIKE_WEIGHTS = "before the first step; seed all ranks alike before building the model, or use broadcast=True"


@dataclass(frozen=True)
class Membership:
    """A process group seen from one rank. Without torch.distributed: a group of one."""

    group: dist.ProcessGroup | None
    rank: int
    ranks: int


def membership_of(group: dist.ProcessGroup | None) -> Membership:
    """Raises UsageError where a launcher promised more ranks than have met."""
    if dist.is_available() and dist.is_initialized():
        return Membership(group, dist.get_rank(group), dist.get_world_size(group))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("WORLD_SIZE is above 1 but no process group exists; call torch.distributed.init_process_group")
    return Membership(None, 0, 1)


def require_equal_settings(member: Membership, config: ZeroConfig, optimizer: Optimizer) -> None:
    """Compare what the ranks were given; collective. Raises DivergedError naming the first difference."""
    if member.ranks == 1:
        return
    own = {f"config.{name}": repr(value) for name, value in asdict(config).items()}
    own["optimizer"] = type(optimizer).__name__
    for group, (update, lr) in enumerate(optimizer.updates()):
        known: list[str] = [each.name for each in fields(update) if each.repr] if is_dataclass(update) else []
        settings = {name: getattr(update, name) for name in known} | {"lr": lr}
        own |= {f"optimizer.groups[{group}].{name}": repr(value) for name, value in settings.items()}
    if words := unlike(member, own):
        raise DivergedError(f"{words}; give all ranks the same")


def unlike(member: Membership, own: Mapping[str, str]) -> str:
    """The first of `own` (values by name) that a rank has otherwise than rank 0, in words; empty when all are the same.
    Collective. Raises PeerError when another rank has gone, with what it refused.
    """
    everybody: list[Any] = [None] * member.ranks
    try:
        dist.all_gather_object(everybody, own, group=member.group)
    except RuntimeError as error:
        raise _gone(member, error) from error
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for name in dict.fromkeys((*first, *other)):
            if first.get(name) != other.get(name):
                here, there = (known.get(name, "not there") for known in (first, other))
                return f"{name} is {here} on rank 0 and {there} on rank {rank}"
    return ""


@contextmanager
def refusals_told(member: Membership) -> Iterator[None]:
    """What this rank refuses inside the block is what the others hear, who wait for it, when it goes."""
    _write(member, "")
    try:
        yield
    except EngineError as error:
        _write(member, f"{type(error).__name__}: {error}")
        raise


def _write(member: Membership, words: str) -> None:
    if member.ranks > 1:
        _board(member).set(str(member.rank), words)


def _board(member: Membership) -> Any:
    """A part of the default store for the words of a group's ranks."""
    prefix: Any = getattr(dist, "PrefixStore")  # noqa: B009  not in torch's list of exports
    ranks = "-".join(map(str, dist.get_process_group_ranks(member.group)))
    return prefix(f"zero_engine refusals {ranks}", dist.distributed_c10d._get_default_store())


def _gone(member: Membership, error: RuntimeError) -> PeerError:
    """A rank has left before it was built: why, if it said so."""
    board = _board(member)
    for rank in range(member.ranks):
        with suppress(RuntimeError):  # the store may be gone too
            if board.check([str(rank)]) and (words := board.get(str(rank)).decode()):
                return PeerError(reason_of(rank, words))
    return PeerError(f"a rank of the group is gone: {error}")


def comm_between(member: Membership, device: torch.device, config: ZeroConfig) -> Comm:
    """The transport that `config.transport` asks for; "auto" is shared memory where all ranks can share it."""
    if member.ranks == 1 or config.transport == "group" or device.type != "cpu":
        if config.transport == "shared" and member.ranks > 1:
            raise ConfigError(f"transport 'shared' needs CPU ranks, this one is on {device}; use 'auto'")
        return _messages(member, device)
    shared = connect(member.group, member.rank, member.ranks)
    if shared is None and config.transport == "shared":
        raise ConfigError("transport 'shared' needs all ranks on one machine and of one user; use 'auto'")
    return shared or _messages(member, device)


def _messages(member: Membership, device: torch.device) -> GroupComm:
    """Messages between the ranks of a group; on loopback where all stand on one machine."""
    if member.ranks == 1:
        return GroupComm(NoWire(), 0, 1, device, Bell(None))
    group: Any = dist.group.WORLD if member.group is None else member.group
    store = meeting_place(group)
    if device.type != "cpu":
        return GroupComm(NcclWire(group, member.ranks), member.rank, member.ranks, device, Bell(store))
    places: list[Any] = [None] * member.ranks
    dist.all_gather_object(places, place(), group=group)
    interface = "lo" if len(set(places)) == 1 else None
    wire = GlooWire(store, member.rank, member.ranks, interface)
    return GroupComm(wire, member.rank, member.ranks, device, Bell(store))


def node_mark() -> int:
    """A number that the ranks of one machine have in common."""
    return int(hashlib.sha256(repr(place()).encode()).hexdigest()[:12], 16)


def builds_here(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this rank is the first of its machine: the one to build, on the CPU, a model that cannot be made in
    parts, while the others build it on the meta device. A collective call.
    """
    member = membership_of(group)
    if member.ranks == 1:
        return True
    marks: list[Any] = [None] * member.ranks
    dist.all_gather_object(marks, node_mark(), group=group)
    return marks.index(marks[member.rank]) == member.rank


def require_equal(
    comm: Comm, layout: Layout, parts: Sequence[int], device: torch.device, words: str = UNLIKE_WEIGHTS
) -> None:
    """Compare a 64-bit number per parameter (by number) over all ranks; collective.

    Raises DivergedError naming the first difference, and `words`.
    """
    signed = torch.tensor([part - (1 << 64) if part >= 1 << 63 else part for part in parts], dtype=torch.int64)
    rows = tell_all(comm, signed.to(device))
    for rank, row in enumerate(rows):
        for entry, same in zip(layout.canonical_entries, (row == rows[0]).tolist(), strict=True):
            if not same:
                raise DivergedError(f"parameter '{entry.spec.name}' differs between rank 0 and rank {rank} {words}")


def tell_all(comm: Comm, values: torch.Tensor) -> list[torch.Tensor]:
    """Everybody's `values` (1-D int64, equal lengths), rank by rank."""
    size = 8 * values.numel()
    buffer = comm.allocate("tell", [size] * comm.ranks)
    buffer.local.copy_(values.view(torch.uint8))
    target = torch.empty(size * comm.ranks, dtype=torch.uint8, device=values.device)
    comm.publish(buffer, "comparing initial weights")
    places = tuple(Range(rank * size, (rank + 1) * size) for rank in range(comm.ranks))
    comm.gather(buffer, Gather((Range(0, size),) * comm.ranks, places, "initial weights"), target, "compare")
    comm.release(buffer)
    comm.reclaim(buffer)
    return [target[place.start : place.stop].view(torch.int64).cpu() for place in places]
