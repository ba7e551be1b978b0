import { expect, it } from "vitest";
import { drawSparkline } from "./Sparkline";

it("shows a legal value between two NaN as a dot and the NaN as marks", () => {
  const drawing = drawSparkline(["NaN", 1, "NaN"]);
  expect(drawing.dots).toHaveLength(1);
  expect(drawing.marks).toHaveLength(2);
});

it("never bridges a gap", () => {
  expect(drawSparkline([3, 2, null, 1, 0.5]).path.match(/M/g)).toHaveLength(2);
});

it("draws nothing rather than NaN coordinates when no value is finite", () => {
  expect(drawSparkline(["NaN", "Infinity"]).path).toBe("");
});
