/** A chart's values as a table: what the picture shows, readable without seeing it. */

import { formatCount, formatNumber } from "../ui/format";
import type { Column, Line, Slots } from "./lines";

const MAX_ROWS = 2000;

interface Props {
  title: string;
  lines: readonly Line[];
  columns: [number[], ...Column[]];
  slots: readonly Slots[];
  format: (value: number) => string;
}

export function ValueTable({ title, lines, columns, slots, format }: Props) {
  const xs = columns[0];
  const start = Math.max(0, xs.length - MAX_ROWS);
  const cell = (line: Line, slot: Slots, index: number) => {
    const mark = line.marks.find((each) => each.x === xs[index]);
    if (mark) return <b style={{ color: "var(--bad)" }}>{formatNumber(mark.value)}</b>;
    const value = columns[slot.value]?.[index];
    if (value === null || value === undefined) return "";
    const [low, high] = [slot.low === null ? null : columns[slot.low]?.[index], slot.high === null ? null : columns[slot.high]?.[index]];
    if (low == null || high == null || (low === value && high === value)) return format(value);
    return <>{format(value)} <span className="quiet">{format(low)} to {format(high)}</span></>;
  };
  return (
    <div className="chart-table" tabIndex={0} role="region" aria-label={`${title} as a table`}>
      <table className="facts">
        <caption className="visually-hidden">{title}, newest step first</caption>
        <thead>
          <tr>
            <th scope="col" className="num">step</th>
            {lines.map((line) => <th key={line.label} scope="col" className="num">{line.label}</th>)}
          </tr>
        </thead>
        <tbody>
          {xs.slice(start).map((_, offset) => xs.length - 1 - offset).map((index) => (
            <tr key={xs[index]}>
              <th scope="row" className="num">{formatCount(xs[index])}</th>
              {lines.map((line, at) => <td key={line.label} className="num">{cell(line, slots[at] as Slots, index)}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
