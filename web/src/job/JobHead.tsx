/** Name, state with its reason, the yardstick, the readouts, and the buttons that the state allows. */

import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import type { Job } from "../api/client";
import { checkpointsQuery, explainQuery } from "../api/queries";
import { plain } from "../ui/ansi";
import { useNow } from "../ui/clock";
import { formatAgo, formatCount, formatDuration, formatNumber, formatShort, formatTime, secondsBetween, shortId, toNumber } from "../ui/format";
import { Notice } from "../ui/pieces";
import { Reason } from "../ui/Reason";
import { State, toneOf } from "../ui/State";
import { Yardstick } from "../ui/Yardstick";
import { Actions } from "./Actions";
import { countedIn } from "./counts";

const UNREACHABLE_SECONDS = 30;

export function JobHead({ job }: { job: Job }) {
  const checkpoints = useInfiniteQuery(checkpointsQuery(job.id)).data?.pages.flatMap((page) => page.items) ?? [];
  const notches = checkpoints.filter((each) => each.status !== "corrupt").map((each) => each.step);
  return (
    <header className="job-head">
      <div className="job-title">
        <p className="quiet">
          <Link to="/">Jobs</Link> <span aria-hidden="true">/</span> <span className="mono" title={job.id}>{shortId(job.id)}</span>
          {job.cloned_from && <> · copied from <Link to="/jobs/$id" params={{ id: job.cloned_from }}>{shortId(job.cloned_from)}</Link></>}
        </p>
        <div className="job-name-line">
          <h1><bdi>{job.name}</bdi></h1>
          {job.tags.map((tag) => <bdi key={tag} className="tag">{tag}</bdi>)}
        </div>
      </div>
      <Actions job={job} checkpoints={checkpoints} />
      <div className="job-state">
        <State status={job.status} />
        <Because job={job} />
      </div>
      <div className="job-progress">
        <Yardstick step={job.step} steps={job.steps} tone={toneOf(job.status)} checkpoints={notches} ticks={20} />
      </div>
      <Readouts job={job} />
      {job.status === "queued" && <Waiting job={job} />}
      {job.error && <Failure job={job} />}
    </header>
  );
}

function Because({ job }: { job: Job }) {
  const now = useNow();
  const silence = job.status === "running" ? secondsBetween(job.last_report_at, now) : null;
  const phase = job.current_attempt && ["starting", "running"].includes(job.status) ? job.phase : null;
  return (
    <>
      {job.reason && job.reason.code !== job.status && <Reason text={job.reason.sentence} />}
      {phase && <span className="quiet">{phase}</span>}
      {job.attempt > 1 && <span className="badge">attempt {job.attempt}</span>}
      {silence !== null && silence > UNREACHABLE_SECONDS && <span className="badge warn">unreachable: last heard {formatAgo(job.last_report_at, now)}</span>}
    </>
  );
}

function Readouts({ job }: { job: Job }) {
  const now = useNow();
  const loss = toNumber(job.loss);
  const isLive = job.status === "running" || job.status === "stopping";
  const elapsed = secondsBetween(job.started_at, job.ended_at ?? now);
  return (
    <dl className="readouts">
      <Readout name="Step" value={formatCount(job.step)} after={`of ${formatCount(job.steps)}`} />
      <Readout name="Loss" value={formatNumber(job.loss)} alarm={loss !== null && !Number.isFinite(loss)} testId="loss" />
      {isLive && <Readout name="Left" value={formatDuration(job.eta_seconds)} />}
      <Readout name={job.ended_at ? "Took" : "Since start"} value={formatDuration(elapsed)} title={job.started_at ? `Started ${formatTime(job.started_at, now)}` : "Not started"} />
      <Readout name={`${countedIn(job)} a second`} value={formatShort(job.tokens_per_second)} />
      <Readout name="Ranks × stage" value={`${job.ranks} × ${job.stage ?? "auto"}`} after={job.current_attempt?.device ?? undefined} />
      <Readout name="V, C" value={`${job.micro_batches}, ${job.chunk}`} title="V micro-batches a step, summed in chunks of C before they travel: equal V and C give equal bits" />
      {job.digest && <Readout name={job.ended_at ? "Digest" : "Last digest"} value={job.digest} mono testId="digest" title="Parameters, moments and step in 64 bits: equal digests mean the same bits" />}
    </dl>
  );
}

function Readout({ name, value, after, title, alarm, mono, testId }: { name: string; value: string; after?: string | undefined; title?: string; alarm?: boolean; mono?: boolean; testId?: string }) {
  return (
    <div title={title}>
      <dt className="label">{name}</dt>
      <dd className={mono ? "mono" : undefined} data-alarm={alarm || undefined} data-testid={testId}>
        {value}
        {after && <span className="quiet"> {after}</span>}
      </dd>
    </div>
  );
}

function Waiting({ job }: { job: Job }) {
  const explain = useQuery(explainQuery(job.id));
  if (!explain.data) return null;
  const { sentence, unblock, position, jobs_ahead: ahead } = explain.data;
  return (
    <Notice tone="warn">
      {sentence !== job.reason?.sentence && <Reason text={sentence} />}
      {unblock && <p className="quiet">{unblock}</p>}
      {position !== null && <p className="quiet">Place {position} in the queue{ahead.length > 0 ? `, behind ${ahead.length} ${ahead.length === 1 ? "job" : "jobs"}` : ""}.</p>}
    </Notice>
  );
}

function Failure({ job }: { job: Job }) {
  const { error } = job;
  if (!error) return null;
  return (
    <div className="notice bad failure">
      <div>
        <p><b>{error.type}</b>{error.rank !== null && <span className="quiet"> on rank {error.rank}, the first to fail</span>}</p>
        <p><bdi>{plain(error.message)}</bdi></p>
        {error.traceback && (
          <details>
            <summary>Traceback</summary>
            <pre tabIndex={0}>{plain(error.traceback)}</pre>
          </details>
        )}
      </div>
    </div>
  );
}
