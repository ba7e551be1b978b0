/** A new job that begins at a checkpoint: with other steps, ranks or stage; the rest of the spec goes along. */

import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useRef, useState } from "react";
import { api, body, messageOf, type Checkpoint, type Job, type PreflightWish } from "../api/client";
import { Confirm } from "../ui/Confirm";
import { tell } from "../ui/toasts";
import { Preflight } from "./Preflight";
import { ShapeFields, STAGES, type Shape } from "./ShapeFields";

export function ForkDialog({ job, checkpoint, onClose }: { job: Job; checkpoint: Checkpoint; onClose: () => void }) {
  const client = useQueryClient();
  const navigate = useNavigate();
  const key = useRef(crypto.randomUUID());
  const [name, setName] = useState(`${job.name}, from step ${checkpoint.step}`.slice(0, 200));
  const [shape, setShape] = useState<Shape>({ ranks: String(job.ranks), stage: String(job.stage ?? "auto"), steps: String(Math.max(job.steps, 2 * checkpoint.step)) });
  const spec = { resources: { ranks: Number(shape.ranks) }, zero: { stage: shape.stage === "auto" ? "auto" : Number(shape.stage) }, train: { steps: Number(shape.steps) } };
  const fork = useMutation({
    mutationFn: () => body(api.POST("/v1/jobs/{job_id}/fork", { params: { path: { job_id: job.id }, header: { "Idempotency-Key": key.current } }, body: { checkpoint: checkpoint.id, name, spec } })),
    onSuccess: (made) => {
      void client.invalidateQueries({ queryKey: ["jobs"] });
      void client.invalidateQueries({ queryKey: ["attempts", job.id] });
      tell(`“${made.name}” begins at step ${checkpoint.step}.`);
      void navigate({ to: "/jobs/$id", params: { id: made.id } });
    },
    onError: () => {
      key.current = crypto.randomUUID();
    },
  });
  const wish: PreflightWish = { checkpoint: checkpoint.id, spec };
  return (
    <Confirm title={`Fork “${job.name}” at step ${checkpoint.step}`} verb="Fork job" no="Not now" busy={fork.isPending} error={fork.isError ? messageOf(fork.error) : null} onConfirm={() => fork.mutate()} onClose={onClose}>
      <label className="field">
        <span>Name</span>
        <input className="input" aria-label="Name" required maxLength={200} value={name} onChange={(event) => setName(event.target.value)} />
      </label>
      <ShapeFields job={job} shape={shape} onChange={setShape} stages={[["auto", "auto"], ...STAGES]} fewestSteps={checkpoint.step + 1} />
      <Preflight job={job} wish={wish} />
      <p className="quiet">It begins with the weights, moments and place in the data of this checkpoint, which is kept until the fork has saved twice. Other changes: shardyard fork --set.</p>
    </Confirm>
  );
}
