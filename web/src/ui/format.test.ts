import { describe, expect, it } from "vitest";
import { formatAge, formatAgo, formatBytes, formatDuration, formatNumber, formatShort, toNumber } from "./format";

describe("numbers", () => {
  it("reads the words JSON carries for non-finite values and writes them as such", () => {
    expect(toNumber("NaN")).toBeNaN();
    expect(toNumber("-Infinity")).toBe(-Infinity);
    expect([formatNumber("NaN"), formatNumber("Infinity"), formatNumber("-Infinity")]).toEqual(["NaN", "+∞", "−∞"]);
    expect(formatNumber(null)).toBe("–");
  });

  it("keeps four significant digits over the whole range a learning rate or a loss takes", () => {
    expect([3.14159, 0.5, 12.3456, 1234.56, 3e-4, -2.5, 0].map((value) => formatNumber(value))).toEqual(["3.142", "0.5000", "12.35", "1235", "3.00e−4", "−2.500", "0"]);
  });

  it("shortens rates and bytes to three digits with their unit", () => {
    expect([formatShort(27_400_000), formatShort(1534), formatShort(12)]).toEqual(["27.4\u202fM", "1.53\u202fk", "12.0"]);
    expect([formatBytes(0), formatBytes(1023), formatBytes(1536), formatBytes(5 * 2 ** 30)]).toEqual(["0\u202fB", "1023\u202fB", "1.50\u202fKiB", "5.00\u202fGiB"]);
  });
});

describe("times", () => {
  it("writes durations with at most two units", () => {
    expect([0.25, 3.21, 59, 61, 3700, 90000].map((seconds) => formatDuration(seconds))).toEqual(["250 ms", "3.2 s", "59 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]);
  });

  it("never shows a negative age when clocks differ", () => {
    const now = Date.parse("2026-01-01T00:00:00Z");
    expect(formatAge("2026-01-01T00:00:10Z", now)).toBe("now");
    expect([formatAgo("2026-01-01T00:00:10Z", now), formatAgo("2025-12-31T23:58:00Z", now)]).toEqual(["just now", "2 min ago"]);
  });
});
