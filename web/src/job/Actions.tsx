/** The buttons a job's state allows. What cannot be taken back asks first and names the job. */

import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useState } from "react";
import { api, body, messageOf, type Checkpoint, type Job } from "../api/client";
import { jobQuery, meQuery } from "../api/queries";
import { Confirm } from "../ui/Confirm";
import { tell } from "../ui/toasts";
import { ResumeDialog } from "./ResumeDialog";

type Ask = "cancel" | "kill" | "delete" | "resume" | null;

export function Actions({ job, checkpoints }: { job: Job; checkpoints: readonly Checkpoint[] }) {
  const [ask, setAsk] = useState<Ask>(null);
  const navigate = useNavigate();
  const send = useAction(job, () => setAsk(null));
  const me = useQuery(meQuery);
  const may = (action: Job["allowed_actions"][number]) => me.data?.role !== "viewer" && job.allowed_actions.includes(action);
  const close = () => {
    send.reset();
    setAsk(null);
  };
  const error = send.isError ? messageOf(send.error) : null;
  const lastSaved = Math.max(0, ...checkpoints.filter((each) => each.status !== "corrupt").map((each) => each.step));
  return (
    <div className="job-actions" role="group" aria-label="Actions">
      {may("pause") && <button type="button" className="button" disabled={send.isPending} onClick={() => send.mutate("pause")}>Pause</button>}
      {may("resume") && <button type="button" className="button primary" onClick={() => setAsk("resume")}>Resume…</button>}
      {may("clone") && <button type="button" className="button" onClick={() => void navigate({ to: "/new", search: { from: job.id } })}>Copy spec</button>}
      {may("cancel") && <button type="button" className="button danger" onClick={() => setAsk("cancel")}>Cancel…</button>}
      {may("kill") && <button type="button" className="button danger" onClick={() => setAsk("kill")}>Kill…</button>}
      {may("delete") && <button type="button" className="button danger" onClick={() => setAsk("delete")}>Delete…</button>}
      {ask === "cancel" && (
        <Confirm title={`Cancel “${job.name}”?`} verb="Cancel job" danger busy={send.isPending} error={error} onConfirm={() => send.mutate("cancel")} onClose={close}>
          <p className="quiet">{job.status === "queued" || job.status === "paused" ? "It will not start. It can be resumed later." : "All ranks stop after the same step, save a checkpoint and leave. It can be resumed later, also on other ranks or another stage."}</p>
        </Confirm>
      )}
      {ask === "kill" && (
        <Confirm title={`Kill “${job.name}”?`} verb="Kill job" danger busy={send.isPending} error={error} onConfirm={() => send.mutate("kill")} onClose={close}>
          <p className="quiet">Every process ends at once, without a checkpoint. {job.step > lastSaved ? `Steps ${lastSaved + 1} to ${job.step} are lost.` : ""}</p>
        </Confirm>
      )}
      {ask === "delete" && (
        <Confirm title={`Delete “${job.name}”?`} verb="Delete job" danger busy={send.isPending} error={error} onConfirm={() => send.mutate("delete")} onClose={close}>
          <p className="quiet">Its curves, logs and checkpoints are removed for good.</p>
        </Confirm>
      )}
      {ask === "resume" && <ResumeDialog job={job} checkpoints={checkpoints} onClose={close} />}
    </div>
  );
}

function useAction(job: Job, onDone: () => void) {
  const client = useQueryClient();
  const navigate = useNavigate();
  return useMutation({
    mutationFn: async (action: "pause" | "cancel" | "kill" | "delete"): Promise<Job | null> => {
      const at = { params: { path: { job_id: job.id } } };
      switch (action) {
        case "pause":
          return body(api.POST("/v1/jobs/{job_id}/pause", at));
        case "cancel":
          return body(api.POST("/v1/jobs/{job_id}/cancel", at));
        case "kill":
          return body(api.POST("/v1/jobs/{job_id}/kill", at));
        case "delete":
          await api.DELETE("/v1/jobs/{job_id}", at);
          return null;
      }
    },
    onSuccess: (next, action) => {
      if (next) client.setQueryData(jobQuery(job.id).queryKey, next);
      void client.invalidateQueries({ queryKey: ["jobs"] });
      onDone();
      if (action !== "delete") return;
      tell(`“${job.name}” is being deleted.`);
      void navigate({ to: "/" });
    },
    onError: (error, action) => {
      if (action === "pause") tell(`“${job.name}” was not paused: ${messageOf(error)}`, "bad");
      void client.invalidateQueries({ queryKey: ["job", job.id] });
    },
  });
}
