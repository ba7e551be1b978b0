/** A job's state as glyph and word. The shapes differ, so that colour only repeats them. */

import type { ReactNode } from "react";

type Tone = "live" | "good" | "bad" | "wait" | "still";

const TONES: Record<string, Tone> = {
  queued: "wait",
  starting: "live",
  running: "live",
  stopping: "wait",
  paused: "still",
  succeeded: "good",
  failed: "bad",
  cancelled: "still",
  deleting: "still",
  delete_failed: "bad",
};

const ring = <circle cx="6" cy="6" r="4.6" fill="none" stroke="currentColor" strokeWidth="1.6" />;

const GLYPHS: Record<string, ReactNode> = {
  queued: <circle cx="6" cy="6" r="4.6" fill="none" stroke="currentColor" strokeWidth="1.6" strokeDasharray="2.2 2.6" />,
  starting: <>{ring}<path d="M6 6V2.6A3.4 3.4 0 0 1 9.4 6Z" fill="currentColor" /></>,
  running: <>{ring}<circle className="beat" cx="6" cy="6" r="2.6" fill="currentColor" /></>,
  stopping: <>{ring}<path d="M6 2.6a3.4 3.4 0 0 1 0 6.8Z" fill="currentColor" /></>,
  paused: <path d="M2.6 1.8h2.5v8.4H2.6ZM6.9 1.8h2.5v8.4H6.9Z" fill="currentColor" />,
  succeeded: <path d="m1.6 6.4 3 3.1 5.8-7" fill="none" stroke="currentColor" strokeWidth="2" />,
  failed: <path d="m2 2 8 8M10 2l-8 8" fill="none" stroke="currentColor" strokeWidth="2" />,
  cancelled: <>{ring}<path d="m2.9 9.1 6.2-6.2" stroke="currentColor" strokeWidth="1.6" /></>,
  deleting: <path d="M1.6 6h8.8" stroke="currentColor" strokeWidth="2" strokeDasharray="2 1.4" />,
  delete_failed: <path d="m2 2 8 8M10 2l-8 8" fill="none" stroke="currentColor" strokeWidth="2" />,
};

export function StateGlyph({ status }: { status: string }) {
  return (
    <svg width="12" height="12" viewBox="0 0 12 12" aria-hidden="true">
      {GLYPHS[status] ?? ring}
    </svg>
  );
}

export function toneOf(status: string): Tone {
  return TONES[status] ?? "still";
}

export function State({ status }: { status: string }) {
  return (
    <span className="state" data-tone={toneOf(status)} data-status={status}>
      <StateGlyph status={status} />
      {status.replace("_", " ")}
    </span>
  );
}
