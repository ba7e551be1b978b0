/** Live curves grow at their end: ask for the newest steps only and join them to what is here. Pure. */

import type { MetricsView, Series } from "./client";

/** Steps asked for again: an evaluation may be reported after later steps' losses. */
const OVERLAP_STEPS = 64;

const keyOf = (series: Series) => `${series.name}|${series.rank}|${series.attempt}|${series.branch}`;

/**
 * The step to read from, or null when everything must be read: the answer was thinned, or will be soon.
 * `step` is where the job stands; after a resume that is before the newest step drawn.
 */
export function extendFrom(known: MetricsView, width: number, step: number): number | null {
  const isRaw = known.series.length > 0 && known.series.every((series) => series.steps_per_point === 1 && !series.error && series.count + OVERLAP_STEPS < width);
  if (!isRaw) return null;
  const last = Math.max(0, ...known.series.map((series) => series.points.at(-1)?.step ?? 0));
  const from = Math.min(last, step) - OVERLAP_STEPS;
  return from > 0 ? from : null;
}

/** `newer` holds all that is known from step `from` on. Null when its lines are not those of `known`: an attempt began or was replaced. */
export function extend(known: MetricsView, newer: MetricsView, from: number): MetricsView | null {
  const tails = new Map(newer.series.map((series) => [keyOf(series), series]));
  const isSame = newer.series.every((series) => known.series.some((each) => keyOf(each) === keyOf(series)));
  if (!isSame || newer.series.some((series) => series.steps_per_point !== 1 || series.error)) return null;
  return { ...known, series: known.series.map((series) => joined(series, tails.get(keyOf(series)), from)) };
}

function joined(series: Series, tail: Series | undefined, from: number): Series {
  if (!tail) return series;
  const points = [...series.points.filter((point) => point.step < from), ...tail.points];
  const marks = [...series.non_finite.filter((mark) => mark.step < from), ...tail.non_finite];
  return { ...series, points, non_finite: marks, non_finite_count: marks.length, count: points.length };
}
