"""Whole parameters from shards, unit by unit: state dicts and exports of a running engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from zero_engine.comm import Gather
from zero_engine.digest import tensor_part
from zero_engine.errors import ModelError
from zero_engine.flat import write_values
from zero_engine.group import require_equal
from zero_engine.layout import ITEM_BYTES, Entry, Piece, Range
from zero_engine.manifest import CheckpointError
from zero_engine.state import DTYPES, Subject, bytes_of
from zero_engine.store import LocalStore, StoreError
from zero_engine.tensorfile import Entry as FileEntry
from zero_engine.tensorfile import encode_header


def full_state_dict(subject: Subject, kind: str = "parameter") -> dict[str, Tensor]:
    """Every parameter under all its names (tied ones share one tensor) and every buffer, on the host.

    `kind`: a moment's name gives that in place of the parameters that train ("ema" of `EMA`).
    """
    found: dict[str, Tensor] = {}
    for entry, tensor in whole_parameters(subject, kind):
        declared = tensor.to(getattr(torch, entry.spec.dtype), copy=True)
        found |= dict.fromkeys((entry.spec.name, *entry.spec.aliases), declared)
    return found | {name: buffer.detach().cpu().clone() for name, buffer in subject.buffers().items()}


def load_full_state_dict(subject: Subject, state: Mapping[str, Tensor]) -> None:
    """Write this rank's part of whole weights, and every buffer; collective. Raises ModelError, or DivergedError for
    ranks with other weights, before anything is written.
    """
    layout, buffers = subject.layout, subject.buffers()
    entries = {name: entry for entry in layout.entries for name in (entry.spec.name, *entry.spec.aliases)}
    shapes = {name: entry.spec.shape for name, entry in entries.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    for name in (*state, *shapes):
        if name not in shapes:
            raise ModelError(f"the model has no parameter or buffer '{name}'")
        if name not in state:
            raise ModelError(f"'{name}' is missing from the state to load")
        if tuple(state[name].shape) != shapes[name]:
            raise ModelError(f"'{name}' has shape {tuple(state[name].shape)} in the state, {shapes[name]} in the model")
    values = [state[entry.spec.name].detach().reshape(-1) for entry in layout.canonical_entries]
    parts = [tensor_part("loaded", number, 0, each) for number, each in enumerate(values)]
    require_equal(subject.comm, layout, parts, subject.device, "in the state to load; give all ranks the same")
    subject.unlock()
    for piece in subject.master.pieces:
        target = subject.master.tensors(piece.run, piece.range)["parameter"]
        write_values(layout, piece.run, piece.range, target, lambda entry: state[entry.spec.name])
    for piece, target in subject.frozen():
        write_values(layout, piece.run, piece.range, target, lambda entry: state[entry.spec.name])
    for name, buffer in buffers.items():
        buffer.copy_(state[name])


def export_safetensors(subject: Subject, path: str | os.PathLike[str]) -> None:
    """Rank 0 writes the file, atomically; the others only send. Raises CheckpointError on all when it cannot."""
    target, problem = Path(path).absolute(), ""
    parameters = whole_parameters(subject)
    if subject.comm.rank == 0:
        try:
            _write(subject, target, parameters)
        except StoreError as error:
            problem = str(error)
    for _ in parameters:
        continue  # what rank 0 did not take, and all of it elsewhere: gathers are collective
    problem = subject.agreement.first(problem, f"export to {target.name}")
    if problem:
        raise CheckpointError(f"the export failed at {problem}")


def whole_parameters(subject: Subject, kind: str = "parameter") -> Iterator[tuple[Entry, Tensor]]:
    """Each parameter with its values on the host, in its shape: fp32 masters, frozen ones as kept. Collective.

    In flat order; one unit is held at a time, and a tensor is valid until the next is asked for.
    """
    layout, comm = subject.layout, subject.comm
    subject.agreement.tell("", "whole parameters")
    pieces = [layout.pieces(rank, comm.ranks) for rank in range(comm.ranks)]
    sizes = [[_unit_bytes(subject, own, unit.index) for own in pieces] for unit in layout.units]
    buffer = comm.allocate("whole unit", [max(sizes[u][rank] for u in range(len(sizes))) for rank in range(comm.ranks)])
    whole = torch.empty(max(map(sum, sizes)), dtype=torch.uint8, device=subject.device)
    for unit in layout.units:
        comm.reclaim(buffer)
        _write_own(subject, unit.index, buffer.local, kind)
        comm.publish(buffer, f"whole unit {unit.index}")
        places = _back_to_back(sizes[unit.index])
        sources = tuple(Range(0, len(place)) for place in places)
        comm.gather(buffer, Gather(sources, places, f"whole unit {unit.index}"), whole, "export")
        comm.release(buffer)
        yield from _parameters_of(subject, unit.index, pieces, places, whole)
    comm.reclaim(buffer)


def _write(subject: Subject, target: Path, parameters: Iterator[tuple[Entry, Tensor]]) -> None:
    layout, buffers = subject.layout, subject.buffers()
    entries = [FileEntry(entry.spec.name, _stored(subject, entry), entry.spec.shape) for entry in layout.entries]
    entries += [FileEntry(name, DTYPES[buffer.dtype], tuple(buffer.shape)) for name, buffer in buffers.items()]
    tied = {alias: entry.spec.name for entry in layout.entries for alias in entry.spec.aliases}
    header, _ = encode_header(entries, {"format": "pt"} | ({"tied": json.dumps(tied)} if tied else {}))
    with LocalStore(target.parent).create(target.name) as writer:
        writer.write(header)
        for _, tensor in parameters:
            writer.write(bytes_of(tensor.contiguous()))
        for buffer in buffers.values():
            writer.write(bytes_of(buffer.detach().cpu().contiguous()))


def _write_own(subject: Subject, unit: int, target: Tensor, kind: str) -> None:
    """This rank's pieces of a unit, one after the other."""
    position = 0
    for piece in subject.layout.pieces(subject.comm.rank, subject.comm.ranks):
        if piece.unit == unit:
            tensors = subject.master.tensors(piece.run, piece.range)
            values = tensors.get(kind, tensors["parameter"])
            size = values.numel() * values.element_size()
            target[position : position + size].view(values.dtype).copy_(values)
            position += size


