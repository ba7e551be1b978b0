/** What was predicted of a step at submit, beside what the newest steps took. */

import { useQuery } from "@tanstack/react-query";
import { jobPlanQuery } from "../api/queries";
import { formatBytes, formatDuration } from "../ui/format";
import { Panel } from "../ui/pieces";

/** Measured against predicted, in per cent; the API's `error` is predicted / measured - 1. */
export function deviation(error: number): string {
  const percent = Math.round(100 * (1 / (1 + error) - 1));
  return percent === 0 ? "as predicted" : `${percent > 0 ? "+" : "−"}${Math.abs(percent)} % against it`;
}

export function Prediction({ jobId }: { jobId: string }) {
  const { data: plan } = useQuery(jobPlanQuery(jobId));
  const { predicted, predicted_seconds: expected, measured_seconds: measured, error } = plan ?? {};
  if (!predicted || (expected == null && predicted.activation_bytes == null && !predicted.step_basis)) return null;
  return (
    <Panel title="One step">
      <dl className="readouts">
        {expected != null && <div><dt className="label">Predicted</dt><dd title={predicted.step_basis ?? undefined}>{formatDuration(expected)}</dd></div>}
        {measured != null && <div><dt className="label">Measured</dt><dd title="The median of the newest steps">{formatDuration(measured)}{error != null && <span className="quiet"> {deviation(error)}</span>}</dd></div>}
        {predicted.activation_bytes != null && <div><dt className="label">Activations, predicted</dt><dd title={predicted.activation_source}>{formatBytes(predicted.activation_bytes)}</dd></div>}
      </dl>
      {predicted.step_basis && <p className="quiet step-basis">{predicted.step_basis}</p>}
    </Panel>
  );
}
