import { useEffect, useRef, useState } from "react";
import { StateGlyph, toneOf } from "../ui/State";
import { formatCount } from "../ui/format";

const ORDER = ["running", "starting", "queued", "stopping", "paused", "succeeded", "failed", "cancelled", "deleting", "delete_failed"];

interface StatusProps {
  counts: Record<string, number>;
  total: number;
  status: string | undefined;
  onStatus: (status: string | undefined) => void;
}

/** One button per state that occurs, with how many jobs are in it. */
export function StatusFilter({ counts, total, status, onStatus }: StatusProps) {
  const shown = ORDER.filter((each) => (counts[each] ?? 0) > 0 || each === status);
  return (
    <div className="filters" role="group" aria-label="Filter by state">
      <button type="button" aria-pressed={!status} onClick={() => onStatus(undefined)}>
        All <b>{formatCount(total)}</b>
      </button>
      {shown.map((each) => (
        <button key={each} type="button" aria-pressed={status === each} data-tone={toneOf(each)} onClick={() => onStatus(status === each ? undefined : each)}>
          <StateGlyph status={each} />
          {each.replace("_", " ")} <b>{formatCount(counts[each] ?? 0)}</b>
        </button>
      ))}
    </div>
  );
}

const TYPING_MS = 250;

/** Search by name; `/` brings the cursor here. */
export function SearchBox({ value, onSearch }: { value: string; onSearch: (text: string) => void }) {
  const [text, setText] = useState(value);
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => setText(value), [value]);
  useEffect(() => {
    if (text === value) return undefined;
    const timer = setTimeout(() => onSearch(text), TYPING_MS);
    return () => clearTimeout(timer);
  }, [text, value, onSearch]);
  useEffect(() => {
    const focus = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.key !== "/" || event.ctrlKey || event.metaKey || target.closest("input, textarea, select, [contenteditable]")) return;
      event.preventDefault();
      input.current?.focus();
    };
    document.addEventListener("keydown", focus);
    return () => document.removeEventListener("keydown", focus);
  }, []);
  return (
    <input ref={input} className="input search push" type="search" placeholder="Search names  /" aria-label="Search jobs by name" aria-keyshortcuts="/" value={text} onChange={(event) => setText(event.target.value)} />
  );
}
