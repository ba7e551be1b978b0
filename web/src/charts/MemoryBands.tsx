/** One rank's memory as stacked bands, with the plan's line and the paper's lines of the four stages, drawn as SVG: its text is text. */

import { useLayoutEffect, useRef, useState } from "react";
import type { MemorySample } from "../api/client";
import { formatBytes, formatCount } from "../ui/format";
import { byteTicks, CATEGORIES, CATEGORY_WORDS, spread, stack, totalOf } from "./bands";

export interface Level {
  label: string;
  bytes: number;
  kind: "plan" | "own" | "paper"; // own: the paper's line of the stage this job runs at
}

interface Props {
  samples: readonly MemorySample[];
  mode: "steps" | "phases";
  levels: readonly Level[];
  label: string;
  picked: number | null;
  onPick: (index: number | null) => void;
}

const HEIGHT = 300;
const PAD = { left: 62, right: 132, top: 14, bottom: 26 };
const NARROW_PX = 520;

export function MemoryBands({ samples, mode, levels, label, picked, onPick }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(640);
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const observer = new ResizeObserver(() => setWidth(Math.max(260, element.clientWidth)));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const isNarrow = width < NARROW_PX;
  const [left, right] = [PAD.left, isNarrow ? 10 : PAD.right];
  const inner = { width: width - left - right, height: HEIGHT - PAD.top - PAD.bottom };
  const totals = samples.map(totalOf);
  const top = Math.max(1, ...totals, ...levels.map((level) => level.bytes)) * 1.04;
  const y = (bytes: number) => PAD.top + inner.height * (1 - bytes / top);
  const steps = samples.map((sample) => sample.step);
  const [from, to] = [steps[0] ?? 0, steps.at(-1) ?? 1];
  const column = inner.width / Math.max(samples.length, 1);
  const x = (index: number) => (mode === "phases" ? left + column * index : left + (to === from ? inner.width / 2 : (inner.width * ((steps[index] ?? from) - from)) / (to - from)));
  const peak = totals.indexOf(Math.max(...totals));
  const pick = (clientX: number) => {
    const at = clientX - (box.current?.getBoundingClientRect().left ?? 0);
    if (mode === "phases") onPick(Math.min(samples.length - 1, Math.max(0, Math.floor((at - left) / column))));
    else onPick(nearest(samples.map((_, index) => x(index)), at));
  };
  const labelled = isNarrow ? [] : levels;
  const labelYs = spread(labelled.map((level) => y(level.bytes)), 13);

  return (
    <div
      ref={box}
      className="bands"
      role="group"
      tabIndex={0}
      aria-label={label}
      onKeyDown={(event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (move === undefined) return;
        event.preventDefault();
        onPick(Math.min(samples.length - 1, Math.max(0, (picked ?? samples.length - 1) + move)));
      }}
      onPointerMove={(event) => pick(event.clientX)}
      onPointerLeave={() => onPick(null)}
    >
      <svg width={width} height={HEIGHT} viewBox={`0 0 ${width} ${HEIGHT}`} aria-hidden="true">
        {byteTicks(top, 5).map((bytes) => (
          <g key={bytes}>
            <line x1={left} x2={width - right} y1={y(bytes)} y2={y(bytes)} stroke="var(--rule)" />
            <text x={left - 8} y={y(bytes) + 4} textAnchor="end" className="bands-tick">{formatBytes(bytes)}</text>
          </g>
        ))}
        {CATEGORIES.map((category, index) => <path key={category} d={bandPath(samples, index, mode, x, y, column)} fill={`var(--band-${category})`} stroke="var(--panel)" strokeWidth="0.75" />)}
        {picked !== null && samples[picked] && <line x1={mode === "phases" ? x(picked) + column / 2 : x(picked)} x2={mode === "phases" ? x(picked) + column / 2 : x(picked)} y1={PAD.top} y2={HEIGHT - PAD.bottom} stroke="var(--ink)" strokeDasharray="2 3" />}
        {levels.map((level) => <line key={level.label} x1={left} x2={width - right} y1={y(level.bytes)} y2={y(level.bytes)} stroke="var(--panel)" strokeWidth="3.5" opacity="0.75" />)}
        {levels.map((level) => (
          <line key={level.label} x1={left} x2={width - right} y1={y(level.bytes)} y2={y(level.bytes)} stroke={level.kind === "plan" ? "var(--ink)" : level.kind === "own" ? "var(--accent)" : "var(--ink-2)"} strokeWidth={level.kind === "paper" ? 1.25 : 1.75} strokeDasharray={level.kind === "plan" ? undefined : level.kind === "own" ? "8 3" : "3 3"} />
        ))}
        {labelled.map((level, index) => (
          <text key={level.label} x={width - right + 8} y={(labelYs[index] ?? 0) + 4} className="bands-level" data-kind={level.kind}>
            {level.label} {formatBytes(level.bytes)}
          </text>
        ))}
        {peak >= 0 && <PeakMark x={Math.min(width - right - 12, Math.max(left + 12, mode === "phases" ? x(peak) + column / 2 : x(peak)))} y={y(totals[peak] ?? 0)} />}
        <Axis samples={samples} mode={mode} x={x} column={column} from={from} to={to} />
      </svg>
    </div>
  );
}

