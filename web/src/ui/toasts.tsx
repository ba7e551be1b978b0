/** Short answers to what a person just did; they leave by themselves, failures only when read. */

import { useSyncExternalStore } from "react";

interface Toast {
  id: number;
  tone: "bad" | "still";
  text: string;
}

let toasts: readonly Toast[] = [];
let nextId = 1;
const listeners = new Set<() => void>();
const STAY_MS = 6000;

function set(next: readonly Toast[]): void {
  toasts = next;
  for (const listener of listeners) listener();
}

export function tell(text: string, tone: Toast["tone"] = "still"): void {
  const id = nextId++;
  set([...toasts.slice(-4), { id, tone, text }]);
  if (tone === "still") setTimeout(() => set(toasts.filter((toast) => toast.id !== id)), STAY_MS);
}

export function Toasts() {
  const shown = useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => toasts,
  );
  return (
    <div className="toasts" role="log" aria-label="Messages">
      {shown.map((toast) => (
        <div key={toast.id} className={`notice ${toast.tone}`}>
          <div>{toast.text}</div>
          <button type="button" className="button plain" onClick={() => set(toasts.filter((each) => each.id !== toast.id))}>Dismiss</button>
        </div>
      ))}
    </div>
  );
}
