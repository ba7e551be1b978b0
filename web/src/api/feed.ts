/**
 * One event stream per tab. A message says what changed, never how: the queries that show it are fetched again, each key at most
 * once per `PACE_MS`, however fast a job reports. The browser reconnects by itself with Last-Event-ID.
 */

import type { QueryClient, QueryKey } from "@tanstack/react-query";
import { useSyncExternalStore } from "react";

export type LinkState = "connecting" | "live" | "lost";
export interface Change {
  topic: string;
  job_id?: string | null;
}

const PACE_MS = 800;
const REOPEN_MS = 3000; // after an answer that the browser takes as final, such as a proxy's 502

/** Which answers a change makes stale. Pure. */
export function staleKeys({ topic, job_id: id }: Change): QueryKey[] {
  switch (topic) {
    case "job":
      return id ? [["jobs"], ["job", id], ["attempts", id], ["explain", id]] : [["jobs"]];
    case "metrics":
      return id ? [["metrics", id], ["job", id], ["jobs"]] : [];
    case "queue":
    case "nodes":
      return id ? [[topic], ["explain", id]] : [[topic]];
    default:
      return id ? [[topic, id]] : [];
  }
}

/** Lets each key through at once, then at most once per pace; the last change is never lost. */
export class Pacer {
  private readonly resting = new Map<string, boolean>(); // key → whether it was marked again meanwhile

  constructor(
    private readonly act: (key: QueryKey) => void,
    private readonly paceMs: (key: QueryKey) => number,
  ) {}

  mark(key: QueryKey): void {
    const name = JSON.stringify(key);
    if (this.resting.has(name)) this.resting.set(name, true);
    else this.run(name, key);
  }

  private run(name: string, key: QueryKey): void {
    this.act(key);
    this.resting.set(name, false);
    setTimeout(() => {
      const again = this.resting.get(name);
      this.resting.delete(name);
      if (again) this.run(name, key);
    }, this.paceMs(key));
  }
}

const readers = new Set<(key: QueryKey) => void>();

/** For what no query holds, such as a log window: tells of each change at the same pace. Returns the function that ends it. */
export function onStale(reader: (key: QueryKey) => void): () => void {
  readers.add(reader);
  return () => readers.delete(reader);
}

let state: LinkState = "connecting";
const listeners = new Set<() => void>();

function setState(next: LinkState): void {
  state = next;
  for (const listener of listeners) listener();
}

export function useLinkState(): LinkState {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => state,
  );
}

/** A list that was scrolled far is fetched page by page: it takes its time, so that the server sees a steady trickle. */
function pagesShown(client: QueryClient, key: QueryKey): number {
  const lists = client.getQueriesData<{ pages?: unknown[] }>({ queryKey: key, type: "active" });
  return Math.max(1, ...lists.map(([, data]) => data?.pages?.length ?? 1));
}

/** Opens the tab's stream. Returns the function that closes it. */
export function openFeed(client: QueryClient): () => void {
  const pacer = new Pacer(
    (key) => {
      void client.invalidateQueries({ queryKey: key });
      for (const reader of readers) reader(key);
    },
    (key) => PACE_MS * pagesShown(client, key),
  );
  const refreshAll = () => {
    void client.invalidateQueries();
    for (const reader of readers) reader([]);
  };
  let source: EventSource;
  let retry: ReturnType<typeof setTimeout> | undefined;
  let wasLost = false;

  const open = () => {
    source = new EventSource("/v1/feed");
    source.onopen = () => {
      if (wasLost) refreshAll();
      wasLost = false;
      setState("live");
    };
    source.onerror = () => {
      wasLost = true;
      setState("lost");
      if (source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      void client.invalidateQueries({ queryKey: ["me"] });
      retry = setTimeout(open, REOPEN_MS);
    };
    source.addEventListener("change", (event) => {
      for (const key of staleKeys(JSON.parse(event.data) as Change)) pacer.mark(key);
    });
    source.addEventListener("reset", refreshAll);
  };

  open();
  return () => {
    clearTimeout(retry);
    source.close();
  };
}