function bandPath(samples: readonly MemorySample[], band: number, mode: Props["mode"], x: (index: number) => number, y: (bytes: number) => number, column: number): string {
  const stacks = samples.map(stack);
  if (stacks.every((levels) => levels[band] === levels[band + 1])) return "";
  const lower: string[] = [];
  const upper: string[] = [];
  stacks.forEach((levels, index) => {
    const [low, high] = [y(levels[band] ?? 0), y(levels[band + 1] ?? 0)];
    const ends = mode === "phases" ? [x(index) + 1, x(index) + column - 1] : samples.length === 1 ? [x(index) - 20, x(index) + 20] : [x(index)];
    if (mode === "phases") {
      upper.push(`M${ends[0]} ${high}H${ends[1]}V${low}H${ends[0]}Z`);
      return;
    }
    for (const end of ends) {
      upper.push(`${end.toFixed(1)} ${high.toFixed(1)}`);
      lower.unshift(`${end.toFixed(1)} ${low.toFixed(1)}`);
    }
  });
  return mode === "phases" ? upper.join("") : `M${[...upper, ...lower].join("L")}Z`;
}

function PeakMark({ x, y }: { x: number; y: number }) {
  return (
    <g>
      <path d={`M${x - 5} ${y - 9}h10l-5 7Z`} fill="var(--ink)" />
      <text x={x} y={y - 12} textAnchor="middle" className="bands-tick" fill="var(--ink)">peak</text>
    </g>
  );
}

function Axis({ samples, mode, x, column, from, to }: { samples: readonly MemorySample[]; mode: Props["mode"]; x: (index: number) => number; column: number; from: number; to: number }) {
  const y = HEIGHT - 8;
  if (mode === "phases") return samples.map((sample, index) => <text key={sample.phase} x={x(index) + column / 2} y={y} textAnchor="middle" className="bands-tick">{sample.phase}</text>);
  if (samples.length === 0) return null;
  return (
    <>
      <text x={x(0)} y={y} className="bands-tick">step {formatCount(from)}</text>
      {to !== from && <text x={x(samples.length - 1)} y={y} textAnchor="end" className="bands-tick">{formatCount(to)}</text>}
    </>
  );
}

function nearest(xs: readonly number[], at: number): number | null {
  let best: number | null = null;
  xs.forEach((x, index) => {
    if (best === null || Math.abs(x - at) < Math.abs((xs[best] ?? 0) - at)) best = index;
  });
  return best;
}

/** One rank as a lying stack with the plan's mark: many ranks compare at a glance. */
export function RankBar({ sample, plan, max }: { sample: MemorySample; plan: number; max: number }) {
  let at = 0;
  return (
    <svg className="rank-bar" viewBox="0 0 1000 16" preserveAspectRatio="none" role="img" aria-label={`${formatBytes(totalOf(sample))} at the peak, ${CATEGORIES.filter((category) => sample[category] > 0).map((category) => `${CATEGORY_WORDS[category]} ${formatBytes(sample[category])}`).join(", ")}`}>
      {CATEGORIES.map((category) => {
        const width = (1000 * sample[category]) / max;
        const start = at;
        at += width;
        return width > 0 && <rect key={category} x={start} y="1" width={width} height="14" fill={`var(--band-${category})`} stroke="var(--panel)" strokeWidth="1" vectorEffect="non-scaling-stroke" />;
      })}
      {plan > 0 && <line x1={(1000 * plan) / max} x2={(1000 * plan) / max} y1="0" y2="16" stroke="var(--ink)" strokeWidth="2" vectorEffect="non-scaling-stroke" />}
    </svg>
  );
}
