/** Where the job comes from and what came of it: each attempt is a stretch of steps, each branch a checkpoint; also as a table. */

import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import type { Job } from "../api/client";
import { lineageQuery } from "../api/queries";
import { formatCount } from "../ui/format";
import { Panel } from "../ui/pieces";
import { beginningOf, familyOf, type Branch, type Family, type Stretch } from "./lineage";

const ROW = 28;
const LEFT = 170; // where step 0 stands
const WIDTH = 720;
const RIGHT = 24;
const NAME = 22; // characters of a name that fit

export function LineagePanel({ job }: { job: Job }) {
  const lineage = useQuery(lineageQuery(job.id));
  if (!lineage.data) return null;
  const family = familyOf(lineage.data);
  if (family.stretches.length < 2) return null;
  return (
    <Panel title="Lineage" aside={<span className="quiet">{lineage.data.truncated ? "the first hundred jobs of the family" : "attempts, forks and clones along the steps"}</span>} flush>
      <div className="scroll-x" tabIndex={0} role="region" aria-label="Lineage as a picture">
        <Picture family={family} job={job} />
      </div>
      <details className="lineage-table">
        <summary>As a table</summary>
        <div className="scroll-x" tabIndex={0} role="region" aria-label="Lineage as a table">
          <Table family={family} job={job} />
        </div>
      </details>
    </Panel>
  );
}

const across = (family: Family, step: number) => LEFT + (step / family.steps) * (WIDTH - LEFT - RIGHT);
const down = (stretch: Stretch) => 20 + stretch.row * ROW;

function Picture({ family, job }: { family: Family; job: Job }) {
  const height = 20 + family.stretches.length * ROW + 18;
  return (
    <svg className="lineage" viewBox={`0 0 ${WIDTH} ${height}`} width={WIDTH} height={height} role="img" aria-label={`${family.stretches.length} attempts of a family of jobs, up to step ${family.steps}`}>
      {[0, 0.5, 1].map((share) => {
        const x = across(family, share * family.steps);
        return (
          <g key={share}>
            <line className="lineage-rule" x1={x} x2={x} y1={6} y2={height - 16} />
            <text className="lineage-step" x={x} y={height - 4} textAnchor={share === 1 ? "end" : share === 0 ? "start" : "middle"}>{formatCount(Math.round(share * family.steps))}</text>
          </g>
        );
      })}
      {family.branches.map((branch) => <BranchLine key={branch.key} family={family} branch={branch} />)}
      {family.stretches.map((stretch) => <StretchLine key={stretch.key} family={family} stretch={stretch} own={stretch.job.id === job.id} />)}
    </svg>
  );
}

function StretchLine({ family, stretch, own }: { family: Family; stretch: Stretch; own: boolean }) {
  const y = down(stretch);
  const [from, to] = [across(family, stretch.first), across(family, stretch.last)];
  const name = own ? `attempt ${stretch.attempt ?? "–"}` : short(stretch.job.name) + (stretch.attempt && stretch.job.attempts.length > 1 ? ` · ${stretch.attempt}` : "");
  return (
    <g className="lineage-stretch" data-own={own}>
      <title>{`${stretch.job.name}, ${stretch.attempt === null ? "not started" : `attempt ${stretch.attempt}`}: ${beginningOf(family, stretch)}`}</title>
      <text className="lineage-name" x={8} y={y + 4}>{name}</text>
      <line x1={from} x2={Math.max(to, from + 2)} y1={y} y2={y} />
      <circle cx={from} cy={y} r={4} />
      <text className="lineage-what" x={Math.min(Math.max(to, from) + 8, WIDTH - 90)} y={y - 6}>{stretch.what}</text>
    </g>
  );
}

function BranchLine({ family, branch }: { family: Family; branch: Branch }) {
  if (!branch.from) return null;
  const x = across(family, branch.link.step);
  const [top, bottom] = [down(branch.from), down(branch.to)];
  return <path className="lineage-branch" data-kind={branch.link.kind} data-resharded={branch.link.resharded} d={`M${x} ${top} C${x - 14} ${top + 8}, ${x - 14} ${bottom - 8}, ${x} ${bottom}`} />;
}

function Table({ family, job }: { family: Family; job: Job }) {
  return (
    <table className="facts">
      <thead>
        <tr><th scope="col">Job</th><th scope="col" className="num">Attempt</th><th scope="col">Ranks × stage</th><th scope="col" className="num">Steps</th><th scope="col">Began</th></tr>
      </thead>
      <tbody>
        {family.stretches.map((stretch) => (
          <tr key={stretch.key}>
            <th scope="row">{stretch.job.id === job.id ? "this job" : <Link to="/jobs/$id" params={{ id: stretch.job.id }}><bdi>{stretch.job.name}</bdi></Link>}</th>
            <td className="num">{stretch.attempt ?? "–"}</td>
            <td className="nowrap">{stretch.what}</td>
            <td className="num nowrap">{stretch.attempt === null ? "–" : `${formatCount(stretch.first)} to ${formatCount(stretch.last)}`}</td>
            <td><bdi>{beginningOf(family, stretch)}</bdi></td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function short(name: string): string {
  const letters = [...name];
  return letters.length > NAME ? `${letters.slice(0, NAME - 1).join("")}…` : name;
}
