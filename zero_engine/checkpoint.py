"""Saving and loading an engine's whole state: any number of ranks and any stage to any other, the same bits.

`save` is collective and returns when the checkpoint is published. `load` takes the newest checkpoint that verifies and
says why it passed over newer ones. Each rank writes what it owns and reads only what it needs, straight into the memory
where it belongs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

from torch import Tensor

from zero_engine.catalog import CheckpointName, is_published, list_checkpoints, next_fence, read_manifest
from zero_engine.errors import UsageError
from zero_engine.layout import ParameterSpec
from zero_engine.manifest import (
    Arithmetic,
    CheckpointError,
    Manifest,
    NotPublished,
    Progress,
    Unfit,
    folder_name,
    parse_folder,
)
from zero_engine.reshard import Run
from zero_engine.shard import (
    BUFFER,
    NamedSource,
    Record,
    Source,
    publish,
    put_record,
    wait_for_records,
    write_shard,
)
from zero_engine.state import DTYPES, Subject, block_bytes, bytes_of
from zero_engine.state_reader import read_state
from zero_engine.store import Store, StoreAway, StoreError, as_store

Place = Store | str | os.PathLike[str]

Fault = Literal["damaged", "missing", "unfit"]  # read and found wrong; without a manifest; of another model or build

NEW, PUBLISHED = "new", "published"
PATIENCE_SECONDS = 60.0  # for a record that its writer calls durable


@dataclass(frozen=True)
class Refused:
    """A checkpoint that was passed over, and why."""

    folder: str
    reason: str
    fault: Fault


class NoneUsable(CheckpointError):
    """No checkpoint of a store can be used."""

    refused: tuple[Refused, ...] = ()  # each that was tried


@dataclass(frozen=True)
class Loaded:
    """What a load took, and what a person should know about it."""

    manifest: Manifest
    refused: tuple[Refused, ...]  # newer ones that could not be used
    changes: tuple[
        str, ...
    ]  # kind of optimizer, seed, V, C, precision and environment that differ from the run that saved


class Checkpoints:
    """Collective save and load of one engine."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._agreement = subject.agreement
        self._calls = 0  # saves asked for; the same on every rank

    def resolve(self, place: Place, fence: int | None) -> tuple[Store, int]:
        """The store, and the fence on which all ranks agree; None takes one above all in the store."""
        store = as_store(place)
        found = fence or 0
        if fence is None:
            word, problem = "", ""
            if self._subject.comm.rank == 0:
                try:
                    word = str(next_fence(store))
                except StoreError as error:
                    problem = str(error)
            self._raise(problem, "save: list")
            found = int(self._agreement.tell(word, "save: fence")[0])
        return store, found

    def save(self, place: Place, step: int, fence: int | None = None, progress: Progress | None = None) -> Manifest:
        """Save the state after `step` and return the published manifest, on every rank.

        `fence` is the number of the attempt; None takes one above all in the store. Saving the same step again in the
        same attempt returns what is there. Raises CheckpointError on every rank when any rank failed; then nothing was
        published and older checkpoints are as they were.
        """
        subject, store = self._subject, as_store(place)
        self._calls += 1
        with subject.comm.ledger.on("save"):
            state, folder = self._open(store, step, fence)
            if state == NEW:
                self._write(store, draft_of(subject, step, _fence_in(folder), progress or Progress()))
            manifest = read_manifest(store, folder)
            if state == PUBLISHED and manifest.digest != self._digest():
                raise CheckpointError(f"{folder} already holds another state; save under a new fence")
        return manifest

    def load(self, place: Place, step: int | None = None, folder: str | None = None) -> Loaded:
        """Restore the newest checkpoint that verifies, or the newest of `step`, or `folder` or what came before it.

        Raises NoneUsable when there is none, with the reason for each that was tried, and StoreAway when the store does
        not answer; the engine's state is then undefined.
        """
        subject, store = self._subject, as_store(place)
        refused = list[Refused]()
        with subject.comm.ledger.on("load"):
            subject.unlock()
            for candidate in self._candidates(store, step, folder):
                found = self._try_load(store, candidate)
                if isinstance(found, Manifest):
                    return Loaded(found, tuple(refused), tuple(changes(found, subject)))
                refused.append(found)
        raise _none_usable(store, step, refused)

    def _open(self, store: Store, step: int, fence: int | None) -> tuple[str, str]:
        """NEW or PUBLISHED, and the folder: rank 0's word for all."""
        word, problem = "", ""
        if self._subject.comm.rank == 0:
            try:
                folder = folder_name(step, next_fence(store) if fence is None else fence)
                word = f"{PUBLISHED if is_published(store, folder) else NEW} {folder}"
            except StoreError as error:
                problem = str(error)
        self._raise(problem, f"save {step}: open")
        state, folder = self._agreement.tell(word, f"save {step}: folder")[0].split(" ")
        return state, folder

    def _digest(self) -> str:
        """Of the state that the engine holds now."""
        part = self._subject.digest_part(self._subject.owned(), self._subject.scalars())
        parts = self._agreement.tell(str(part), "save: digest")
        return f"{sum(map(int, parts)) % 2**64:016x}"

    def _write(self, store: Store, draft: Manifest) -> None:
        subject, problem, topic = self._subject, "", f"save {draft.step}"
        ticket = f"{draft.folder}, call {self._calls}"
        try:
            _write_own(store, draft, subject, ticket)
        except (StoreError, CheckpointError) as error:
            problem = str(error)
        self._raise(problem, f"{topic}: shards")
        if subject.comm.rank == 0:
            try:
                publish(store, draft, wait_for_records(store, draft.folder, draft.ranks, ticket, PATIENCE_SECONDS))
            except (StoreError, CheckpointError) as error:
                problem = str(error)
        self._raise(problem, f"{topic}: manifest")

    def _candidates(self, store: Store, step: int | None, folder: str | None) -> list[str]:
        """Folders to try, newest first, as rank 0 sees the store."""
        found, problem = list[str](), ""
        if self._subject.comm.rank == 0:
            try:
                found = candidates(list_checkpoints(store), step, folder)
            except StoreError as error:
                problem = str(error)
        self._raise(problem, "load: list", StoreError)
        names = list[str]()
        for index in range(int(self._agreement.tell(str(len(found)), "load: count")[0])):
            names += self._agreement.tell(found[index] if found else "", "load: name")[:1]
        return names

    def _try_load(self, store: Store, folder: str) -> Manifest | Refused:
        """Every rank reads its part; one that cannot makes all refuse the checkpoint, with its reason."""
        reason, away, fault, manifest = "", "", "", None
        try:
            manifest = read_manifest(store, folder)
            check_fit(manifest, self._subject)
            read_state(store, manifest, self._subject)
        except CheckpointError as error:
            reason, fault = str(error), _fault_of(error)
        except StoreError as error:
            away = str(error)  # says nothing about the checkpoint: falling back would lose steps
        self._raise(away, f"load {folder}: store", StoreAway)
        reason = self._agreement.first(reason, f"load {folder}")
        if reason or manifest is None:
            faults = self._agreement.tell(fault, f"load {folder}: fault")
            return Refused(folder, reason, next(each for each in get_args(Fault) if each in faults))
        self._subject.restore(manifest.scalars)
        return manifest

    def _raise(self, problem: str, topic: str, kind: type[Exception] = CheckpointError) -> None:
        """Raise the first problem of any rank on all of them."""
        found = self._agreement.first(problem, topic)
        if found:
            raise kind(f"{topic.split(':')[0]} failed at {found}")


