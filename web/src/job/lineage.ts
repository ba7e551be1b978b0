/** Where each stretch of steps of a family of jobs stands in the picture. Pure. */

import type { Lineage } from "../api/client";

export interface Stretch {
  key: string;
  job: Lineage["jobs"][number];
  attempt: number | null; // null: the job has not started yet
  row: number;
  first: number; // steps
  last: number;
  what: string; // ranks × stage
}

export interface Branch {
  key: string;
  link: Lineage["links"][number];
  from: Stretch | null; // null: what it begins from is not shown any more
  to: Stretch;
}

export interface Family {
  stretches: Stretch[];
  branches: Branch[];
  steps: number; // the longest wish or run, at least 1
}

export function familyOf(lineage: Lineage): Family {
  const stretches: Stretch[] = [];
  const add = (job: Stretch["job"], attempt: number | null, first: number, last: number, what: string) => stretches.push({ key: `${job.id}/${attempt ?? 0}`, job, attempt, row: stretches.length, first, last, what });
  for (const job of lineage.jobs) {
    for (const each of job.attempts) add(job, each.number, each.first_step, each.last_step, `${each.ranks} × stage ${each.stage}`);
    if (job.attempts.length === 0) {
      const begins = lineage.links.find((link) => link.to_job === job.id)?.step ?? 0;
      add(job, null, begins, begins, "not started");
    }
  }
  const at = (job: string, attempt: number | null) => stretches.find((each) => each.job.id === job && (attempt === null || each.attempt === attempt || each.attempt === null)) ?? null;
  const branches = lineage.links.flatMap((link) => {
    const to = at(link.to_job, link.to_attempt);
    return to ? [{ key: `${link.kind} ${to.key}`, link, from: at(link.from_job, link.from_attempt), to }] : [];
  });
  for (const { from, link } of branches) if (from && link.kind !== "clone") from.last = Math.max(from.last, link.step); // it was there, whatever it reported
  const steps = Math.max(1, ...lineage.jobs.map((job) => job.steps), ...stretches.map((each) => each.last));
  return { stretches, branches, steps };
}

/** How a stretch began, in words. */
export function beginningOf(family: Family, stretch: Stretch): string {
  const branch = family.branches.find((each) => each.to === stretch);
  if (!branch) return "from the beginning";
  const { link, from } = branch;
  const source = from && from.job.id !== stretch.job.id ? `“${from.job.name}”` : from ? "" : "a job that is gone";
  if (link.kind === "clone") return `the spec of ${source || "itself"}, from the beginning`;
  const attempt = link.from_attempt === null ? "" : `attempt ${link.from_attempt}`;
  const place = [attempt, source && `of ${source}`].filter(Boolean).join(" ");
  const reshard = link.resharded ? `, resharded from ${link.from_ranks} × stage ${link.from_stage}` : "";
  return `${link.kind === "fork" ? "forked" : "resumed"} at step ${link.step} of ${place}${reshard}`;
}
