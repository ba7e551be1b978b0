"""A layout cut for one configuration and group: every size and message in bytes, which all others derive theirs from.

The engine allocates by these sizes and its ledger counts these messages; tests hold both to the byte. Torch-free:
shapes and settings are enough. What a stage adds stands in the tables at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from zero_engine.buckets import Bucket, buckets_of, leaf_dtype
from zero_engine.config import ZeroConfig
from zero_engine.fold import schedule_of
from zero_engine.layout import ITEM_BYTES, Layout
from zero_engine.windows import NUM_SLOTS, gathers_of_step

CATEGORIES = ("parameters", "gradients", "sums", "master", "moments", "buckets", "slots", "other")
STRIDE = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements folded at a time: what fits a core's cache, what fills a GPU
UPDATE_STRIDE = {"cpu": 1 << 17, "cuda": 1 << 23}  # updated at a time: all is read once, so what makes a call worth it
BUS = {"cpu": False, "cuda": True}  # whether host memory is apart from the device's
RETURN_SLOTS = 2  # strides of cast-down weights on their way from an offloaded update, or being filled


@dataclass(frozen=True)
class Mail:
    """The small message of the norm exchange: flag, losses and weights, touched parameters, own block sums."""

    flag: int
    loss: int
    touched: int
    norm: int

    @property
    def total(self) -> int:
        return self.flag + self.loss + self.touched + self.norm


@dataclass(frozen=True)
class Sizes:
    """Everything one rank allocates, in bytes, and where things stand."""

    parameters: int
    gradients: int
    total_sums: int  # fp32 totals: of the shard, or of everything where stage 0 cannot use its gradient buffer
    chunk_sums: int
    master: int
    moments: int
    root_bucket: int
    pool_bucket: int  # one of `num_pool_buckets`
    num_pool_buckets: int
    root_slot: int
    slot: int  # one of `num_slots`
    num_slots: int
    staging: int  # of the group transport: two sets of one slice from every other rank, as fp32
    scratch: int
    mail: int  # own message and everybody's
    pinned: int  # host memory of an offloaded update: masters, moments, and sums and weights on their way
    updated: int  # elements of its update
    reduced: int = 0  # fp32 sums of everything, which a naive reducer gives to every rank

    @property
    def memory(self) -> dict[str, int]:
        """By category; "pinned" (host memory) only where the update is offloaded."""
        host = {"pinned": self.pinned} if self.pinned else {}
        return host | {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "sums": self.total_sums + self.chunk_sums + self.reduced,
            "master": self.master,
            "moments": self.moments,
            "buckets": self.root_bucket + self.pool_bucket * self.num_pool_buckets,
            "slots": self.root_slot + self.slot * self.num_slots,
            "other": self.staging + self.scratch + self.mail,
        }


class Blueprint:
    """A layout cut for one config and group: what plan, strategies and tests derive their numbers from."""

    def __init__(
        self, layout: Layout, config: ZeroConfig, ranks: int, transport: str, device: str = "cpu", moments: int = 2
    ) -> None:
        self.layout, self.config, self.ranks = layout, config.resolved(ranks), ranks
        self.transport, self.device, self.num_moments = transport, device, moments
        self.schedule = schedule_of(*self.config.batch_shape, ranks, by_unit=config.stage >= 2)
        self.buckets = buckets_of(layout, config.compute_dtype, ranks)
        self.stride = max(layout.block, min(STRIDE[device], layout.padded))
        self.update_stride = max(layout.block, min(UPDATE_STRIDE[device], layout.padded))
        self.slice = max(layout.block, config.bucket_bytes // 4 // layout.block * layout.block)  # elements of a message
        stored_fp32 = self.schedule.widest or all(bucket.dtype == "float32" for bucket in self.buckets)
        self.in_place = config.stage < 2 and stored_fp32 and not self.schedule.carries_total
        self.whole_totals = config.stage == 0 and not stored_fp32
        self.has_pieces = False  # several backward calls per micro-batch are in use
        self.naive = config.reducer == "naive" and config.stage > 0  # stage 0 needs an all-reduce anyway

    def run_item_bytes(self, run: int) -> int:
        """Bytes of one element of compute weights."""
        return ITEM_BYTES[leaf_dtype(self.layout.runs[run].dtype, self.config.compute_dtype)]

    def has_master(self, run: int) -> bool:
        """Whether a run keeps fp32 master weights beside its compute weights."""
        kept = self.layout.runs[run]
        narrow = leaf_dtype(kept.dtype, self.config.compute_dtype) != "float32"
        return kept.trainable and (narrow or self.config.offload == "cpu")

    @property
    def over_bus(self) -> bool:
        """Whether sums and weights of an offloaded update travel while device and host compute."""
        return self.config.offload == "cpu" and BUS[self.device]

    @cached_property
    def return_slot(self) -> int:
        """Bytes of a stride of updated weights, cast down; 0 where masters travel as they are."""
        trainable = [number for number, run in enumerate(self.layout.runs) if run.trainable]
        dtypes = [leaf_dtype(self.layout.runs[number].dtype, self.config.compute_dtype) for number in trainable]
        return self.stride * max((ITEM_BYTES[dtype] for dtype in dtypes if dtype != "float32"), default=0)

    def pinned(self, trainable: int, mastered: int) -> int:
        """Host memory of an offloaded update of so many elements."""
        if self.config.offload != "cpu":
            return 0
        states = 4 * (mastered + trainable * self.num_moments)
        return states + (4 * trainable + RETURN_SLOTS * self.return_slot if self.over_bus else 4 * self.stride)

    def unit_bytes(self, unit: int) -> int:
        """Bytes of a unit's compute weights."""
        runs = self.layout.units[unit].runs
        return sum(len(self.layout.runs[number].range) * self.run_item_bytes(number) for number in runs)

    def buckets_in(self, unit: int) -> tuple[Bucket, ...]:
        """The buckets of one unit."""
        return self._buckets_by_unit[unit]

    @cached_property
    def _buckets_by_unit(self) -> list[tuple[Bucket, ...]]:
        return [tuple(each for each in self.buckets if each.unit == unit.index) for unit in self.layout.units]

    def bucket_bytes(self, unit: int) -> int:
        """Bytes of a unit's gradients as they wait to be exchanged."""
        return sum(bucket.num_bytes(self.schedule.widest) for bucket in self.buckets_in(unit))

    def own_bytes(self, unit: int, rank: int, trainable_only: bool = False) -> int:
        """Bytes of the compute weights of `unit` that `rank` owns."""
        return sum(
            len(piece.range) * self.run_item_bytes(piece.run)
            for piece in self.layout.pieces(rank, self.ranks)
            if piece.unit == unit and (piece.local is not None or not trainable_only)
        )

    def mail(self, rank: int) -> Mail:
        """Bytes of the norm exchange that `rank` sends to each other rank."""
        blocks = self.layout.shard_elements(rank, self.ranks) // self.layout.block
        micro_batches, _ = self.config.batch_shape
        return Mail(8, 16 * micro_batches, 8 * -(-len(self.layout.entries) // 64), 8 * blocks)

    @cached_property
    def mail_of_all(self) -> int:
        """Bytes of everybody's messages together."""
        return sum(self.mail(rank).total for rank in range(self.ranks))

    def sizes(self, rank: int) -> Sizes:
        """What `rank` allocates."""
        sizes = _SIZES[self.config.stage](self, rank)
        pieces = sum(bucket.num_bytes(summed=False) for bucket in self.buckets) if self.has_pieces else 0
        reduced = 4 * sum(bucket.length for bucket in self.buckets) if self.naive else 0
        return replace(sizes, gradients=sizes.gradients + pieces, reduced=reduced)

    def traffic(self, rank: int) -> dict[str, int]:
        """Payload bytes that `rank` sends in a step, by "collective/purpose"; zero entries are left out."""
        mail, others = self.mail(rank), self.ranks - 1
        rows = {
            "exchange/gradients": self._exchanged(rank),
            "gather/gradients": self._spread(rank) if self.naive else 0,
            **_TRAFFIC[self.config.stage](self, rank),
            "gather/flag": mail.flag * others,
            "gather/loss": mail.loss * others,
            "gather/touched": mail.touched * others,
            "gather/norm": mail.norm * others,
        }
        return {purpose: count for purpose, count in rows.items() if count}

    def _spread(self, rank: int) -> int:
        """Sums that the naive reducer sends to ranks that have no use for them, once a round."""
        return 4 * self.layout.shard_elements(rank, self.ranks) * (self.ranks - 1) * len(self.schedule.rounds)

    def _exchanged(self, rank: int) -> int:
        sent = 0
        for round in self.schedule.rounds:
            for fold in round.folds:
                if fold.source == rank:
                    sent += sum(
                        bucket.num_bytes(fold.summed) * (bucket.length - len(bucket.owners[rank])) // bucket.length
                        for bucket in self.buckets
                    )
        return sent

    @property
    def updated_elements(self) -> int:
        """Elements that the rank with the largest update updates."""
        return max(self.sizes(rank).updated for rank in range(self.ranks))

    @property
    def copied_bytes(self) -> int:
        """Own weights that a rank copies into slots in a step, of the rank that copies most."""
        return max(_COPIED[self.config.stage](self, rank) for rank in range(self.ranks))


def _common(blueprint: Blueprint, rank: int, states_of_all: bool) -> Sizes:
    """What every stage needs: compute weights of everything, masters and moments of the owned part or of all."""
    layout = blueprint.layout
    kept = layout.pieces(0, 1) if states_of_all else layout.pieces(rank, blueprint.ranks)
    trainable = sum(len(piece.range) for piece in kept if piece.local is not None)
    mastered = sum(len(piece.range) for piece in kept if blueprint.has_master(piece.run))
    offloaded = blueprint.config.offload == "cpu"
    largest = max((len(part) for bucket in blueprint.buckets for part in bucket.owners), default=0)
    return Sizes(
        parameters=sum(blueprint.unit_bytes(unit.index) for unit in layout.units),
        gradients=0,
        total_sums=0,
        chunk_sums=0,
        master=0 if offloaded else 4 * mastered,
        moments=0 if offloaded else 4 * trainable * blueprint.num_moments,
        root_bucket=0,
        pool_bucket=0,
        num_pool_buckets=0,
        root_slot=0,
        slot=0,
        num_slots=0,
        staging=8 * (blueprint.ranks - 1) * min(blueprint.slice, largest) if blueprint.transport == "group" else 0,
        scratch=max(16 * blueprint.stride, 4 * blueprint.update_stride),
        mail=blueprint.mail(rank).total + blueprint.mail_of_all,
        pinned=blueprint.pinned(trainable, mastered),
        updated=trainable,
    )


def _bulk(blueprint: Blueprint, rank: int, states_of_all: bool) -> Sizes:
    """Stages 0 and 1: gradients of everything, exchanged at the end of a round."""
    shard = 4 * blueprint.layout.shard_elements(rank, blueprint.ranks)
    totals = 4 * blueprint.layout.trainable if blueprint.whole_totals else 0 if blueprint.in_place else shard
    return replace(
        _common(blueprint, rank, states_of_all),
        gradients=sum(blueprint.bucket_bytes(unit.index) for unit in blueprint.layout.units),
        total_sums=totals,
        chunk_sums=shard if blueprint.schedule.carries_chunk else 0,
    )


def _by_unit(blueprint: Blueprint, rank: int) -> Sizes:
    """Stage 2: a standing bucket for the root unit, two for all others."""
    shard = 4 * blueprint.layout.shard_elements(rank, blueprint.ranks)
    units = range(1, len(blueprint.layout.units))
    return replace(
        _common(blueprint, rank, states_of_all=False),
        total_sums=shard,
        chunk_sums=shard if blueprint.schedule.carries_chunk else 0,
        root_bucket=blueprint.bucket_bytes(0),
        pool_bucket=max(map(blueprint.bucket_bytes, units), default=0),
        num_pool_buckets=min(NUM_SLOTS, len(units)),
    )


def _by_slot(blueprint: Blueprint, rank: int) -> Sizes:
    """Stage 3: stage 2, with own pieces of the weights, and slots to gather into."""
    units = range(1, len(blueprint.layout.units))
    return replace(
        _by_unit(blueprint, rank),
        parameters=sum(blueprint.own_bytes(unit.index, rank) for unit in blueprint.layout.units),
        root_slot=blueprint.unit_bytes(0),
        slot=max(map(blueprint.unit_bytes, units), default=0),
        num_slots=min(NUM_SLOTS, len(units)),
    )


def _gathers_totals(blueprint: Blueprint, rank: int) -> dict[str, int]:
    return {"gather/gradients": 4 * blueprint.layout.shard_elements(rank, blueprint.ranks) * (blueprint.ranks - 1)}


def _gathers_updates(blueprint: Blueprint, rank: int) -> dict[str, int]:
    own = sum(blueprint.own_bytes(unit.index, rank, trainable_only=True) for unit in blueprint.layout.units)
    return {"gather/parameters": own * (blueprint.ranks - 1)}


def _gathers_windows(blueprint: Blueprint, rank: int) -> dict[str, int]:
    return {"gather/parameters": _copies_windows(blueprint, rank) * (blueprint.ranks - 1)}


def _copies_windows(blueprint: Blueprint, rank: int) -> int:
    """Own bytes of every gather of a step."""
    counts = gathers_of_step(len(blueprint.layout.units) - 1, len(blueprint.schedule.work(rank)))
    counts[0] = 1  # the root unit comes back once, after the update
    return sum(count * blueprint.own_bytes(unit, rank) for unit, count in enumerate(counts))


def _copies_nothing(blueprint: Blueprint, rank: int) -> int:
    """Weights are where they compute."""
    return 0


_SIZES = {
    0: lambda blueprint, rank: _bulk(blueprint, rank, states_of_all=True),
    1: lambda blueprint, rank: _bulk(blueprint, rank, states_of_all=False),
    2: _by_unit,
    3: _by_slot,
}
_COPIED = {0: _copies_nothing, 1: _copies_nothing, 2: _copies_nothing, 3: _copies_windows}
_TRAFFIC = {0: _gathers_totals, 1: _gathers_updates, 2: _gathers_updates, 3: _gathers_windows}
