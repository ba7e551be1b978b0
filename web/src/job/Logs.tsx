/** A window of the job's output: the tail, followed while it grows; older lines on request; one rank or all by time; search on the server. */

import { useInfiniteQuery, useQueryClient } from "@tanstack/react-query";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";
import { api, body, messageOf, type Job, type LogLine, type LogView } from "../api/client";
import { onStale } from "../api/feed";
import { formatBytes, formatTime } from "../ui/format";
import { Bones, Notice } from "../ui/pieces";
import { plain } from "../ui/ansi";

const WINDOW_LINES = 1000;
const TYPING_MS = 300;
const NEAR_END_PX = 40;
const MAX_LINES = 20_000; // held in this tab while following; older ones can be asked for again

export function Logs({ job }: { job: Job }) {
  const [rank, setRank] = useState<number | null>(null);
  const [text, setText] = useState("");
  const [q, setQ] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => setQ(text.trim()), TYPING_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <section className="panel logs" aria-label="Logs">
      <header>
        <h2>Logs</h2>
        <label className="quiet">
          Rank{" "}
          <select className="select" value={rank ?? ""} onChange={(event) => setRank(event.target.value === "" ? null : Number(event.target.value))}>
            <option value="">all, by time</option>
            {Array.from({ length: job.ranks }, (_, each) => <option key={each} value={each}>{each}</option>)}
          </select>
        </label>
        <a className="button plain" href={`/v1/jobs/${job.id}/logs/text${rank === null ? "" : `?rank=${rank}`}`} download={`${job.id}.log`}>Download</a>
        <input className="input" type="search" placeholder="Search the output" aria-label="Search the output" value={text} onChange={(event) => setText(event.target.value)} />
      </header>
      <LogWindow key={`${rank}|${q}`} job={job} rank={rank} q={q} />
    </section>
  );
}

interface Tail {
  lines: LogLine[];
  after: number | null;
  dropped: number;
}

function useLog(job: Job, rank: number | null, q: string) {
  const client = useQueryClient();
  const [tail, setTail] = useState<Tail | null>(null);
  const read = useCallback(
    (cursor: { before?: number; after?: number }, signal?: AbortSignal) =>
      body(api.GET("/v1/jobs/{job_id}/logs", { ...(signal && { signal }), params: { path: { job_id: job.id }, query: { limit: WINDOW_LINES, ...(rank !== null && { rank }), ...(q && { q }), ...cursor } } })),
    [job.id, rank, q],
  );
  const queryKey = useMemo(() => ["log-window", job.id, rank, q], [job.id, rank, q]);
  // Pages of older lines, read once each; newer lines come as deltas below.
  const older = useInfiniteQuery({
    queryKey,
    queryFn: ({ signal, pageParam }) => read(pageParam === null ? {} : { before: pageParam }, signal),
    initialPageParam: null as number | null,
    getNextPageParam: (page) => page.next_before,
    staleTime: "static",
    gcTime: 0,
  });
  const newest = older.data?.pages[0];
  const cursor = useRef<number>(0);
  cursor.current = tail?.after ?? newest?.next_after ?? 0;
  const isRead = older.isSuccess;

  useEffect(() => {
    if (!isRead) return undefined;
    let isBusy = false;
    const readNewer = async () => {
      if (isBusy) return;
      isBusy = true;
      try {
        let page: LogView;
        do {
          page = await read({ after: cursor.current });
          const { items, next_after: after, dropped_bytes: dropped } = page;
          cursor.current = after ?? cursor.current;
          if (items.length > 0) setTail((old) => ({ lines: [...(old?.lines ?? []), ...items], after: cursor.current, dropped }));
        } while (page.items.length === WINDOW_LINES);
      } catch {
        // The feed's next change, or its reconnect, asks again.
      } finally {
        isBusy = false;
      }
    };
    void readNewer();
    return onStale(([topic, id]) => {
      if (topic === undefined || (topic === "logs" && id === job.id)) void readNewer();
    });
  }, [isRead, job.id, read]);

  const lines = useMemo(() => [...[...(older.data?.pages ?? [])].reverse().flatMap((page) => page.items), ...(tail?.lines ?? [])], [older.data, tail]);
  const restart = () => {
    setTail(null);
    void client.resetQueries({ queryKey });
  };
  return { older, lines, dropped: tail?.dropped ?? newest?.dropped_bytes ?? 0, restart };
}

