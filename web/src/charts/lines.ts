/** From series as the API answers them to the aligned columns that uPlot draws. Pure; no uPlot import, so that it can be tested alone. */

import type { Series } from "../api/client";
import { toNumber } from "../ui/format";

export interface Mark {
  x: number;
  value: number; // NaN or an infinity
}

/** One line of a chart with its own x positions. */
export interface Line {
  label: string;
  colour: string; // a custom property of the page, such as --accent
  dim: boolean; // an older attempt's steps, replaced by a newer one's
  xs: number[];
  ys: (number | null)[]; // null: a gap, drawn as one
  lows: (number | null)[] | null; // null: every point is a single value
  highs: (number | null)[] | null;
  marks: Mark[];
  nonFiniteCount: number;
}

export function lineOf(series: Series, label: string, colour: string): Line {
  const finite = (value: string | number | null | undefined) => {
    const number = toNumber(value);
    return number !== null && Number.isFinite(number) ? number : null;
  };
  const ys = series.points.map((point) => finite(point.value));
  const isBand = series.points.some((point, index) => ys[index] !== null && (finite(point.min) !== ys[index] || finite(point.max) !== ys[index]));
  return {
    label: series.branch ? `${label} (attempt ${series.attempt}, replaced)` : label,
    colour,
    dim: series.branch,
    xs: series.points.map((point) => point.step),
    ys,
    lows: isBand ? series.points.map((point, index) => finite(point.min) ?? ys[index] ?? null) : null,
    highs: isBand ? series.points.map((point, index) => finite(point.max) ?? ys[index] ?? null) : null,
    marks: series.non_finite.map((mark) => ({ x: mark.step, value: toNumber(mark.value) ?? NaN })),
    nonFiniteCount: series.non_finite_count,
  };
}

/**
 * Newest attempt last, so that it is drawn on top. Attempts that are not branches continue each other: they are joined into one line,
 * because x is the job's global step.
 */
export function linesOf(series: readonly Series[], name: string, label: string, colour: string): Line[] {
  const mine = series.filter((each) => each.name === name);
  const branches = mine.filter((each) => each.branch).map((each) => lineOf(each, label, colour));
  const parts = mine.filter((each) => !each.branch).map((each) => lineOf(each, label, colour)).sort((a, b) => (a.xs[0] ?? 0) - (b.xs[0] ?? 0));
  const [first, ...rest] = parts;
  if (!first) return branches;
  return [...branches, rest.reduce(joinLines, first)];
}

function joinLines(a: Line, b: Line): Line {
  const isBand = a.lows !== null || b.lows !== null;
  return {
    ...a,
    xs: [...a.xs, ...b.xs],
    ys: [...a.ys, ...b.ys],
    lows: isBand ? [...(a.lows ?? a.ys), ...(b.lows ?? b.ys)] : null,
    highs: isBand ? [...(a.highs ?? a.ys), ...(b.highs ?? b.ys)] : null,
    marks: [...a.marks, ...b.marks],
    nonFiniteCount: a.nonFiniteCount + b.nonFiniteCount,
  };
}

/** Column index of each line's value in the aligned table, and of its band when it has one. */
export interface Slots {
  value: number;
  low: number | null;
  high: number | null;
}

export type Column = (number | null | undefined)[];

/** All lines over one sorted x column. Undefined: the line has no point there (drawn across); null: a gap (not drawn across). */
export function align(lines: readonly Line[]): { columns: [number[], ...Column[]]; slots: Slots[] } {
  const xs = [...new Set(lines.flatMap((line) => [...line.xs, ...line.marks.map((mark) => mark.x)]))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  const columns: [number[], ...Column[]] = [xs];
  const slots: Slots[] = [];
  const spread = (line: Line, values: (number | null)[]) => {
    const column: Column = new Array<number | null | undefined>(xs.length).fill(undefined);
    line.xs.forEach((x, index) => {
      column[place.get(x) ?? 0] = values[index] ?? null;
    });
    for (const mark of line.marks) column[place.get(mark.x) ?? 0] ??= null;
    columns.push(column);
    return columns.length - 1;
  };
  for (const line of lines) {
    const value = spread(line, line.ys);
    slots.push({ value, low: line.lows && spread(line, line.lows), high: line.highs && spread(line, line.highs) });
  }
  return { columns, slots };
}

/** Indices of values with no drawn neighbour on either side: a line cannot show them, so they get a dot. */
export function lonelyPoints(column: Column, from: number, to: number): number[] {
  const lonely: number[] = [];
  let run: number[] = [];
  const close = () => {
    if (run.length === 1) lonely.push(run[0] as number);
    run = [];
  };
  for (let index = from; index <= to; index++) {
    const value = column[index];
    if (value === null) close();
    else if (value !== undefined) run.push(index);
  }
  close();
  return lonely;
}

/** Index of the last value at or before x, for readouts. */
export function indexAt(xs: readonly number[], column: Column, x: number): number | null {
  for (let index = xs.length - 1; index >= 0; index--) {
    if ((xs[index] as number) <= x && column[index] !== undefined) return index;
  }
  return null;
}
