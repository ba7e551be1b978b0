/**
 * A chart over the job's steps. The zoom belongs to the page and is kept while data arrives; the keyboard moves the cursor and zooms;
 * the same values can be read as a table.
 */

import { useEffect, useId, useLayoutEffect, useMemo, useRef, useState, type KeyboardEvent, type ReactNode } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { StepRange } from "../api/queries";
import { formatCount, formatNumber } from "../ui/format";
import { onTheme } from "../ui/theme";
import "./charts.css";
import { align, indexAt, type Column, type Line } from "./lines";
import { plotOptions, type PlotHooks, type YScale } from "./plot";
import { ValueTable } from "./ValueTable";

interface Props {
  title: string;
  unit?: string | null;
  lines: readonly Line[];
  range: StepRange | null;
  onRange: (range: StepRange | null) => void;
  format?: (value: number) => string;
  height?: number;
  syncKey: string;
  note?: ReactNode;
}

export function StepChart({ title, unit, lines, range, onRange, format = formatNumber, height = 190, syncKey, note }: Props) {
  const [scale, setScale] = useState<YScale>("linear");
  const [asTable, setAsTable] = useState(false);
  const [shown, setShown] = useState<number | null>(null); // index under the cursor
  const { columns, slots } = useMemo(() => align(lines), [lines]);
  const { holder, plot } = usePlot({ lines, columns, slots, scale, height, range, onRange, onCursor: setShown, syncKey, hidden: asTable });
  const xs = columns[0];
  const readouts = lines.flatMap((line, index) => {
    if (line.dim && shown === null) return [];
    const column = columns[slots[index]?.value ?? 0] as Column;
    const at = shown ?? indexAt(xs, column, range?.to ?? Infinity);
    if (at === null) return [];
    const x = xs[at] as number;
    const mark = line.marks.find((each) => each.x === x);
    const value = mark ? mark.value : column[at];
    if (value === undefined) return [];
    return [{ line, x, text: value === null ? "no value" : Number.isFinite(value) ? format(value) : formatNumber(value) }];
  });
  const nonFinite = lines.reduce((sum, line) => sum + line.nonFiniteCount, 0);
  const step = shown === null ? null : xs[shown];
  const spoken = shown === null ? "" : `step ${step}: ${readouts.map(({ line, text }) => `${line.label} ${text}`).join(", ")}`;
  const hintId = useId();

  return (
    <figure className="chart panel" data-testid={`chart-${title}`}>
      <header>
        <h2>{title}{unit && <span className="quiet"> {unit}</span>}</h2>
        {nonFinite > 0 && <span className="badge bad">{formatCount(nonFinite)} non-finite</span>}
        {note}
        <span className="chart-readout" aria-hidden="true">
          {step !== null && <span className="quiet">step {formatCount(step)}</span>}
          {readouts.map(({ line, text }) => (
            <span key={line.label} style={{ color: `var(${line.colour})`, opacity: line.dim ? 0.65 : 1 }}>
              {lines.length > 1 && <span className="chart-name">{line.label} </span>}
              <b>{text}</b>
            </span>
          ))}
        </span>
        <span className="chart-tools">
          <button type="button" className="button plain" aria-pressed={scale === "asinh"} onClick={() => setScale(scale === "linear" ? "asinh" : "linear")} title="A log-like axis that keeps zero">log</button>
          <button type="button" className="button plain" aria-pressed={asTable} onClick={() => setAsTable(!asTable)} title="View as table">table</button>
        </span>
      </header>
      {asTable ? (
        <ValueTable title={title} lines={lines} columns={columns} slots={slots} format={format} />
      ) : (
        <div
          className="chart-stage"
          role="group"
          tabIndex={0}
          aria-label={`${title}, ${summary(lines, xs, readouts)}`}
          aria-describedby={hintId}
          onKeyDown={(event) => steer(event, plot.current, range, onRange)}
        >
          <div ref={holder} aria-hidden="true" style={{ minHeight: height }} />
          {lines.every((line) => line.xs.length === 0) && <p className="chart-empty quiet">No values yet.</p>}
          <span id={hintId} hidden>Arrow keys move along the steps, plus and minus zoom, Escape shows all steps.</span>
          <span className="visually-hidden" role="status">{spoken}</span>
        </div>
      )}
    </figure>
  );
}

