import { expect, test } from "vitest";
import type { Lineage } from "../api/client";
import { beginningOf, familyOf } from "./lineage";

const attempt = (number: number, first: number, last: number, ranks = 2) => ({ number, status: "released" as const, ranks, stage: 2, created_at: "2026-11-29T12:00:00Z", first_step: first, last_step: last });
const link = (kind: "resume" | "fork" | "clone", fromAttempt: number | null, to: string, toAttempt: number | null, step: number, resharded = false) => ({
  kind, from_job: "a", from_attempt: fromAttempt, to_job: to, to_attempt: toAttempt, checkpoint: kind === "clone" ? null : "c", step,
  from_ranks: 2, from_stage: 2, to_ranks: 1, to_stage: 2, resharded,
});
const job = (id: string, name: string, generation: number, kind: "original" | "fork" | "clone", attempts: ReturnType<typeof attempt>[]) => ({ id, name, status: "running" as const, generation, kind, steps: 300, attempts });

const LINEAGE: Lineage = {
  job_id: "a",
  truncated: false,
  jobs: [job("a", "parent", 0, "original", [attempt(1, 0, 60), attempt(2, 50, 300, 1)]), job("b", "枝", 1, "fork", []), job("c", "copy", 1, "clone", [attempt(1, 0, 10)])],
  links: [link("resume", 1, "a", 2, 50, true), link("fork", 2, "b", null, 100), link("clone", null, "c", 1, 0)],
};

test("every attempt has a row of its own, and a job that has not started stands where it will begin", () => {
  const { stretches, steps } = familyOf(LINEAGE);
  expect(stretches.map((each) => [each.job.id, each.attempt, each.first, each.last])).toEqual([["a", 1, 0, 60], ["a", 2, 50, 300], ["b", null, 100, 100], ["c", 1, 0, 10]]);
  expect(stretches.map((each) => each.row)).toEqual([0, 1, 2, 3]);
  expect(steps).toBe(300);
});

test("how each began is said in words, the reshard too", () => {
  const family = familyOf(LINEAGE);
  expect(family.stretches.map((each) => beginningOf(family, each))).toEqual([
    "from the beginning",
    "resumed at step 50 of attempt 1, resharded from 2 × stage 2",
    "forked at step 100 of attempt 2 of “parent”",
    "the spec of “parent”, from the beginning",
  ]);
});

test("a fork whose origin is gone still stands in the picture", () => {
  const orphan: Lineage = { ...LINEAGE, jobs: LINEAGE.jobs.slice(1, 2) };
  const family = familyOf(orphan);
  expect(family.branches.map((each) => [each.link.kind, each.from])).toEqual([["fork", null]]);
});
