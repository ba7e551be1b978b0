/** How saving goes beside training: what is saved now, what was skipped, what was waited for, what failed, from the newest events. */

import { useInfiniteQuery } from "@tanstack/react-query";
import type { Job, JobEvent } from "../api/client";
import { eventsQuery } from "../api/queries";
import { useNow } from "../ui/clock";
import { formatCount, formatDuration, secondsBetween } from "../ui/format";

export function SaveState({ job }: { job: Job }) {
  const events = useInfiniteQuery(eventsQuery(job.id));
  const newest = (events.data?.pages ?? []).flatMap((page) => page.items).filter((event) => event.attempt === job.attempt);
  const find = (action: string): JobEvent | undefined => newest.find((event) => event.action === action);
  const [skipped, waited, failed] = [find("checkpoint.skipped"), find("checkpoint.waited"), find("checkpoint.failed") ?? find("checkpoint.shard_failed")];
  const saving = job.current_attempt?.saving;
  if (!saving && !skipped && !waited && !failed) return null;
  return (
    <dl className="save-state" aria-label="Saving beside training, this attempt">
      {saving && <Saving step={saving.step} since={saving.since} />}
      {skipped && <Fact name="Saves skipped" value={formatCount(countOf(skipped))} message={skipped.message} />}
      {waited && <Fact name="Times training waited" value={formatCount(countOf(waited))} message={waited.message} />}
      {failed && <Fact name="Last failure" value="" message={failed.message} bad />}
    </dl>
  );
}

function Saving({ step, since }: { step: number; since: string }) {
  return <Fact name="Saving now" value={`step ${formatCount(step)}`} message={`for ${formatDuration(secondsBetween(since, useNow()))}`} />;
}

function Fact({ name, value, message, bad }: { name: string; value: string; message: string; bad?: boolean }) {
  return (
    <div style={bad ? { color: "var(--bad)" } : undefined}>
      <dt>{name}</dt>
      <dd>{value && <b>{value} </b>}<bdi>{message}</bdi></dd>
    </div>
  );
}

function countOf(event: JobEvent): number {
  const { count } = event.data as { count?: unknown };
  return typeof count === "number" ? count : 1;
}
