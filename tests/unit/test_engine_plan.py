"""The plan from shapes alone."""

from __future__ import annotations

import pytest

from zero_engine.advice import advise
from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.layout import Layout, ParameterSpec
from zero_engine.plan import paper_bytes_per_parameter, plan_of
from zero_engine.windows import BackwardOrder, gathers_of_step


def _gpt(width: int = 256, layers: int = 12) -> Layout:
    specs = [ParameterSpec("tokens", (4096, width))]
    for layer in range(layers):
        specs.append(ParameterSpec(f"blocks.{layer}.mlp", (12 * width, width), unit=f"blocks.{layer}"))
    return Layout.build(specs)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_fp32_bytes_are_the_papers_but_for_buckets_slots_and_scratch(ranks: int) -> None:
    """One micro-batch per rank, fp32: weights, gradients, sums and states are the formula's, to padding."""
    layout = _gpt()
    for stage in range(4):
        plan = plan_of(layout, ZeroConfig(stage), ranks)
        kept = sum(plan.memory[0][name] for name in ("parameters", "gradients", "sums", "master", "moments"))
        assert kept == pytest.approx(plan.paper_bytes, rel=0.02)


def test_the_papers_formula_for_mixed_precision() -> None:
    """Figure 1 of arXiv 1910.02054: 16, 4 + 12/N, 2 + 14/N, 16/N bytes per parameter."""
    assert [paper_bytes_per_parameter(stage, 64) for stage in range(4)] == [16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64]


def test_bf16_keeps_the_sum_until_the_norm_is_known() -> None:
    """Ours, bf16, V/N = 1: 20, 4 + 16/N, 2 + 16/N + buckets, 18/N + slots + buckets."""
    layout, ranks = _gpt(), 4
    expected = [20, 4 + 16 / ranks, 2 + 16 / ranks, 18 / ranks]
    for stage in range(4):
        memory = plan_of(layout, ZeroConfig(stage, precision="bf16"), ranks).memory[0]
        kept = sum(memory[name] for name in ("parameters", "gradients", "sums", "master", "moments"))
        assert kept / layout.num_parameters == pytest.approx(expected[stage], rel=0.02)


def test_a_second_accumulator_stands_only_where_a_chunk_spans_rounds() -> None:
    """Stage 2: C = 1 and C = N need one sum of the shard, C > N needs two."""
    layout = _gpt()

    def sums(chunk: int) -> int:
        return plan_of(layout, ZeroConfig(2, 8, chunk), 2).memory[0]["sums"]

    assert sums(1) == sums(2) and sums(4) == sums(8) == 2 * sums(1)


def test_standing_slots_save_gathers() -> None:
    """Four units: the last two are still there for backward, the first two for the next micro-batch's forward."""
    assert gathers_of_step(4, 1) == [0, 2, 2, 1, 1]
    assert gathers_of_step(4, 2) == [0, 3, 3, 2, 2]


def test_advice_is_least_traffic_that_fits_then_least_bytes() -> None:
    """One micro-batch per rank: stages 0 to 2 send the same, so bytes decide; less memory forces a higher stage."""
    layout = _gpt()
    config = ZeroConfig(micro_batches=8)
    roomy = advise(layout, config, 4, 1 << 34)
    assert roomy.fits and roomy.stage == 1 and "fewest bytes" in roomy.reason
    tight = advise(layout, config, 4, int(roomy.plans[3].largest_memory / 0.9) + 1)
    assert tight.fits and tight.stage in (2, 3)
    none = advise(layout, config, 4, 1 << 20)
    assert not none.fits and "more ranks" in none.reason


def test_more_ranks_than_micro_batches_is_refused_with_both_numbers() -> None:
    """And with the nearest values that work."""
    with pytest.raises(ConfigError, match=r"8 ranks need at least 8.*is 4"):
        plan_of(_gpt(), ZeroConfig(micro_batches=4), 8)


def test_units_finish_in_reverse_order_whatever_was_skipped() -> None:
    """A unit that did not run takes its turn where its number says; one called twice waits for its first call."""
    order = BackwardOrder(4)
    calls = [order.record(unit) for unit in (1, 3, 4)]
    assert order.reach(calls[2]) == [] and order.reach(calls[1]) == [4]
    assert order.reach(calls[0]) == [3, 2] and order.rest() == [1]
    twice = [order.record(unit) for unit in (1, 2, 1, 3)]
    assert order.reach(twice[3]) == [4] and order.reach(twice[2]) == [3] and order.reach(twice[1]) == []
    assert order.reach(twice[0]) == [2] and order.rest() == [1]


def test_pinned_memory_is_the_hosts_where_the_device_is_another() -> None:
    """With offload a GPU that is too small for the states is enough; on a CPU the same bytes must fit all the same."""
    layout, config = _gpt(), ZeroConfig(precision="bf16", offload="cpu")
    plan = plan_of(layout, config, 2, device="cuda")
    assert plan.largest_memory - plan.largest_device_memory == max(row["pinned"] for row in plan.memory) > 0
    room = int(plan.largest_device_memory / 0.9) + 1
    assert advise(layout, config, 2, room, device="cuda").fits
    assert not advise(layout, ZeroConfig(2, precision="bf16", offload="cpu"), 2, room // 8, device="cpu").fits
    on_host = plan_of(layout, config, 2, device="cpu")
    assert on_host.largest_device_memory == on_host.largest_memory
