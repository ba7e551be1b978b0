/** The checkpoints that exist, what is in each, and the way back from them. */

import { useInfiniteQuery, useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useState } from "react";
import { api, body, messageOf, type Checkpoint, type Job } from "../api/client";
import { checkpointQuery, checkpointsQuery } from "../api/queries";
import { useNow } from "../ui/clock";
import { formatAgo, formatBytes, formatCount, formatDuration, formatNumber, formatTime } from "../ui/format";
import { Bones, Notice, Panel } from "../ui/pieces";
import { tell } from "../ui/toasts";
import { ForkDialog } from "./ForkDialog";
import { LineagePanel } from "./LineagePanel";
import { keptText } from "./kept";
import { ResumeDialog } from "./ResumeDialog";
import { SaveState } from "./SaveState";

const MARKS: Record<Checkpoint["status"], [string, string]> = {
  verified: ["accent", "every byte was read and its checksum holds"],
  complete: ["", "published; its bytes have not been read back yet"],
  corrupt: ["bad", "a shard is damaged or gone: it is never offered for a resume"],
  deleted: ["", "removed by retention"],
};

export function Checkpoints({ job }: { job: Job }) {
  const [removed, setRemoved] = useState(false);
  const checkpoints = useInfiniteQuery(checkpointsQuery(job.id, removed));
  const [resumeFrom, setResumeFrom] = useState<string | null>(null);
  const [forkAt, setForkAt] = useState<Checkpoint | null>(null);
  if (checkpoints.isPending) return <div className="panel"><Bones rows={4} label="Reading the checkpoints" /></div>;
  if (!checkpoints.data) return <Notice tone="bad" onRetry={() => void checkpoints.refetch()}>{messageOf(checkpoints.error)}</Notice>;
  const items = checkpoints.data.pages.flatMap((page) => page.items);
  const counts = checkpoints.data.pages.at(-1)?.counts ?? {};
  const { deleted: taken = 0 } = counts;
  const existing = Object.values(counts).reduce((sum, count) => sum + count, 0) - taken;
  if (existing + taken === 0) {
    return (
      <>
        <div className="panel empty">
          <h2>No checkpoints yet</h2>
          <p>One is written every few steps as the spec says, after the last step, and whenever the job is paused or cancelled.</p>
          <SaveState job={job} />
        </div>
        <LineagePanel job={job} />
      </>
    );
  }
  return (
    <>
      <Panel title="Checkpoints" aside={<Counts existing={existing} damaged={counts["corrupt"] ?? 0} taken={taken} removed={removed} onRemoved={setRemoved} />} flush>
        <SaveState job={job} />
        <div className="checkpoints">
          {items.map((each) => <Row key={each.id} job={job} checkpoint={each} onResume={() => setResumeFrom(each.id)} onFork={() => setForkAt(each)} />)}
        </div>
        {checkpoints.hasNextPage && <p className="more"><button type="button" className="button" disabled={checkpoints.isFetchingNextPage} onClick={() => void checkpoints.fetchNextPage()}>Older checkpoints</button></p>}
      </Panel>
      <LineagePanel job={job} />
      {forkAt !== null && <ForkDialog job={job} checkpoint={forkAt} onClose={() => setForkAt(null)} />}
      {resumeFrom !== null && <ResumeDialog job={job} checkpoints={items} checkpoint={resumeFrom} onClose={() => setResumeFrom(null)} />}
    </>
  );
}

function Counts({ existing, damaged, taken, removed, onRemoved }: { existing: number; damaged: number; taken: number; removed: boolean; onRemoved: (removed: boolean) => void }) {
  return (
    <span className="quiet checkpoint-counts">
      {keptText(existing, damaged)}
      {taken > 0 && <label><input type="checkbox" checked={removed} onChange={(event) => onRemoved(event.target.checked)} /> {formatCount(taken)} removed</label>}
    </span>
  );
}

