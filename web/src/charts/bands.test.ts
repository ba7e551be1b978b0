import { expect, it } from "vitest";
import type { MemorySample, MemoryView } from "../api/client";
import { byteTicks, CATEGORIES, overSteps, peaks, plannedBytes, spread, stack, totalOf, withinStep } from "./bands";

const sample = (over: Partial<MemorySample>): MemorySample => ({
  step: 1, attempt: 1, rank: 0, phase: "peak", at: "2026-01-01T00:00:00Z",
  params: 4, grads: 4, sums: 0, master: 0, moments: 8, buckets: 0, slots: 0, pinned: 0, activations: 3, other: 1, allocated: 20, reserved: 20, rss: 90,
  ...over,
});
const view = (samples: MemorySample[], phases: MemorySample[]): MemoryView => ({ job_id: "j", attempt: 1, ranks: 2, samples, phases, plan: [], paper: [] });

it("stacks every category once, so that the top of the stack is the total", () => {
  expect(stack(sample({})).at(-1)).toBe(totalOf(sample({})));
  expect(stack(sample({}))).toHaveLength(CATEGORIES.length + 1);
});

it("shows one column per step, from the newest attempt, at its peak", () => {
  const drawn = overSteps(view([sample({ phase: "forward" }), sample({ phase: "backward", activations: 9 }), sample({ step: 2, attempt: 1, other: 99 }), sample({ step: 2, attempt: 2 }), sample({ rank: 1, step: 9 })], []), 0);
  expect(drawn.map((each) => [each.step, each.attempt, each.activations])).toEqual([[1, 1, 9], [2, 2, 3]]);
});

it("orders the phases as a step takes them", () => {
  const phases = ["update", "rest", "backward", "peak", "forward"].map((phase) => sample({ phase }));
  expect(withinStep(view([], phases), 0).map((each) => each.phase)).toEqual(["rest", "forward", "backward", "update"]);
});

it("finds each rank's largest moment among its phases", () => {
  const phases = [sample({ rank: 0 }), sample({ rank: 0, grads: 50, phase: "backward" }), sample({ rank: 1 })];
  expect(peaks(view([], phases)).map((each) => [each.rank, each.grads])).toEqual([[0, 50], [1, 4]]);
});

it("finds a category in the plan under the engine's name and under the sample's", () => {
  expect([plannedBytes({ parameters: 3 }, "params"), plannedBytes({ params: 4 }, "params"), plannedBytes({}, "sums")]).toEqual([3, 4, 0]);
});

it("keeps labels apart without changing their order", () => {
  expect(spread([10, 12, 40], 12)).toEqual([10, 22, 40]);
});

it("puts ticks on round binary sizes", () => {
  expect(byteTicks(250 * 2 ** 20, 4)).toEqual([0, 100 * 2 ** 20, 200 * 2 ** 20]);
});
