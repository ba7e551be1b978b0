/** A loss curve the size of a word: gaps stay gaps, a non-finite value is a mark on the floor. */

import type { ApiNumber } from "./format";
import { toNumber } from "./format";

const [WIDTH, HEIGHT, PAD] = [96, 22, 2];

interface Drawing {
  path: string;
  dots: readonly [number, number][];
  marks: readonly number[];
}

/** The path of the finite runs, a dot for each value that stands alone, an x for each non-finite value. */
export function drawSparkline(values: readonly (ApiNumber | null)[]): Drawing {
  const numbers = values.map(toNumber);
  const finite = numbers.filter((value): value is number => value !== null && Number.isFinite(value));
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const x = (index: number) => PAD + ((WIDTH - 2 * PAD) * index) / Math.max(numbers.length - 1, 1);
  const y = (value: number) => (high === low ? HEIGHT / 2 : PAD + (HEIGHT - 2 * PAD) * (1 - (value - low) / (high - low)));
  const parts: string[] = [];
  const dots: [number, number][] = [];
  const marks: number[] = [];
  const isDrawn = (index: number) => Number.isFinite(numbers[index] ?? NaN);
  numbers.forEach((value, index) => {
    if (value === null) return;
    if (!Number.isFinite(value)) {
      marks.push(x(index));
      return;
    }
    if (!isDrawn(index - 1) && !isDrawn(index + 1)) dots.push([x(index), y(value)]);
    parts.push(`${isDrawn(index - 1) ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`);
  });
  return { path: parts.join(""), dots, marks };
}

export function Sparkline({ values, label }: { values: readonly (ApiNumber | null)[]; label: string }) {
  if (values.length === 0) return null;
  const { path, dots, marks } = drawSparkline(values);
  return (
    <svg className="sparkline" width={WIDTH} height={HEIGHT} viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={marks.length ? `${label}, ${marks.length} non-finite` : label}>
      <path d={path} fill="none" stroke="currentColor" strokeWidth="1.4" strokeLinejoin="round" />
      {dots.map(([cx, cy]) => <circle key={cx} cx={cx} cy={cy} r="1.6" fill="currentColor" />)}
      {marks.map((at) => <path key={at} d={`M${at - 2} ${HEIGHT - 5}l4 4m0-4l-4 4`} stroke="var(--bad)" strokeWidth="1.4" />)}
    </svg>
  );
}