function Row({ job, checkpoint, onResume, onFork }: { job: Job; checkpoint: Checkpoint; onResume: () => void; onFork: () => void }) {
  const now = useNow();
  const [tone, meaning] = MARKS[checkpoint.status];
  const isUsable = checkpoint.status === "complete" || checkpoint.status === "verified";
  return (
    <article className="checkpoint" data-status={checkpoint.status} aria-label={`Checkpoint at step ${checkpoint.step}`}>
      <div className="checkpoint-step"><span className="label">step</span><b>{formatCount(checkpoint.step)}</b></div>
      <div className="checkpoint-facts">
        <p>
          <span className={`badge ${tone}`} title={meaning}>{checkpoint.status}</span>
          {checkpoint.pinned && <span className="badge warn" title="Retention keeps it while a job needs it">pinned</span>}
          {checkpoint.needed_by.map((need) => need.job_id !== job.id && <span key={need.job_id} className="badge warn" title="Retention keeps it until that job has saved twice">needed by <Link to="/jobs/$id" params={{ id: need.job_id }}><bdi>{need.name}</bdi></Link></span>)}
          <span>{checkpoint.ranks} × stage {checkpoint.stage}</span>
          <span>{formatBytes(checkpoint.bytes)}</span>
          {checkpoint.eval_loss !== null && <span>validation loss {formatNumber(checkpoint.eval_loss)}</span>}
          <span className="quiet" title={formatTime(checkpoint.created_at, now)}>{formatAgo(checkpoint.created_at, now)}, in {formatDuration(checkpoint.seconds)}</span>
          {checkpoint.verified_at && <span className="quiet" title={formatTime(checkpoint.verified_at, now)}>read back {formatAgo(checkpoint.verified_at, now)}</span>}
        </p>
        {checkpoint.problem && <p style={{ color: "var(--bad)" }}><bdi>{checkpoint.problem}</bdi></p>}
        <p className="quiet">digest <span className="mono">{checkpoint.digest}</span> · <span className="mono">{checkpoint.folder}</span></p>
        <Parts seconds={checkpoint.seconds_by} />
        <Shards checkpoint={checkpoint} />
      </div>
      <div className="checkpoint-actions">
        {isUsable && job.allowed_actions.includes("resume") && <button type="button" className="button" onClick={onResume}>Resume from here…</button>}
        {isUsable && <button type="button" className="button" onClick={onFork} aria-label={`Fork at step ${checkpoint.step}`}>Fork…</button>}
        <Verify checkpoint={checkpoint} />
        {isUsable && <a className="button" href={`/v1/checkpoints/${checkpoint.id}/export`} download>Export</a>}
        {isUsable && job.model_kind === "gpt" && <a className="button" href={`/v1/checkpoints/${checkpoint.id}/export?format=transformers`} download title="A folder that the transformers library loads, as one tar">For transformers</a>}
      </div>
    </article>
  );
}

/** One cell per rank's file: which are damaged at a glance, the files on request. */
function Shards({ checkpoint }: { checkpoint: Checkpoint }) {
  const [isOpen, setOpen] = useState(false);
  const whole = useQuery({ ...checkpointQuery(checkpoint.job_id, checkpoint.id), enabled: isOpen });
  const cells = Array.from({ length: Math.min(checkpoint.ranks, 64) }, (_, rank) => rank);
  return (
    <details className="shards" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <span className="shard-cells" aria-hidden="true">
          {cells.map((rank) => <i key={rank} data-status={checkpoint.bad_ranks.includes(rank) ? "corrupt" : "ok"} style={{ flexGrow: 1 }} />)}
        </span>
        {checkpoint.ranks} {checkpoint.ranks === 1 ? "shard" : "shards"}
      </summary>
      {whole.data ? <ShardTable shards={whole.data.shards} /> : whole.isError ? <p className="quiet">{messageOf(whole.error)}</p> : isOpen && <Bones rows={2} label="Reading the shards" />}
    </details>
  );
}

function ShardTable({ shards }: { shards: Checkpoint["shards"] }) {
  return (
    <div className="scroll-x" tabIndex={0} role="region" aria-label="Shards">
      <table className="facts">
        <thead><tr><th scope="col">Rank</th><th scope="col">File</th><th scope="col" className="num">Bytes</th><th scope="col">Checksum</th><th scope="col">State</th></tr></thead>
        <tbody>
          {shards.map((shard) => (
            <tr key={shard.rank}>
              <th scope="row">{shard.rank}</th>
              <td className="mono">{shard.file}</td>
              <td className="num">{formatCount(shard.bytes)}</td>
              <td className="mono">{shard.checksum}</td>
              <td style={shard.status === "ok" ? undefined : { color: "var(--bad)" }}>{shard.status}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const PARTS = [["copy", "copied"], ["write", "hashed and written"], ["publish", "published"], ["blocked", "training waited"]] as const;

/** Where the time of a save beside training went. */
function Parts({ seconds }: { seconds: Checkpoint["seconds_by"] }) {
  const known = PARTS.filter(([part]) => seconds[part] !== undefined);
  return known.length > 0 && <p className="quiet" aria-label="Parts of the save">{known.map(([part, words]) => `${words} ${formatDuration(seconds[part])}`).join(" · ")}</p>;
}

function Verify({ checkpoint }: { checkpoint: Checkpoint }) {
  const client = useQueryClient();
  const verify = useMutation({
    mutationFn: () => body(api.POST("/v1/checkpoints/{checkpoint_id}/verify", { params: { path: { checkpoint_id: checkpoint.id } } })),
    onSuccess: (result) => {
      tell(result.ok ? `The checkpoint at step ${checkpoint.step} is whole: every byte matches its checksum.` : `The checkpoint at step ${checkpoint.step} is damaged: ${result.problems.join("; ")}`, result.ok ? "still" : "bad");
      void client.invalidateQueries({ queryKey: ["checkpoints", checkpoint.job_id] });
    },
    onError: (error) => tell(`The checkpoint at step ${checkpoint.step} was not read: ${messageOf(error)}`, "bad"),
  });
  if (checkpoint.status === "deleted") return null;
  return <button type="button" className="button" disabled={verify.isPending} onClick={() => verify.mutate()}>{verify.isPending ? "Reading…" : "Verify"}</button>;
}