function summary(lines: readonly Line[], xs: readonly number[], readouts: readonly { line: Line; x: number; text: string }[]): string {
  const last = xs.at(-1);
  if (last === undefined) return "no values yet";
  const values = readouts.map(({ line, text }) => (lines.length > 1 ? `${line.label} ${text}` : text)).join(", ");
  return `steps ${xs[0]} to ${last}, ${values}`;
}

interface PlotProps {
  lines: readonly Line[];
  columns: [number[], ...Column[]];
  slots: ReturnType<typeof align>["slots"];
  scale: YScale;
  height: number;
  range: StepRange | null;
  onRange: (range: StepRange | null) => void;
  onCursor: (index: number | null) => void;
  syncKey: string;
  hidden: boolean;
}

/** Owns the uPlot instance: made anew only when the lines' structure or the axis changes, fed otherwise. */
function usePlot({ lines, columns, slots, scale, height, range, onRange, onCursor, syncKey, hidden }: PlotProps) {
  const holder = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const live = useRef({ range, onRange, onCursor, lines, columns, slots });
  live.current = { range, onRange, onCursor, lines, columns, slots };
  const structure = lines.map((line) => `${line.label}|${line.dim}|${line.lows !== null}|${line.colour}`).join(";");

  useLayoutEffect(() => {
    const element = holder.current;
    if (!element) return undefined;
    const hooks: PlotHooks = {
      range: () => live.current.range,
      onZoom: (next) => live.current.onRange(next),
      onCursor: (index) => live.current.onCursor(index),
      marks: () => live.current.lines.flatMap((line) => line.marks.map((mark) => ({ ...mark, dim: line.dim }))),
    };
    const width = () => Math.max(element.clientWidth, 120);
    const made = new uPlot(plotOptions(live.current.lines, live.current.slots, scale, width(), height, hooks, syncKey), live.current.columns as uPlot.AlignedData, element);
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: width(), height }));
    observer.observe(element);
    const forget = onTheme(() => made.redraw());
    return () => {
      observer.disconnect();
      forget();
      made.destroy();
      plot.current = null;
    };
  }, [structure, scale, height, syncKey, hidden]);

  useEffect(() => {
    plot.current?.setData(columns as uPlot.AlignedData);
  }, [columns]);

  useEffect(() => {
    const xs = live.current.columns[0];
    plot.current?.setScale("x", range ? { min: range.from, max: range.to } : { min: xs[0] ?? 0, max: xs.at(-1) ?? 1 });
  }, [range]);

  return { holder, plot };
}

function steer(event: KeyboardEvent, plot: uPlot | null, range: StepRange | null, onRange: (range: StepRange | null) => void): void {
  if (!plot) return;
  const xs = plot.data[0];
  const [from, to] = plot.series[0]?.idxs ?? [0, xs.length - 1];
  const jump = event.shiftKey ? Math.max(1, Math.round((to - from) / 10)) : 1;
  const at = plot.cursor.idx ?? to;
  const moves: Record<string, () => void> = {
    ArrowLeft: () => point(plot, Math.max(from, at - jump)),
    ArrowRight: () => point(plot, plot.cursor.idx == null ? to : Math.min(to, at + jump)),
    Home: () => point(plot, from),
    End: () => point(plot, to),
    "+": () => zoomAround(plot, at, 0.5, onRange),
    "=": () => zoomAround(plot, at, 0.5, onRange),
    "-": () => range && zoomAround(plot, at, 2, onRange),
    Escape: () => onRange(null),
  };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  move();
}

function point(plot: uPlot, index: number): void {
  const x = plot.data[0][index];
  if (x === undefined) return;
  plot.setCursor({ left: plot.valToPos(x, "x"), top: plot.over.clientHeight / 2 }, true);
}

function zoomAround(plot: uPlot, index: number, factor: number, onRange: (range: StepRange | null) => void): void {
  const xs = plot.data[0];
  const centre = xs[index];
  const { min, max } = plot.scales.x ?? {};
  if (centre === undefined || min == null || max == null) return;
  const half = Math.max(((max - min) * factor) / 2, 1);
  const [first, last] = [xs[0] ?? 0, xs.at(-1) ?? 1];
  const range = { from: Math.max(first, Math.floor(centre - half)), to: Math.min(last, Math.ceil(centre + half)) };
  onRange(range.from <= first && range.to >= last ? null : range);
}
