/** Resume from a checkpoint on the same or other ranks, at the same or another stage: the bits stay the same. */

import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, body, messageOf, type Checkpoint, type Job } from "../api/client";
import { jobQuery } from "../api/queries";
import { formatCount } from "../ui/format";
import { Confirm } from "../ui/Confirm";
import { tell } from "../ui/toasts";
import { Preflight } from "./Preflight";
import { ShapeFields, STAGES, type Shape } from "./ShapeFields";

interface Props {
  job: Job;
  checkpoints: readonly Checkpoint[];
  checkpoint?: string;
  onClose: () => void;
}

export function ResumeDialog({ job, checkpoints, checkpoint = "", onClose }: Props) {
  const client = useQueryClient();
  const usable = checkpoints.filter((each) => each.status === "complete" || each.status === "verified");
  const isDone = job.step >= job.steps;
  const [from, setFrom] = useState(checkpoint);
  const [shape, setShape] = useState<Shape>({ ranks: String(job.ranks), stage: "same", steps: String(isDone ? 2 * job.steps : job.steps) });
  const [ranks, steps] = [Number(shape.ranks), Number(shape.steps)];
  const zero = { ...(job.spec.zero as object | undefined), stage: Number(shape.stage) as 0 | 1 | 2 | 3 };
  const wish = {
    ...(from ? { checkpoint: from } : {}),
    ...(ranks !== job.ranks ? { ranks } : {}),
    ...(shape.stage !== "same" ? { zero: zero as never } : {}),
    ...(steps !== job.steps ? { train: { steps } } : {}),
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
          <option value="">{usable.length > 0 ? "the newest that is whole" : "the beginning: no checkpoint yet"}</option>
          {usable.map((each) => <option key={each.id} value={each.id}>step {each.step} (attempt {each.attempt}, {each.ranks} × stage {each.stage})</option>)}
        </select>
      </label>
      <ShapeFields job={job} shape={shape} onChange={setShape} stages={[["same", `as before (${job.stage ?? "auto"})`], ...STAGES]} fewestSteps={isDone ? job.steps + 1 : 1} />
      <Preflight job={job} wish={wish} />
      {isDone && <p className="quiet">All {formatCount(job.steps)} steps are done: it goes on for as many more as you ask.</p>}
      <p className="quiet">From 1 to {formatCount(job.micro_batches)} ranks and at every stage the parameters come out the same, bit for bit.</p>
    </Confirm>
  );
}
