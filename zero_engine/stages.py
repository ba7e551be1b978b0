"""The table from a stage's number to its strategy."""

from __future__ import annotations

from zero_engine.stage0 import NoShard
from zero_engine.stage1 import ShardedStates
from zero_engine.stage2 import ShardedGradients
from zero_engine.stage3 import ShardedParameters
from zero_engine.strategy import ShardingStrategy

STRATEGIES: dict[int, type[ShardingStrategy]] = {
    0: NoShard,
    1: ShardedStates,
    2: ShardedGradients,
    3: ShardedParameters,
}