function LogWindow({ job, rank, q }: { job: Job; rank: number | null; q: string }) {
  const { older, lines, dropped, restart } = useLog(job, rank, q);
  const box = useRef<HTMLDivElement>(null);
  const [follows, setFollows] = useState(true);
  const virtual = useVirtualizer({
    count: lines.length,
    getScrollElement: () => box.current,
    estimateSize: () => 19,
    overscan: 30,
    getItemKey: (index) => `${lines[index]?.seq}`,
  });
  const first = lines[0]?.seq;
  const anchor = useRef<{ first: number | undefined; count: number }>({ first, count: lines.length });
  useLayoutEffect(() => {
    const grewAbove = anchor.current.first !== undefined && first !== undefined && first < anchor.current.first ? lines.length - anchor.current.count : 0;
    anchor.current = { first, count: lines.length };
    if (follows) virtual.scrollToIndex(lines.length - 1, { align: "end" });
    else if (grewAbove > 0) virtual.scrollToIndex(grewAbove, { align: "start" });
  }, [lines.length, first, follows, virtual]);

  useEffect(() => {
    if (follows && lines.length > MAX_LINES) restart();
  });

  if (older.isPending) return <Bones rows={8} label="Reading the output" />;
  if (older.isError) return <div style={{ padding: 12 }}><Notice tone="bad" onRetry={() => void older.refetch()}>{messageOf(older.error)}</Notice></div>;
  if (lines.length === 0) return <p className="empty quiet">{q ? `Nothing in the output matches “${q}”.` : "No output yet."}</p>;
  return (
    <>
      {dropped > 0 && <p className="quiet log-note">{formatBytes(dropped)} from the middle were dropped: the output is above its cap.</p>}
      <div
        ref={box}
        className="log"
        tabIndex={0}
        role="region"
        aria-label={`Output, ${lines.length} lines${rank === null ? "" : ` of rank ${rank}`}`}
        onScroll={(event) => {
          const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
          setFollows(scrollHeight - scrollTop - clientHeight < NEAR_END_PX);
        }}
      >
        {older.hasNextPage && <button type="button" className="button log-older" disabled={older.isFetchingNextPage} onClick={() => void older.fetchNextPage()}>{older.isFetchingNextPage ? "Reading…" : "Older lines"}</button>}
        <div style={{ height: virtual.getTotalSize(), position: "relative" }}>
          {virtual.getVirtualItems().map((item) => {
            const line = lines[item.index];
            return line && <Line key={item.key} line={line} index={item.index} start={item.start} measure={virtual.measureElement} showRank={rank === null && job.ranks > 1} />;
          })}
        </div>
      </div>
      {!follows && <button type="button" className="button follow log-follow" onClick={() => setFollows(true)}><b>Follow</b></button>}
    </>
  );
}

function Line({ line, index, start, measure, showRank }: { line: LogLine; index: number; start: number; measure: (element: Element | null) => void; showRank: boolean }) {
  return (
    <div ref={measure} data-index={index} className="log-line" data-stream={line.stream} style={{ transform: `translateY(${start}px)` }}>
      <time dateTime={line.at}>{formatTime(line.at)}</time>
      {showRank && <span className="log-rank" data-rank={line.rank % 8}>{line.rank}</span>}
      <span dir="auto">{plain(line.text)}{line.split && <span className="quiet" title="The line goes on in the next one: it was too long"> ↩</span>}</span>
    </div>
  );
}
