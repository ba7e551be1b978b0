/** What a job's rate counts: tokens, or samples where its data are none. */

import type { Job } from "../api/client";

export function countedIn(job: Pick<Job, "spec">): "Tokens" | "Samples" {
  const data = job.spec.data as { kind?: unknown } | undefined;
  return data?.kind === "digits" ? "Samples" : "Tokens";
}
