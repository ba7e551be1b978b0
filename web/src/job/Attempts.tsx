/** The attempts of a job and, for the newest, each rank as last seen. */

import { useQuery } from "@tanstack/react-query";
import type { Attempt, Job } from "../api/client";
import { attemptsQuery } from "../api/queries";
import { useNow } from "../ui/clock";
import { formatBytes, formatCount, formatDuration, formatTime, secondsBetween } from "../ui/format";
import { Panel } from "../ui/pieces";
import { Reason } from "../ui/Reason";
import { State } from "../ui/State";

const MANY_RANKS = 64;

export function AttemptStrip({ job }: { job: Job }) {
  const attempts = useQuery(attemptsQuery(job.id));
  const now = useNow();
  const items = [...(attempts.data?.items ?? [])].sort((a, b) => b.number - a.number);
  if (items.length === 0) return null;
  return (
    <Panel title="Attempts" aside={<span className="quiet">each launch of the whole group of ranks</span>} flush>
      <div className="scroll-x" tabIndex={0} role="region" aria-label="Attempts">
        <table className="facts">
          <thead>
            <tr>
              <th scope="col">Attempt</th>
              <th scope="col">State</th>
              <th scope="col">Ranks × stage</th>
              <th scope="col" className="num">Steps</th>
              <th scope="col">Started</th>
              <th scope="col" className="num">Took</th>
              <th scope="col">Digest</th>
              <th scope="col" className="why">Why</th>
            </tr>
          </thead>
          <tbody>
            {items.map((attempt) => (
              <tr key={attempt.id}>
                <th scope="row">{attempt.number}</th>
                <td><State status={attempt.status} /></td>
                <td className="nowrap">{attempt.ranks} × {attempt.stage}</td>
                <td className="num">{stepsOf(attempt)}</td>
                <td className="nowrap">{formatTime(attempt.created_at, now)}</td>
                <td className="num">{formatDuration(secondsBetween(attempt.created_at, attempt.ended_at ?? now))}</td>
                <td className="mono">{attempt.digest ?? "–"}</td>
                <td className="why">
                  {attempt.reason && <Reason text={attempt.reason.sentence} />}
                  {attempt.resumed_from_step !== null && <p className="quiet">from the checkpoint at step {formatCount(attempt.resumed_from_step)}</p>}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {items[0] && !items[0].ended_at && <Ranks attempt={items[0]} />}
    </Panel>
  );
}

function stepsOf({ first_step: first, last_step: last }: Attempt): string {
  return first === null || last === null ? "–" : `${formatCount(first)} – ${formatCount(last)}`;
}

function Ranks({ attempt }: { attempt: Attempt }) {
  return (
    <ul className="ranks" aria-label={`Ranks of attempt ${attempt.number}`}>
      {attempt.rank_states.slice(0, MANY_RANKS).map((rank) => (
        <li key={rank.rank} data-status={rank.status}>
          <b>rank {rank.rank}</b>
          <span>{rank.status === "running" ? (rank.phase ?? "running") : rank.status}</span>
          <span className="quiet">
            {[rank.node, rank.pid !== null && `pid ${rank.pid}`, rank.peak_rss_bytes !== null && rank.peak_rss_bytes !== undefined && `peak ${formatBytes(rank.peak_rss_bytes)}`].filter(Boolean).join(" · ")}
          </span>
        </li>
      ))}
      {attempt.rank_states.length > MANY_RANKS && <li className="quiet">and {attempt.rank_states.length - MANY_RANKS} more</li>}
    </ul>
  );
}
