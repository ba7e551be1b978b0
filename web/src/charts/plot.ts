/** What uPlot is told: scales, axes in the page's ink, lines with bands, and the marks that a line cannot show. */

import uPlot from "uplot";
import type { StepRange } from "../api/queries";
import { formatCount, formatNumber, formatShort } from "../ui/format";
import { lonelyPoints, type Column, type Line, type Slots } from "./lines";
import { colour, wash } from "./palette";

export interface PlotHooks {
  range: () => StepRange | null; // the zoom, kept whatever data arrives
  onZoom: (range: StepRange | null) => void;
  onCursor: (index: number | null) => void;
  marks: () => readonly { x: number; value: number; dim: boolean }[];
}

export type YScale = "linear" | "asinh"; // asinh: like a logarithm, but defined at and below zero

const FONT = () => `10.5px ${colour("--sans")}`;
const FEW_POINTS = 24; // so few values are dots as well as a line
const MIN_DRAG_PX = 5;

export function plotOptions(lines: readonly Line[], slots: readonly Slots[], scale: YScale, width: number, height: number, hooks: PlotHooks, syncKey: string): uPlot.Options {
  return {
    width,
    height,
    padding: [10, 12, 0, 0],
    legend: { show: false },
    cursor: {
      drag: { x: true, y: false, setScale: false },
      points: { size: 7, width: 1.5 },
      sync: { key: syncKey },
      bind: { dblclick: () => () => (hooks.onZoom(null), null) },
    },
    scales: {
      x: { time: false, range: (_, low, high) => xRange(hooks.range(), low, high) },
      y: scale === "asinh" ? { distr: 4, asinh: 1 } : { range: (_, low, high) => yRange(low, high) },
    },
    axes: [
      axis({ size: 26, values: (_, splits) => splits.map((step) => (Number.isInteger(step) ? formatCount(step) : "")) }),
      axis({ size: 46, values: (_, splits) => splits.map((value) => (Math.abs(value) >= 1e4 ? formatShort(value) : tick(value))) }),
    ],
    series: [{}, ...lines.flatMap((line, index) => seriesOf(line, slots[index] as Slots))],
    bands: slots.flatMap((slot, index) => {
      const line = lines[index] as Line;
      if (slot.low === null || slot.high === null) return [];
      return [{ series: [slot.high, slot.low] as [number, number], fill: () => wash(line.colour, line.dim ? 0.08 : 0.18) }];
    }),
    hooks: {
      setSelect: [
        (plot) => {
          if (plot.select.width >= MIN_DRAG_PX) {
            const [from, to] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
            plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            if (Math.floor(to) > Math.ceil(from)) hooks.onZoom({ from: Math.ceil(from), to: Math.floor(to) });
          }
        },
      ],
      setCursor: [(plot) => hooks.onCursor(plot.cursor.idx ?? null)],
      draw: [(plot) => drawMarks(plot, hooks.marks())],
    },
  };
}

function tick(value: number): string {
  return value !== 0 && Math.abs(value) < 1e-3 ? formatNumber(value, 3) : String(Number(value.toPrecision(4)));
}

function axis(given: { size: number; values: uPlot.Axis.Values }): uPlot.Axis {
  return {
    ...given,
    stroke: () => colour("--ink-3"),
    font: FONT(),
    gap: 5,
    grid: { stroke: () => colour("--rule"), width: 1 },
    ticks: { stroke: () => colour("--rule-strong"), width: 1, size: 4 },
  };
}

function seriesOf(line: Line, slots: Slots): uPlot.Series[] {
  const value: uPlot.Series = {
    label: line.label,
    scale: "y",
    stroke: () => wash(line.colour, line.dim ? 0.45 : 1),
    width: line.dim ? 1 : 1.6,
    spanGaps: false,
    points: {
      show: () => false,
      size: line.dim ? 4 : 5,
      width: 0,
      fill: () => wash(line.colour, line.dim ? 0.45 : 1),
      filter: (plot, index) => {
        const [from, to] = plot.series[0]?.idxs ?? [0, plot.data[0].length - 1];
        const column = plot.data[index] as Column;
        const drawn = column.slice(from, to + 1).filter((each) => each !== null && each !== undefined).length;
        if (drawn > FEW_POINTS || line.dim) return lonelyPoints(column, from, to);
        return Array.from({ length: to - from + 1 }, (_, offset) => from + offset).filter((each) => column[each] !== null && column[each] !== undefined);
      },
    },
  };
  const edge: uPlot.Series = { scale: "y", stroke: undefined, width: 0, points: { show: false }, spanGaps: false };
  return slots.low === null ? [value] : [value, edge, edge];
}

function xRange(zoom: StepRange | null, low: number | null, high: number | null): [number, number] {
  if (zoom) return [zoom.from, zoom.to];
  const [from, to] = [low ?? 0, high ?? 1];
  return from === to ? [from - 1, to + 1] : [from, to];
}

function yRange(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const pad = (high - low) * 0.06;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

/** A cross at the top for NaN, an arrow at the edge it left by for an infinity, and a hairline at its step. */
function drawMarks(plot: uPlot, marks: readonly { x: number; value: number; dim: boolean }[]): void {
  const { ctx, bbox } = plot;
  const scale = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top - 8 * scale, bbox.width, bbox.height + 8 * scale);
  ctx.clip();
  ctx.lineWidth = 1.5 * scale;
  ctx.strokeStyle = colour("--bad");
  for (const { x, value, dim } of marks) {
    const at = plot.valToPos(x, "x", true);
    if (at < bbox.left - 1 || at > bbox.left + bbox.width + 1) continue;
    ctx.globalAlpha = dim ? 0.4 : 1;
    drawMark(ctx, at, value === -Infinity ? bbox.top + bbox.height - 6 * scale : bbox.top + 2 * scale, 3.5 * scale, value);
    ctx.globalAlpha = dim ? 0.06 : 0.16;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function drawMark(ctx: CanvasRenderingContext2D, x: number, y: number, size: number, value: number): void {
  ctx.beginPath();
  if (Number.isNaN(value)) {
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x + size, y - size);
    ctx.lineTo(x - size, y + size);
  } else {
    const up = value > 0 ? 1 : -1;
    ctx.moveTo(x - size, y + up * size);
    ctx.lineTo(x, y - up * size);
    ctx.lineTo(x + size, y + up * size);
  }
  ctx.stroke();
}
