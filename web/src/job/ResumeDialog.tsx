/** Resume from a checkpoint on the same or other ranks, at the same or another stage: the bits stay the same. */

import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, body, messageOf, type Checkpoint, type Job } from "../api/client";
import { jobQuery } from "../api/queries";
import { formatCount } from "../ui/format";
import { Confirm } from "../ui/Confirm";
import { tell } from "../ui/toasts";
import { Preflight } from "./Preflight";

interface Props {
  job: Job;
  checkpoints: readonly Checkpoint[];
  checkpoint?: string;
  onClose: () => void;
}

type Stage = "same" | "0" | "1" | "2" | "3";

export function ResumeDialog({ job, checkpoints, checkpoint = "", onClose }: Props) {
  const client = useQueryClient();
  const usable = checkpoints.filter((each) => each.status === "complete" || each.status === "verified");
  const isDone = job.step >= job.steps;
  const [from, setFrom] = useState(checkpoint);
  const [ranks, setRanks] = useState(String(job.ranks));
  const [stage, setStage] = useState<Stage>("same");
  const [steps, setSteps] = useState(String(isDone ? 2 * job.steps : job.steps));
  const zero = { ...(job.spec.zero as object | undefined), stage: Number(stage) as 0 | 1 | 2 | 3 };
  const wish = {
    ...(from ? { checkpoint: from } : {}),
    ...(Number(ranks) !== job.ranks ? { ranks: Number(ranks) } : {}),
    ...(stage !== "same" ? { zero: zero as never } : {}),
    ...(Number(steps) !== job.steps ? { train: { steps: Number(steps) } } : {}),
  };
  const resume = useMutation({
    mutationFn: () => body(api.POST("/v1/jobs/{job_id}/resume", { params: { path: { job_id: job.id } }, body: wish })),
    onSuccess: (next) => {
      client.setQueryData(jobQuery(job.id).queryKey, next);
      void client.invalidateQueries({ queryKey: ["jobs"] });
      tell(`“${job.name}” is queued again.`);
      onClose();
    },
  });
  return (
    <Confirm title={`Resume “${job.name}”`} verb="Resume job" no="Not now" busy={resume.isPending} error={resume.isError ? messageOf(resume.error) : null} onConfirm={() => resume.mutate()} onClose={onClose}>
      <label className="field">
        <span>From</span>
        <select className="select" aria-label="From" value={from} onChange={(event) => setFrom(event.target.value)}>
          <option value="">{usable.length > 0 ? "the newest verified checkpoint" : "the beginning: no checkpoint yet"}</option>
          {usable.map((each) => <option key={each.id} value={each.id}>step {each.step} (attempt {each.attempt}, {each.ranks} × stage {each.stage})</option>)}
        </select>
      </label>
      <div className="field-row">
        <label className="field">
          <span>Ranks</span>
          <input className="input" aria-label="Ranks" type="number" min={1} max={job.micro_batches} required value={ranks} onChange={(event) => setRanks(event.target.value)} />
        </label>
        <label className="field">
          <span>Stage</span>
          <select className="select" aria-label="Stage" value={stage} onChange={(event) => setStage(event.target.value as Stage)}>
            <option value="same">as before ({job.stage ?? "auto"})</option>
            {["0", "1", "2", "3"].map((each) => <option key={each} value={each}>{each}</option>)}
          </select>
        </label>
        <label className="field">
          <span>Steps in all</span>
          <input className="input" aria-label="Steps in all" type="number" min={isDone ? job.steps + 1 : 1} required value={steps} onChange={(event) => setSteps(event.target.value)} />
        </label>
      </div>
      <Preflight job={job} wish={wish} />
      {isDone && <p className="quiet">All {formatCount(job.steps)} steps are done: it goes on for as many more as you ask.</p>}
      <p className="quiet">From 1 to {formatCount(job.micro_batches)} ranks and at every stage the parameters come out the same, bit for bit.</p>
    </Confirm>
  );
}
