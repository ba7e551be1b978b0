import { expect, it } from "vitest";
import type { MetricsView } from "./client";
import { extend, extendFrom } from "./extend";

const view = (steps: [number, number], over: Partial<MetricsView["series"][number]> = {}): MetricsView => {
  const points = Array.from({ length: steps[1] - steps[0] + 1 }, (_, index) => ({ step: steps[0] + index, at: "2026-01-01T00:00:00Z", value: 1, min: 1, max: 1 }));
  return { job_id: "j", width: 800, series: [{ name: "loss", rank: null, attempt: 1, branch: false, unit: null, points, non_finite: [], non_finite_count: 0, count: points.length, steps_per_point: 1, error: null, ...over }] };
};

it("joins the newest steps once each, also where they overlap", () => {
  const known = view([1, 200]);
  const from = extendFrom(known, 800, 200) ?? 0;
  const grown = extend(known, view([from, 230]), from);
  expect(grown?.series[0]?.points.map((point) => point.step)).toEqual(Array.from({ length: 230 }, (_, index) => index + 1));
});

it("reads everything again when an attempt begins or the curve is thinned", () => {
  expect(extend(view([1, 200]), view([150, 160], { attempt: 2 }), 150)).toBeNull();
  expect(extendFrom(view([1, 780]), 800, 780)).toBeNull();
  expect(extendFrom(view([1, 200], { steps_per_point: 16 }), 800, 200)).toBeNull();
});

it("looks back behind the step a resumed job stands at", () => {
  expect(extendFrom(view([1, 200]), 800, 100)).toBe(36);
});
