/** One question for all selected jobs, naming each; then one result for each. */

import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, body, messageOf, type JobRow } from "../api/client";
import { Confirm } from "../ui/Confirm";
import { State } from "../ui/State";
import { shortId } from "../ui/format";
import { tell } from "../ui/toasts";

export function BulkCancel({ jobs, onClose }: { jobs: readonly JobRow[]; onClose: (done: boolean) => void }) {
  const client = useQueryClient();
  const [named] = useState(jobs); // as they stood when the question was asked
  const able = named.filter((job) => job.allowed_actions.includes("cancel"));
  const unable = named.filter((job) => !job.allowed_actions.includes("cancel"));
  const names = new Map(named.map((job) => [job.id, job.name]));
  const cancel = useMutation({
    mutationFn: () => body(api.POST("/v1/jobs/cancel", { body: { ids: able.map((job) => job.id) } })),
    onSuccess: ({ results }) => {
      for (const result of results.filter((each) => !each.ok)) tell(`${names.get(result.id) ?? result.id}: ${result.error ?? "was not cancelled"}`, "bad");
      tell(`${results.filter((each) => each.ok).length} of ${results.length} jobs are being cancelled.`);
      void client.invalidateQueries({ queryKey: ["jobs"] });
      onClose(true);
    },
  });
  return (
    <Confirm
      title={able.length === 0 ? "None of these can be cancelled" : able.length === 1 ? `Cancel “${able[0]?.name}”?` : `Cancel ${able.length} jobs?`}
      verb={able.length === 1 ? "Cancel job" : `Cancel ${able.length} jobs`}
      danger
      busy={cancel.isPending}
      impossible={able.length === 0}
      error={cancel.isError ? messageOf(cancel.error) : null}
      onConfirm={() => cancel.mutate()}
      onClose={() => onClose(false)}
    >
      {able.length > 0 && (
        <>
          <p className="quiet">Each saves a checkpoint at its next step and leaves. It can be resumed later.</p>
          <ul className="named" tabIndex={0} aria-label="Jobs to cancel">
            {able.map((job) => <li key={job.id}><bdi>{job.name}</bdi> <span className="quiet mono">{shortId(job.id)}</span></li>)}
          </ul>
        </>
      )}
      {unable.length > 0 && (
        <>
          <p className="quiet">Left alone, because their state has nothing to cancel:</p>
          <ul className="named" tabIndex={0} aria-label="Jobs left alone">
            {unable.map((job) => <li key={job.id}><bdi>{job.name}</bdi> <State status={job.status} /></li>)}
          </ul>
        </>
      )}
    </Confirm>
  );
}
