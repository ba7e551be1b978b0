/** What the spec would cost at each stage, beside the paper's numbers, before anything starts. */

import type { Plan, StagePlan } from "../api/client";
import { CATEGORIES, CATEGORY_WORDS, plannedBytes } from "../charts/bands";
import { formatBytes, formatCount, formatNumber, formatShort } from "../ui/format";

interface Props {
  plan: Plan;
  chosen: number | null; // the stage the spec names; null: auto
  isOld: boolean; // the text has changed since
}

export function PlanPanel({ plan, chosen, isOld }: Props) {
  const stage = chosen ?? plan.advised_stage;
  const max = Math.max(1, ...plan.stages.flatMap((each) => [each.total_bytes, each.paper_bytes]));
  return (
    <div className="plan" data-old={isOld || undefined}>
      <dl className="plan-facts">
        <div><dt className="label">Parameters</dt><dd title={formatCount(plan.parameters)}>{formatShort(plan.parameters)}</dd></div>
        <div><dt className="label">Ranks</dt><dd>{plan.ranks}</dd></div>
        <div><dt className="label">V</dt><dd title="micro-batches a step">{plan.micro_batches}</dd></div>
        <div><dt className="label">C</dt><dd title="micro-batches summed before they travel">{plan.chunk}</dd></div>
        {plan.activation_bytes !== null && <div><dt className="label">Activations</dt><dd title={`at the peak of a micro-batch, beside the bars below; ${plan.activation_source}`}>{formatBytes(plan.activation_bytes)}</dd></div>}
        {plan.device_memory_bytes !== null && <div><dt className="label">A rank may hold</dt><dd>{formatBytes(plan.device_memory_bytes)}</dd></div>}
      </dl>
      <p className="advice">{plan.advice}</p>
      {!plan.exact && <p className="quiet">An estimate: the vocabulary is known only when the text has been read.</p>}
      {plan.note && <p className="quiet">{plan.note}</p>}
      {plan.idle_share > 0 && <p className="plan-warn">{Math.round(plan.idle_share * 100)} % of the rank time is idle: {plan.micro_batches} micro-batches do not divide evenly over {plan.ranks} ranks.</p>}
      {isHeavierAtStage2(plan) && <p className="plan-warn">Stage 2 takes more than stage 1 here: its buckets in flight weigh more than the gradients it shards.</p>}
      <ol className="stages">
        {plan.stages.map((each) => <Stage key={each.stage} plan={each} max={max} isChosen={each.stage === stage} isAdvised={each.stage === plan.advised_stage} />)}
      </ol>
      <Legend plan={plan} />
      {plan.step_basis && <p className="quiet step-basis">{plan.step_basis}</p>}
    </div>
  );
}

function isHeavierAtStage2(plan: Plan): boolean {
  const bytes = (stage: number) => plan.stages.find((each) => each.stage === stage)?.total_bytes ?? 0;
  return bytes(2) > bytes(1);
}

function Stage({ plan, max, isChosen, isAdvised }: { plan: StagePlan; max: number; isChosen: boolean; isAdvised: boolean }) {
  let at = 0;
  const parts = CATEGORIES.filter((category) => plannedBytes(plan.memory, category) > 0);
  return (
    <li className="stage-plan" aria-current={isChosen ? "true" : undefined}>
      <div className="stage-head">
        <b>Stage {plan.stage}</b>
        {isAdvised && <span className="badge accent">advised</span>}
        {!plan.fits && <span className="badge bad">does not fit</span>}
        <span className="push">{formatBytes(plan.total_bytes)} <span className="quiet">a rank</span></span>
      </div>
      <svg className="rank-bar" viewBox="0 0 1000 16" preserveAspectRatio="none" role="img" aria-label={parts.map((category) => `${CATEGORY_WORDS[category]} ${formatBytes(plannedBytes(plan.memory, category))}`).join(", ")}>
        {parts.map((category) => {
          const [start, width] = [at, (1000 * plannedBytes(plan.memory, category)) / max];
          at += width;
          return <rect key={category} x={start} y="2" width={width} height="12" fill={`var(--band-${category})`} stroke="var(--panel)" strokeWidth="1" vectorEffect="non-scaling-stroke" />;
        })}
        <line x1={(1000 * plan.paper_bytes) / max} x2={(1000 * plan.paper_bytes) / max} y1="0" y2="16" stroke="var(--ink)" strokeWidth="1.5" strokeDasharray="3 2" vectorEffect="non-scaling-stroke" />
      </svg>
      <p className="stage-foot quiet">
        <span>paper {formatBytes(plan.paper_bytes)}</span>
        <span>sends {formatBytes(plan.total_traffic_bytes)} a step <span className="nowrap">(paper {formatBytes(plan.paper_traffic_bytes)})</span></span>
        {plan.step_seconds && <span title={stepParts(plan.step_seconds)}>{formatNumber(plan.step_seconds.total, 2)} s a step</span>}
        {plan.saving > 0.005 && <span className="push">saves {Math.round(plan.saving * 100)} %</span>}
      </p>
    </li>
  );
}

/** What a predicted step is made of, as a hint. */
function stepParts(seconds: { compute: number; exchange: number; update: number }): string {
  return `predicted: compute ${formatNumber(seconds.compute, 2)} s, exchange ${formatNumber(seconds.exchange, 2)} s, update ${formatNumber(seconds.update, 2)} s`;
}

function Legend({ plan }: { plan: Plan }) {
  const used = CATEGORIES.filter((category) => plan.stages.some((stage) => plannedBytes(stage.memory, category) > 0));
  return (
    <ul className="legend">
      {used.map((category) => <li key={category}><i className="swatch" style={{ background: `var(--band-${category})` }} />{CATEGORY_WORDS[category]}</li>)}
      <li><svg width="9" height="12" aria-hidden="true"><line x1="4" x2="4" y1="0" y2="12" stroke="var(--ink)" strokeWidth="1.5" strokeDasharray="3 2" /></svg> the paper&apos;s formula</li>
    </ul>
  );
}
