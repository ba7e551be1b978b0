/** Progress drawn as a ruler: the fill is the steps done, the notches below are checkpoints that exist. */

interface Props {
  step: number;
  steps: number;
  tone: string;
  checkpoints?: readonly number[];
  ticks?: number;
  label?: string;
}

export function Yardstick({ step, steps, tone, checkpoints = [], ticks = 10, label }: Props) {
  const share = steps > 0 ? Math.min(step / steps, 1) : 0;
  const colour = tone === "bad" ? "var(--bad)" : tone === "good" ? "var(--good)" : tone === "live" ? "var(--accent)" : "var(--ink-3)";
  return (
    <span className="yardstick" role="progressbar" aria-label={label ?? "progress"} aria-valuemin={0} aria-valuemax={steps} aria-valuenow={step} aria-valuetext={`step ${step} of ${steps}`}>
      <svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
        <rect x="0" y="2" width="100" height="4" fill="var(--sunken)" />
        <rect x="0" y="2" width={100 * share} height="4" fill={colour} />
        {Array.from({ length: ticks + 1 }, (_, index) => (
          <line key={index} x1={(100 * index) / ticks} x2={(100 * index) / ticks} y1={index % (ticks / 2) ? 4.4 : 2} y2="6" stroke="var(--rule-strong)" strokeWidth="1" vectorEffect="non-scaling-stroke" />
        ))}
        {checkpoints.map((at) => (
          <line key={at} x1={(100 * at) / steps} x2={(100 * at) / steps} y1="6" y2="10" stroke="var(--ink)" strokeWidth="2" vectorEffect="non-scaling-stroke" />
        ))}
      </svg>
    </span>
  );
}
