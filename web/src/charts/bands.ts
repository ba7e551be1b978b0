/** Memory as stacked bands: which categories, in which order, how high. Pure. */

import type { MemorySample, MemoryView } from "../api/client";

export const CATEGORIES = ["params", "grads", "sums", "master", "moments", "buckets", "slots", "pinned", "activations", "other"] as const;
export type Category = (typeof CATEGORIES)[number];

/** What the engine allocates from its arenas and therefore plans to the byte; activations are the model's. */
export const PLANNED: readonly Category[] = CATEGORIES.filter((category) => category !== "activations");

/** The engine's plan says "parameters" and "gradients" where samples say "params" and "grads". */
const PLAN_NAMES: Partial<Record<Category, string>> = { params: "parameters", grads: "gradients" };

export function plannedBytes(plan: Record<string, number> | undefined, category: Category): number {
  return plan?.[category] ?? plan?.[PLAN_NAMES[category] ?? category] ?? 0;
}

export const CATEGORY_WORDS: Record<Category, string> = {
  params: "parameters",
  grads: "gradients",
  sums: "gradient sums",
  master: "master weights",
  moments: "moments",
  buckets: "buckets",
  slots: "gather slots",
  pinned: "pinned on the host",
  activations: "activations",
  other: "other",
};

export const PHASES = ["rest", "forward", "backward", "reduce", "update", "gather", "peak"] as const;

export function totalOf(sample: MemorySample): number {
  return CATEGORIES.reduce((sum, category) => sum + sample[category], 0);
}

export function plannedTotal(plan: Record<string, number> | undefined): number {
  return Object.values(plan ?? {}).reduce((sum, bytes) => sum + bytes, 0);
}

export function engineTotal(sample: MemorySample): number {
  return PLANNED.reduce((sum, category) => sum + sample[category], 0);
}

/** One column of the stack: the running sums from the floor up, one more than there are categories. */
export function stack(sample: MemorySample): number[] {
  const levels = [0];
  for (const category of CATEGORIES) levels.push((levels.at(-1) ?? 0) + sample[category]);
  return levels;
}

/** Samples of one rank over the steps: the peak within each step, one per step. */
export function overSteps(view: MemoryView, rank: number): MemorySample[] {
  const best = new Map<number, MemorySample>();
  for (const sample of view.samples) {
    if (sample.rank !== rank) continue;
    const known = best.get(sample.step);
    if (!known || sample.attempt > known.attempt || (sample.attempt === known.attempt && totalOf(sample) > totalOf(known))) best.set(sample.step, sample);
  }
  return [...best.values()].sort((a, b) => a.step - b.step);
}

/** The newest sample of each phase of one rank, in the order of a step; the peak is one of them, not a phase of its own. */
export function withinStep(view: MemoryView, rank: number): MemorySample[] {
  const mine = view.phases.filter((sample) => sample.rank === rank && sample.phase !== "peak");
  return PHASES.flatMap((phase) => mine.filter((sample) => sample.phase === phase).slice(-1));
}

/** The largest moment of each rank as last seen. */
export function peaks(view: MemoryView): MemorySample[] {
  const best = new Map<number, MemorySample>();
  for (const sample of [...view.phases, ...view.samples.slice(-4 * view.ranks)]) {
    const known = best.get(sample.rank);
    if (!known || totalOf(sample) > totalOf(known)) best.set(sample.rank, sample);
  }
  return [...best.values()].sort((a, b) => a.rank - b.rank);
}

/** Heights for labels that would lie on each other: each at least `apart` below the one before, none moved up. */
export function spread(wanted: readonly number[], apart: number): number[] {
  const order = wanted.map((at, index) => ({ at, index })).sort((a, b) => a.at - b.at);
  const placed = new Array<number>(wanted.length).fill(0);
  let floor = -Infinity;
  for (const { at, index } of order) {
    const y = Math.max(at, floor + apart);
    placed[index] = y;
    floor = y;
  }
  return placed;
}

/** Round byte values for an axis: at most `count` of them up to `max`, in binary units. */
export function byteTicks(max: number, count: number): number[] {
  if (max <= 0) return [0];
  const unit = 1024 ** Math.floor(Math.log(max) / Math.log(1024));
  const raw = max / unit / count;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = ([1, 2, 5, 10].find((each) => each * size >= raw) ?? 10) * size * unit;
  return Array.from({ length: Math.floor(max / step) + 1 }, (_, index) => index * step);
}
