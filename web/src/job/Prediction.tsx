/** The plan of a job: whole before anything is measured, then beside what its ranks measured, or why there is none. */

import { useQuery } from "@tanstack/react-query";
import type { JobPlan, Plan } from "../api/client";
import { jobPlanQuery } from "../api/queries";
import "../new/new.css";
import { PlanPanel } from "../new/PlanPanel";
import { plain } from "../ui/ansi";
import { formatBytes, formatCount, formatDuration } from "../ui/format";
import { Panel } from "../ui/pieces";

export interface Measured {
  held: number; // engine bytes of the largest rank
  sent: number; // of the busiest rank in a step
}

/** Measured against predicted, in per cent; the API's `error` is predicted / measured - 1. */
export function deviation(error: number): string {
  const percent = Math.round(100 * (1 / (1 + error) - 1));
  return percent === 0 ? "as predicted" : `${percent > 0 ? "+" : "−"}${Math.abs(percent)} % against it`;
}

export function Prediction({ jobId, measured }: { jobId: string; measured: Measured | null }) {
  const { data: plan } = useQuery(jobPlanQuery(jobId));
  if (!plan) return null;
  const { predicted } = plan;
  if (!predicted) return <Unplanned plan={plan} />;
  if (!measured) return <Panel title="Plan"><PlanPanel plan={predicted} chosen={plan.stage} isOld={false} /></Panel>;
  return <Beside plan={plan} predicted={predicted} measured={measured} />;
}

function Unplanned({ plan: { status, failure } }: { plan: JobPlan }) {
  if (status === "pending") return <div className="panel empty" role="status"><h2>The plan is being made</h2><p>The model is built for it in a process of its own, which takes some seconds.</p></div>;
  if (status !== "failed" || !failure) return null;
  return (
    <div className="notice bad failure" role="alert">
      <div>
        <p><b>No plan can be made of this model</b></p>
        <pre tabIndex={0} aria-label="Why">{plain(failure)}</pre>
      </div>
    </div>
  );
}

function Beside({ plan, predicted, measured }: { plan: JobPlan; predicted: Plan; measured: Measured }) {
  const { predicted_seconds: expected, measured_seconds: seconds, error } = plan;
  const stage = predicted.ranks === plan.memory.length ? predicted.stages.find((each) => each.stage === plan.stage) : undefined;
  return (
    <Panel title="One step">
      <dl className="readouts">
        {stage && <Met label="A rank holds" planned={stage.total_bytes} measured={measured.held} />}
        {stage && <Met label="A rank sends" planned={stage.total_traffic_bytes} measured={measured.sent} />}
        {expected != null && <div><dt className="label">Predicted</dt><dd title={predicted.step_basis ?? undefined}>{formatDuration(expected)}</dd></div>}
        {seconds != null && <div><dt className="label">Measured</dt><dd title="The median of the newest steps">{formatDuration(seconds)}{error != null && <span className="quiet"> {deviation(error)}</span>}</dd></div>}
        {predicted.activation_bytes != null && <div><dt className="label">Activations, predicted</dt><dd title={predicted.activation_source}>{formatBytes(predicted.activation_bytes)}</dd></div>}
      </dl>
      {predicted.step_basis && <p className="quiet step-basis">{predicted.step_basis}</p>}
    </Panel>
  );
}

/** Bytes that were planned before the launch, and whether they were met. */
function Met({ label, planned, measured }: { label: string; planned: number; measured: number }) {
  const gap = measured === planned ? "as planned" : `${formatBytes(planned)} planned`;
  return <div><dt className="label">{label}</dt><dd title={`${formatCount(measured)} bytes measured, ${formatCount(planned)} planned before the launch`}>{formatBytes(measured)} <span className="quiet">{gap}</span></dd></div>;
}
