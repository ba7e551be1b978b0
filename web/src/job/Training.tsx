/** The live curves. One zoom for all charts; it stays while data arrives until somebody follows again. */

import { useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { messageOf, type Job, type Series } from "../api/client";
import { metricsQuery, seriesNamesQuery, type StepRange } from "../api/queries";
import { jobRoute } from "../app/router";
import { linesOf, type Line } from "../charts/lines";
import { StepChart } from "../charts/StepChart";
import { formatCount, formatNumber, formatShort } from "../ui/format";
import { Bones, Notice } from "../ui/pieces";
import { AttemptStrip } from "./Attempts";
import { countedIn } from "./counts";

const MAIN = "loss,eval_loss,lr,grad_norm,tokens_per_second";
const WIDTH = 800; // points a chart asks for at most

export default function Training({ job }: { job: Job }) {
  const { more } = jobRoute.useSearch();
  const [range, setRange] = useState<StepRange | null>(null);
  const extra = useMemo(() => (more ? more.split(",") : []), [more]);
  const metrics = useQuery(metricsQuery(job.id, MAIN, WIDTH, range, job));
  const series = metrics.data?.series;
  const rateTitle = `${countedIn(job)} a second`;
  const charts = useMemo(() => {
    const of = (name: string, label: string, colour: string): Line[] => linesOf(ofFirstRank(series ?? [], name), name, label, colour);
    return {
      loss: [...of("loss", "train", "--accent"), ...of("eval_loss", "validation", "--warn")],
      lr: of("lr", "learning rate", "--accent"),
      norm: of("grad_norm", "gradient norm", "--accent"),
      rate: of("tokens_per_second", rateTitle.toLowerCase(), "--accent"),
    };
  }, [series, rateTitle]);
  const broken = series?.filter((each) => each.error) ?? [];
  const shared = { range, onRange: setRange, syncKey: job.id };
  const isWaiting = !series?.some((each) => each.points.length > 0 || each.non_finite.length > 0);

  if (metrics.isPending) return <div className="panel"><Bones rows={6} label="Reading the curves" /></div>;
  if (metrics.isError && !metrics.data) return <Notice tone="bad" onRetry={() => void metrics.refetch()}>{messageOf(metrics.error)}</Notice>;
  return (
    <>
      <div className="training-bar">
        <FollowPill range={range} isLive={job.status === "running"} onFollow={() => setRange(null)} />
        <OutOfOrder job={job} />
        <span className="training-tools">
          <SeriesPicker job={job} chosen={extra} />
          <a className="button plain" href={`/v1/jobs/${job.id}/metrics?format=csv`} download={`${job.id}.csv`}>CSV</a>
        </span>
      </div>
      {broken.map((each) => <Notice key={`${each.name}-${each.attempt}`} tone="bad">The series {each.name} of attempt {each.attempt} could not be read: {each.error}</Notice>)}
      {isWaiting ? (
        <div className="panel empty"><h2>Nothing measured yet</h2><p>The curves begin with the first optimizer step.</p></div>
      ) : (
        <div className="charts">
          <StepChart title="Loss" lines={charts.loss} height={250} {...shared} />
          <StepChart title="Gradient norm" lines={charts.norm} height={250} {...shared} />
          <StepChart title="Learning rate" lines={charts.lr} format={(value) => formatNumber(value, 3)} {...shared} />
          <StepChart title={rateTitle} lines={charts.rate} format={formatShort} {...shared} />
          {extra.map((name) => <ExtraChart key={name} job={job} name={name} {...shared} />)}
        </div>
      )}
      <AttemptStrip job={job} />
    </>
  );
}

/** The job's own curves come from one rank; where several send one of that name, the first speaks. */
function ofFirstRank(series: readonly Series[], name: string): Series[] {
  const mine = series.filter((each) => each.name === name);
  const first = Math.min(...mine.map((each) => each.rank ?? 0));
  return mine.filter((each) => (each.rank ?? 0) === first);
}

function FollowPill({ range, isLive, onFollow }: { range: StepRange | null; isLive: boolean; onFollow: () => void }) {
  if (!range) return <p className="quiet hint">Drag over a chart to zoom{isLive ? "; new steps appear as they are taken" : ""}.</p>;
  return (
    <button type="button" className="button follow" onClick={onFollow}>
      <span>steps {formatCount(range.from)} to {formatCount(range.to)}</span>
      <b>{isLive ? "Follow" : "Show all"}</b>
    </button>
  );
}

/** Steps that came after later ones are stored where they belong; that it happened is said. */
function OutOfOrder({ job }: { job: Job }) {
  const names = useQuery(seriesNamesQuery(job.id));
  const count = names.data?.series.reduce((sum, series) => sum + series.out_of_order_count, 0) ?? 0;
  return count > 0 && <span className="badge warn" title="Values of a step that arrived after a later step's; they stand at their own step">{formatCount(count)} out of order</span>;
}

/** One more series, read only when chosen: a job may have thousands. */
function ExtraChart({ job, name, ...shared }: { job: Job; name: string; range: StepRange | null; onRange: (range: StepRange | null) => void; syncKey: string }) {
  const metrics = useQuery(metricsQuery(job.id, name, WIDTH, shared.range, job));
  const series = metrics.data?.series ?? NO_SERIES;
  const lines = useMemo(() => {
    const ranks = [...new Set(series.map((each) => each.rank))];
    return ranks.flatMap((rank, index) => linesOf(series.filter((each) => each.rank === rank), name, ranks.length > 1 ? `rank ${rank}` : name, INKS[index % INKS.length] ?? "--accent"));
  }, [series, name]);
  return <StepChart title={name} unit={series[0]?.unit} lines={lines} {...shared} />;
}

const NO_SERIES: never[] = [];
const INKS = ["--accent", "--warn", "--band-params", "--band-grads", "--band-master", "--band-buckets"];

function SeriesPicker({ job, chosen }: { job: Job; chosen: readonly string[] }) {
  const navigate = jobRoute.useNavigate();
  const names = useQuery(seriesNamesQuery(job.id));
  const [text, setText] = useState("");
  const main = new Set(MAIN.split(","));
  const others = [...new Set(names.data?.series.map((each) => each.name) ?? [])].filter((name) => !main.has(name));
  if (others.length === 0) return null;
  const set = (next: readonly string[]) => void navigate({ search: (old) => ({ ...old, more: next.join(",") || undefined }), replace: true, resetScroll: false });
  return (
    <div className="series-picker">
      {chosen.map((name) => (
        <button key={name} type="button" className="button" onClick={() => set(chosen.filter((each) => each !== name))} aria-label={`Remove the chart of ${name}`}>
          {name} <span aria-hidden="true">×</span>
        </button>
      ))}
      <input
        className="input"
        list="series-names"
        aria-label="Add a chart of another series"
        placeholder={others.length === 1 ? "Add one more series" : `Add one of ${others.length} more series`}
        value={text}
        onChange={(event) => {
          const value = event.target.value;
          const isNew = others.includes(value) && !chosen.includes(value);
          setText(isNew ? "" : value);
          if (isNew) set([...chosen, value]);
        }}
      />
      <datalist id="series-names">
        {others.filter((name) => !chosen.includes(name)).slice(0, 500).map((name) => <option key={name} value={name} />)}
      </datalist>
    </div>
  );
}
