/** How a resume or a fork is laid out: ranks, stage and the last step. None of it changes a bit but the last step. */

import type { Job } from "../api/client";

export interface Shape {
  ranks: string;
  stage: string;
  steps: string;
}

interface Props {
  job: Job;
  shape: Shape;
  onChange: (shape: Shape) => void;
  /** Stages to choose from, the words for each by its value. */
  stages: readonly (readonly [value: string, words: string])[];
  fewestSteps: number;
}

export const STAGES = ["0", "1", "2", "3"].map((stage) => [stage, stage] as const);

export function ShapeFields({ job, shape, onChange, stages, fewestSteps }: Props) {
  return (
    <div className="field-row">
      <label className="field">
        <span>Ranks</span>
        <input className="input" aria-label="Ranks" type="number" min={1} max={job.micro_batches} required value={shape.ranks} onChange={(event) => onChange({ ...shape, ranks: event.target.value })} />
      </label>
      <label className="field">
        <span>Stage</span>
        <select className="select" aria-label="Stage" value={shape.stage} onChange={(event) => onChange({ ...shape, stage: event.target.value })}>
          {stages.map(([value, words]) => <option key={value} value={value}>{words}</option>)}
        </select>
      </label>
      <label className="field">
        <span>Steps in all</span>
        <input className="input" aria-label="Steps in all" type="number" min={fewestSteps} required value={shape.steps} onChange={(event) => onChange({ ...shape, steps: event.target.value })} />
      </label>
    </div>
  );
}