def _parameters_of(
    subject: Subject, unit: int, pieces: list[tuple[Piece, ...]], places: tuple[Range, ...], whole: Tensor
) -> Iterator[tuple[Entry, Tensor]]:
    """Put each parameter of a unit together from the ranks' pieces."""
    starts = [place.start for place in places]
    parts = list[tuple[Piece, int]]()  # a piece and its first byte in `whole`
    for own, start in zip(pieces, starts, strict=True):
        position = start
        for piece in own:
            if piece.unit == unit:
                parts.append((piece, position))
                position += len(piece.range) * _item_bytes(subject, piece)
    for entry in subject.layout.entries_of(unit):
        yield entry, _assemble(subject, entry, parts, whole)


def _assemble(subject: Subject, entry: Entry, parts: list[tuple[Piece, int]], whole: Tensor) -> Tensor:
    dtype = _dtype(subject, entry.run)
    values = torch.empty(entry.spec.numel, dtype=dtype)
    for piece, start in parts:
        common = piece.range.meet(entry.range)
        if piece.run == entry.run and len(common):
            first = start + (common.start - piece.range.start) * dtype.itemsize
            data = whole[first : first + len(common) * dtype.itemsize].view(dtype)
            values[common.start - entry.start : common.stop - entry.start].copy_(data)
    return values.view(entry.spec.shape)


def _back_to_back(sizes: list[int]) -> tuple[Range, ...]:
    places, position = list[Range](), 0
    for size in sizes:
        places.append(Range(position, position + size))
        position += size
    return tuple(places)


def _unit_bytes(subject: Subject, pieces: tuple[Piece, ...], unit: int) -> int:
    return sum(len(piece.range) * _item_bytes(subject, piece) for piece in pieces if piece.unit == unit)


def _item_bytes(subject: Subject, piece: Piece) -> int:
    return _dtype(subject, piece.run).itemsize


def _dtype(subject: Subject, run: int) -> torch.dtype:
    """fp32 masters of what trains; frozen values as they are kept."""
    kept = subject.layout.runs[run]
    if kept.trainable:
        return torch.float32
    name = subject.config.compute_dtype if kept.dtype == "float32" else kept.dtype
    assert name in ITEM_BYTES
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _stored(subject: Subject, entry: Entry) -> str:
    return DTYPES[_dtype(subject, entry.run)]
