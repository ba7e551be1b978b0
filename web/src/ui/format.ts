/** Numbers, bytes and times as this dashboard writes them. Pure. */

/** A number as the API carries it: JSON has no NaN and no infinities, so those are words. */
export type ApiNumber = number | string;

const WORDS: Record<string, number> = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };

/** The number behind an `ApiNumber`; null and unknown words stay null. */
export function toNumber(value: ApiNumber | null | undefined): number | null {
  if (value === null || value === undefined) return null;
  if (typeof value === "number") return value;
  return WORDS[value] ?? null;
}

export function formatNumber(value: ApiNumber | null | undefined, digits = 4): string {
  const number = toNumber(value);
  if (number === null) return "–";
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "+∞" : "−∞";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e7 || size < 1e-3) return number.toExponential(Math.max(digits - 2, 1)).replace("e+", "e").replace("-", "−");
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return number.toFixed(Math.min(decimals, 6)).replace("-", "−");
}

export function formatCount(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return Math.round(value).toString().replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

/** 1 234 567 → 1.23 M, for rates and parameter counts. */
export function formatShort(value: ApiNumber | null | undefined): string {
  const number = toNumber(value);
  if (number === null || !Number.isFinite(number)) return formatNumber(value);
  const size = Math.abs(number);
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]] as const) {
    if (size >= limit) return `${trim(number / limit)}\u202f${suffix}`;
  }
  return trim(number);
}

export function formatBytes(bytes: number | null | undefined): string {
  if (bytes === null || bytes === undefined) return "–";
  let size = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(size) < 1024 || unit === "TiB") return unit === "B" ? `${size}\u202fB` : `${trim(size)}\u202f${unit}`;
    size /= 1024;
  }
  return "";
}

function trim(value: number): string {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

export function formatDuration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.001) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return `${minutes} min ${whole % 60} s`;
}

export function secondsBetween(from: string | null | undefined, to: string | number): number | null {
  if (!from) return null;
  return Math.max(0, (typeof to === "number" ? to : Date.parse(to)) - Date.parse(from)) / 1000;
}

/** How long ago, in one unit: a list wants a short word. */
export function formatAge(from: string | null | undefined, now: number): string {
  const seconds = secondsBetween(from, now);
  if (seconds === null) return "–";
  if (seconds < 5) return "now";
  for (const [limit, size, unit] of [[60, 1, "s"], [3600, 60, "min"], [86400, 3600, "h"], [Infinity, 86400, "d"]] as const) {
    if (seconds < limit) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return "–";
}

/** The same within a sentence. */
export function formatAgo(from: string | null | undefined, now: number): string {
  const age = formatAge(from, now);
  return age === "now" ? "just now" : `${age} ago`;
}

/** Local wall time with seconds; the date too when it is not today's. */
export function formatTime(at: string | null | undefined, now: number = Date.now()): string {
  if (!at) return "–";
  const time = new Date(at);
  const clock = [time.getHours(), time.getMinutes(), time.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
  if (time.toDateString() === new Date(now).toDateString()) return clock;
  return `${time.getFullYear()}-${String(time.getMonth() + 1).padStart(2, "0")}-${String(time.getDate()).padStart(2, "0")} ${clock}`;
}

/** Enough of a UUIDv7 to tell two jobs apart: its random end, not its shared time prefix. */
export function shortId(id: string): string {
  return id.slice(-6);
}
