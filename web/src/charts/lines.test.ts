import { expect, it } from "vitest";
import type { Series } from "../api/client";
import { align, lineOf, linesOf, lonelyPoints } from "./lines";

const series = (attempt: number, branch: boolean, points: [number, number | string | null][], nonFinite: [number, string][] = []): Series => ({
  name: "loss",
  rank: null,
  attempt,
  branch,
  unit: null,
  points: points.map(([step, value]) => ({ step, at: "2026-01-01T00:00:00Z", value, min: value, max: value })),
  non_finite: nonFinite.map(([step, value]) => ({ step, value })),
  non_finite_count: nonFinite.length,
  count: points.length,
  steps_per_point: 1,
  error: null,
});

it("never lets a NaN become a bridge: it is a gap and a mark", () => {
  const line = lineOf(series(1, false, [[1, "NaN"], [2, 1], [3, "NaN"]], [[1, "NaN"], [3, "NaN"]]), "loss", "--accent");
  expect(line.ys).toEqual([null, 1, null]);
  const { columns } = align([line]);
  expect(columns[1]).toEqual([null, 1, null]);
  expect(lonelyPoints(columns[1] ?? [], 0, 2)).toEqual([1]);
});

it("leaves a gap where only the mark came, without a point", () => {
  const { columns } = align([lineOf(series(1, false, [[1, 3], [3, 2]], [[2, "NaN"]]), "loss", "--accent")]);
  expect(columns).toEqual([[1, 2, 3], [3, null, 2]]);
});

it("joins the attempts of a job into one line over its global steps and keeps a replaced branch apart and dim", () => {
  const lines = linesOf([series(2, false, [[3, 1], [4, 0.9]]), series(1, false, [[1, 3], [2, 2]]), series(1, true, [[3, 9]])], "loss", "loss", "--accent");
  expect(lines.map((line) => [line.dim, line.xs])).toEqual([[true, [3]], [false, [1, 2, 3, 4]]]);
});

it("tells a missing step (drawn across) from a gap (not)", () => {
  const { columns } = align([lineOf(series(1, false, [[1, 1], [2, 2], [3, 3]]), "a", "--accent"), lineOf(series(1, false, [[1, 5], [3, 6]]), "b", "--warn")]);
  expect(columns[2]).toEqual([5, undefined, 6]);
});

it("draws a band only where points stand for more than one value", () => {
  expect(lineOf(series(1, false, [[1, 1]]), "a", "--accent").lows).toBeNull();
  const wide = series(1, false, [[1, 1]]);
  wide.points[0] = { ...wide.points[0]!, min: 0, max: 2 };
  expect(lineOf(wide, "a", "--accent").highs).toEqual([2]);
});