def candidates(names: Sequence[CheckpointName], step: int | None, folder: str | None) -> list[str]:
    """Folders to try in order, from `names`, newest first. A named folder comes first, then those that are older."""
    if folder is None:
        return [name.folder for name in names if step is None or name.step == step]
    place = parse_folder(folder)
    if place is None:
        return [folder]
    return [folder, *(name.folder for name in names if (name.fence, name.step) < (place[1], place[0]))]


def draft_of(subject: Subject, step: int, fence: int, progress: Progress) -> Manifest:
    """The manifest before its shards. Raises UsageError when the progress is not JSON."""
    try:
        json.dumps([progress.extra, progress.schedule], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"progress must be plain JSON, with non-finite numbers as text: {error}") from error
    micro_batches, chunk = subject.config.batch_shape
    return Manifest(
        step=step,
        fence=fence,
        ranks=subject.comm.ranks,
        stage=subject.config.stage,
        digest="",
        arithmetic=Arithmetic(subject.config.seed, micro_batches, chunk, subject.config.precision),
        environment=subject.environment,
        layout=subject.layout,
        optimizer={"kind": type(subject.optimizer).__name__, "moments": list(subject.moments)},
        scalars=subject.scalars(),
        progress=progress,
        shards=(),
        created=datetime.now(UTC).isoformat(),
    )


