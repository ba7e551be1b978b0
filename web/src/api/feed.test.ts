import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { Pacer, staleKeys } from "./feed";

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

it("passes a burst on as one fetch now and one at the end of the pace", () => {
  const act = vi.fn();
  const pacer = new Pacer(act, () => 800);
  for (let index = 0; index < 50; index++) pacer.mark(["metrics", "a"]);
  expect(act).toHaveBeenCalledTimes(1);
  vi.advanceTimersByTime(800);
  expect(act).toHaveBeenCalledTimes(2);
  vi.advanceTimersByTime(8000);
  expect(act).toHaveBeenCalledTimes(2);
});

it("paces each key by itself", () => {
  const act = vi.fn();
  const pacer = new Pacer(act, () => 800);
  pacer.mark(["metrics", "a"]);
  pacer.mark(["metrics", "b"]);
  expect(act).toHaveBeenCalledTimes(2);
});

it("knows which answers a change makes stale", () => {
  expect(staleKeys({ topic: "logs", job_id: "j" })).toEqual([["logs", "j"]]);
  expect(staleKeys({ topic: "job", job_id: "j" })).toContainEqual(["jobs"]);
  expect(staleKeys({ topic: "nodes", job_id: null })).toEqual([["nodes"]]);
});
