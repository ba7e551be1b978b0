/** Where the bytes are: measured bands beside the plan and the paper, then the traffic of a step beside its plan. */

import { useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { messageOf, type Job, type MemorySample, type MemoryView, type Plan } from "../api/client";
import { jobPlanQuery, ledgerQuery, memoryQuery } from "../api/queries";
import { CATEGORIES, CATEGORY_WORDS, engineTotal, overSteps, peaks, plannedBytes, plannedTotal, totalOf, withinStep } from "../charts/bands";
import "../charts/charts.css";
import { MemoryBands, RankBar, type Level } from "../charts/MemoryBands";
import { formatBytes, formatCount } from "../ui/format";
import { Bones, Notice, Panel } from "../ui/pieces";
import { Prediction } from "./Prediction";
import { Traffic } from "./Traffic";

export default function Memory({ job }: { job: Job }) {
  const memory = useQuery(memoryQuery(job.id));
  const ledger = useQuery(ledgerQuery(job.id));
  if (memory.isPending) return <div className="panel"><Bones rows={6} label="Reading the memory samples" /></div>;
  if (!memory.data) return <Notice tone="bad" onRetry={() => void memory.refetch()}>{messageOf(memory.error)}</Notice>;
  const atPeak = peaks(memory.data);
  const measured = atPeak.length > 0 && ledger.data && ledger.data.ranks.length > 0
    ? { held: Math.max(...atPeak.map(engineTotal)), sent: Math.max(...ledger.data.ranks.map((rank) => rank.measured_bytes)) }
    : null;
  return (
    <>
      {atPeak.length === 0 ? (
        <div className="panel empty"><h2>Nothing measured yet</h2><p>Each rank sends its bytes by category with the first optimizer step.</p></div>
      ) : (
        <MemoryPanel job={job} view={memory.data} />
      )}
      {ledger.data && ledger.data.ranks.length > 0 && <Traffic ledger={ledger.data} />}
      <Prediction jobId={job.id} measured={measured} />
      {ledger.isError && <Notice tone="bad" onRetry={() => void ledger.refetch()}>{messageOf(ledger.error)}</Notice>}
    </>
  );
}

function MemoryPanel({ job, view }: { job: Job; view: MemoryView }) {
  const [rank, setRank] = useState(0);
  const [mode, setMode] = useState<"steps" | "phases">("steps");
  const [picked, setPicked] = useState<number | null>(null);
  const bySteps = useMemo(() => overSteps(view, rank), [view, rank]);
  const byPhases = useMemo(() => withinStep(view, rank), [view, rank]);
  const atPeak = useMemo(() => peaks(view), [view]);
  const shownMode = mode === "phases" && byPhases.length > 0 ? "phases" : "steps";
  const samples = shownMode === "phases" ? byPhases : bySteps;
  const plan = view.plan[rank];
  const levels: Level[] = [
    ...(plan ? [{ label: "plan", bytes: plannedTotal(plan), kind: "plan" as const }] : []),
    ...view.paper.map(({ stage, bytes }) => ({ label: `paper, stage ${stage}`, bytes, kind: stage === job.stage ? ("own" as const) : ("paper" as const) })),
  ];
  const resting = shownMode === "steps" ? samples.at(-1) : atPeak.find((sample) => sample.rank === rank);
  const current = (picked === null ? undefined : samples[picked]) ?? resting ?? atPeak.find((sample) => sample.rank === rank);
  const transient = current && current.buckets > 0 ? current.buckets / totalOf(current) : 0;
  return (
    <Panel
      title="Memory"
      aside={
        <>
          <span className="quiet">rank {rank}, at the peak of {shownMode === "steps" ? "each step" : "each phase of the newest step"}</span>
          {transient > 0.1 && <span className="badge warn">buckets in flight {Math.round(transient * 100)} %</span>}
          {byPhases.length > 0 && (
            <span className="push segmented" role="group" aria-label="Over">
              <button type="button" className="button" aria-pressed={shownMode === "steps"} onClick={() => setMode("steps")}>Steps</button>
              <button type="button" className="button" aria-pressed={shownMode === "phases"} onClick={() => setMode("phases")}>Within a step</button>
            </span>
          )}
        </>
      }
    >
      <div className="memory">
        <MemoryBands samples={samples} mode={shownMode} levels={levels} picked={picked} onPick={setPicked} label={`Memory of rank ${rank} by category, ${current ? `${formatBytes(totalOf(current))} at ${current.phase === "peak" ? `the peak of step ${current.step}` : current.phase}` : "no samples"}. Arrow keys move.`} />
        {current && <CategoryTable job={job} sample={current} plan={plan} levels={levels} />}
      </div>
      {atPeak.length > 1 && (
        <ul className="rank-bars" aria-label="Every rank at its peak">
          {atPeak.map((sample) => (
            <li key={sample.rank}>
              <button type="button" aria-pressed={sample.rank === rank} onClick={() => setRank(sample.rank)}>
                <span>rank {sample.rank}</span>
                <RankBar sample={sample} plan={plannedTotal(view.plan[sample.rank])} max={Math.max(...atPeak.map(totalOf), ...view.plan.map(plannedTotal))} />
                <span className="num">{formatBytes(totalOf(sample))}</span>
              </button>
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}

/** Legend and numbers in one: what each band holds now and what the plan said. */
function CategoryTable({ job, sample, plan, levels }: { job: Job; sample: MemorySample; plan: Record<string, number> | undefined; levels: readonly Level[] }) {
  const { data: jobPlan } = useQuery(jobPlanQuery(job.id));
  return (
    <div className="category-table">
      <table className="facts">
        <caption className="label">{sample.phase === "peak" ? `step ${formatCount(sample.step)}` : `${sample.phase}, step ${formatCount(sample.step)}`}</caption>
        <thead>
          <tr><th scope="col">Band</th><th scope="col" className="num">Measured</th><th scope="col" className="num">Plan</th></tr>
        </thead>
        <tbody>
          {CATEGORIES.filter((category) => sample[category] > 0 || plannedBytes(plan, category) > 0).map((category) => (
            <tr key={category}>
              <th scope="row"><i className="swatch" style={{ background: `var(--band-${category})` }} />{CATEGORY_WORDS[category]}</th>
              <td className="num" title={`${formatCount(sample[category])} bytes`}>{formatBytes(sample[category])}</td>
              {category === "activations" ? <Predicted measured={sample.activations} plan={jobPlan?.predicted} /> : (
                <td className="num" title={plan ? `${formatCount(plannedBytes(plan, category))} bytes` : undefined}>{plan ? <Against measured={sample[category]} planned={plannedBytes(plan, category)} /> : <span className="quiet">not planned</span>}</td>
              )}
            </tr>
          ))}
          <tr className="sum">
            <th scope="row">engine</th>
            <td className="num">{formatBytes(engineTotal(sample))}</td>
            <td className="num">{plan && formatBytes(plannedTotal(plan))}</td>
          </tr>
          {sample.rss > 0 && <tr><th scope="row" className="quiet">resident process</th><td className="num">{formatBytes(sample.rss)}</td><td /></tr>}
          {levels.filter((level) => level.kind !== "plan").map((level) => (
            <tr key={level.label} className="paper"><th scope="row" className="quiet">{level.label}</th><td /><td className="num quiet">{formatBytes(level.bytes)}</td></tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The model's own bytes, which the engine does not allocate: an estimate of the peak, made at submit. */
function Predicted({ measured, plan }: { measured: number; plan: Plan | null | undefined }) {
  const bytes = plan?.activation_bytes;
  if (bytes == null) return <td className="num quiet" title={plan?.activation_source}>not predicted</td>;
  return <td className="num" title={`Predicted for the peak: ${plan?.activation_source}`}><Against measured={measured} planned={bytes} /></td>;
}

export function Against({ measured, planned }: { measured: number; planned: number }) {
  if (measured === planned) return <span className="as-planned">{formatBytes(planned)} =</span>;
  return <>{formatBytes(planned)} <span className="quiet">({measured > planned ? "+" : "−"}{formatBytes(Math.abs(measured - planned))})</span></>;
}