def check_fit(manifest: Manifest, subject: Subject) -> None:
    """Raises Unfit naming the first parameter, or the optimizer state, that does not fit this engine."""
    if manifest.moments != subject.moments:
        raise Unfit(
            f"{manifest.folder} holds {manifest.optimizer['kind']} with {list(manifest.moments)}; "
            f"this engine's {type(subject.optimizer).__name__} keeps {list(subject.moments)}"
        )
    theirs, ours = manifest.layout, subject.layout
    if theirs.to_json() == ours.to_json():
        return
    then = {entry.spec.name: entry.spec for entry in theirs.canonical_entries}
    now = {entry.spec.name: entry.spec for entry in ours.canonical_entries}
    for name in dict.fromkeys((*then, *now)):
        if then.get(name) != now.get(name):
            raise Unfit(f"{manifest.folder} does not fit: {_difference(name, then.get(name), now.get(name))}")
    raise Unfit(f"{manifest.folder} has the model's parameters in another order")


def _difference(name: str, then: ParameterSpec | None, now: ParameterSpec | None) -> str:
    if then is None or now is None:
        return f"parameter '{name}' is only in the {'model' if then is None else 'checkpoint'}"
    fields = [field for field in vars(then) if getattr(then, field) != getattr(now, field)]
    words = [
        f"{field} {getattr(then, field)!r} in the checkpoint, {getattr(now, field)!r} in the model" for field in fields
    ]
    return f"parameter '{name}' has {'; '.join(words)}"


def changes(manifest: Manifest, subject: Subject) -> list[str]:
    """What may let the bits part from the run that saved, in words."""
    micro_batches, chunk = subject.config.batch_shape
    now = {
        "optimizer": type(subject.optimizer).__name__,
        **vars(Arithmetic(subject.config.seed, micro_batches, chunk, subject.config.precision)),
        **vars(subject.environment),
    }
    then = {"optimizer": manifest.optimizer["kind"], **vars(manifest.arithmetic), **vars(manifest.environment)}
    return [f"{name} was {then[name]}, is {now[name]}" for name in then if then[name] != now[name]]


def _write_own(store: Store, draft: Manifest, subject: Subject, ticket: str) -> None:
    """This rank's shard, then its record. Looking at the values overlaps with waiting for the disk."""
    state = list(subject.owned())
    with ThreadPoolExecutor(1) as looker:
        looked = looker.submit(subject.digest_part, state, draft.scalars)
        sources, named = _memory_of(subject, state)
        shard = write_shard(store, draft.folder, subject.comm.rank, sources, named, approve=looked.result)
        put_record(store, draft.folder, Record(shard, looked.result(), ticket))


def _memory_of(subject: Subject, state: Sequence[tuple[Run, Tensor]]) -> tuple[list[Source], list[NamedSource]]:
    """This rank's state as host memory."""
    sources, named = list[Source](), list[NamedSource]()
    for run, tensor in state:
        size = block_bytes(subject.layout, tensor)
        sources.append(Source(run.kind, DTYPES[tensor.dtype], run.first, size, bytes_of(tensor.detach().cpu())))
    if subject.comm.rank == 0:
        for name, buffer in subject.buffers().items():
            data = bytes_of(buffer.detach().cpu().contiguous())
            named.append(NamedSource(BUFFER + name, DTYPES[buffer.dtype], tuple(buffer.shape), data))
    return sources, named


def _fence_in(folder: str) -> int:
    return int(folder.rsplit("-", 1)[1])


def _fault_of(error: CheckpointError) -> Fault:
    if isinstance(error, NotPublished):
        return "missing"
    return "unfit" if isinstance(error, Unfit) else "damaged"


def _none_usable(store: Store, step: int | None, refused: list[Refused]) -> NoneUsable:
    if not refused:
        wanted = "" if step is None else f" of step {step}"
        return NoneUsable(f"there is no checkpoint{wanted} in {store.url}")
    tried = "; ".join(f"{item.folder}: {item.reason}" for item in refused)
    error = NoneUsable(f"no checkpoint in {store.url} can be used: {tried}")
    error.refused = tuple(refused)
    return error
