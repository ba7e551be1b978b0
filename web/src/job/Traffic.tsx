/** Bytes on the wire of one step by purpose: measured bars, the plan as a mark on each. */

import { useState } from "react";
import type { LedgerView } from "../api/client";
import { formatBytes, formatCount, formatDuration } from "../ui/format";
import { Panel } from "../ui/pieces";

interface Row {
  purpose: string;
  planned: number;
  measured: number;
  seconds: number;
}

/** All ranks added, or one: seconds are the slowest rank's, because the others wait for it. */
export function rowsOf(ledger: LedgerView, rank: number | null): Row[] {
  const rows = new Map<string, Row>();
  for (const each of ledger.ranks) {
    if (rank !== null && each.rank !== rank) continue;
    for (const { purpose, planned_bytes: planned, measured_bytes: measured, seconds } of each.entries) {
      const row = rows.get(purpose) ?? { purpose, planned: 0, measured: 0, seconds: 0 };
      rows.set(purpose, { purpose, planned: row.planned + (planned ?? 0), measured: row.measured + (measured ?? 0), seconds: Math.max(row.seconds, seconds ?? 0) });
    }
  }
  return [...rows.values()].sort((a, b) => b.planned + b.measured - a.planned - a.measured);
}

export function Traffic({ ledger }: { ledger: LedgerView }) {
  const [rank, setRank] = useState<number | null>(null);
  const rows = rowsOf(ledger, rank);
  const max = Math.max(1, ...rows.map((row) => Math.max(row.planned, row.measured)));
  const [planned, measured] = [rows.reduce((sum, row) => sum + row.planned, 0), rows.reduce((sum, row) => sum + row.measured, 0)];
  return (
    <Panel
      title="Traffic"
      flush
      aside={
        <>
          <span className="quiet">sent in step {formatCount(ledger.ranks[0]?.step)}</span>
          {measured === planned ? <span className="badge accent">equals the plan to the byte</span> : <span className="badge warn">{measured > planned ? "+" : "−"}{formatBytes(Math.abs(measured - planned))} against the plan</span>}
          <label className="push quiet">
            Rank{" "}
            <select className="select" value={rank ?? ""} onChange={(event) => setRank(event.target.value === "" ? null : Number(event.target.value))}>
              <option value="">all</option>
              {ledger.ranks.map((each) => <option key={each.rank} value={each.rank}>{each.rank}</option>)}
            </select>
          </label>
        </>
      }
    >
      <div className="scroll-x" tabIndex={0} role="region" aria-label="Traffic by purpose">
        <table className="facts traffic">
          <thead>
            <tr><th scope="col">Purpose</th><th scope="col" className="wide"><span className="visually-hidden">Share</span></th><th scope="col" className="num">Measured</th><th scope="col" className="num">Plan</th><th scope="col" className="num">Slowest rank</th></tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.purpose}>
                <th scope="row">{row.purpose}</th>
                <td className="wide">
                  <svg className="rank-bar" viewBox="0 0 1000 16" preserveAspectRatio="none" aria-hidden="true">
                    <rect x="0" y="3" width={(1000 * row.measured) / max} height="10" fill="var(--accent)" />
                    <line x1={(1000 * row.planned) / max} x2={(1000 * row.planned) / max} y1="0" y2="16" stroke="var(--ink)" strokeWidth="2" vectorEffect="non-scaling-stroke" />
                  </svg>
                </td>
                <td className="num" title={`${formatCount(row.measured)} bytes`}>{formatBytes(row.measured)}</td>
                <td className="num" title={`${formatCount(row.planned)} bytes`}>{row.measured === row.planned ? <span className="as-planned">{formatBytes(row.planned)} =</span> : formatBytes(row.planned)}</td>
                <td className="num">{formatDuration(row.seconds)}</td>
              </tr>
            ))}
            {ledger.paper_bytes !== null && rank === null && (
              <tr><th scope="row" className="quiet">the paper, gradients and parameters</th><td className="wide" /><td /><td className="num quiet">{formatBytes(ledger.paper_bytes)}</td><td /></tr>
            )}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}
