/** All jobs: filter, search and sort live in the address; the rows come in pages and only those in sight are drawn. */

import { useInfiniteQuery } from "@tanstack/react-query";
import type { RowSelectionState } from "@tanstack/react-table";
import { Link } from "@tanstack/react-router";
import { useCallback, useMemo, useState } from "react";
import { messageOf, type JobRow } from "../api/client";
import { jobsQuery } from "../api/queries";
import { jobsRoute, type JobsSearch } from "../app/router";
import { Bones, Command, Notice } from "../ui/pieces";
import { BulkCancel } from "./BulkCancel";
import { JobsTable } from "./JobsTable";
import { SearchBox, StatusFilter } from "./Filters";
import "./jobs.css";

const NO_JOBS: JobRow[] = [];

export function JobsPage() {
  const search = jobsRoute.useSearch();
  const navigate = jobsRoute.useNavigate();
  const [selected, setSelected] = useState<RowSelectionState>({});
  const [isCancelling, setIsCancelling] = useState(false);
  const { status, q, sort } = search;
  const jobs = useInfiniteQuery(jobsQuery({ status, q, sort }));
  const rows = useMemo(() => jobs.data?.pages.flatMap((page) => page.items) ?? NO_JOBS, [jobs.data]);
  const counts = jobs.data?.pages[0]?.counts ?? {};
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const change = useCallback((next: JobsSearch) => void navigate({ search: (old) => ({ ...old, ...next }), replace: true }), [navigate]);
  const picked = rows.filter((row) => selected[row.id]);
  const isEmpty = jobs.isSuccess && total === 0 && !q && !status;

  return (
    <>
      <div className="page-head">
        <h1>Jobs</h1>
        {!isEmpty && <StatusFilter counts={counts} total={total} status={status} onStatus={(next) => change({ status: next })} />}
        {!isEmpty && <SearchBox value={q ?? ""} onSearch={(next) => change({ q: next || undefined })} />}
      </div>
      {jobs.isError && <Notice tone="bad" onRetry={() => void jobs.refetch()}>{messageOf(jobs.error)}</Notice>}
      {picked.length > 0 && (
        <div className="picked notice" role="status">
          <span>{picked.length} selected</span>
          <button type="button" className="button plain" onClick={() => setSelected({})}>Clear</button>
          <button type="button" className="button danger" onClick={() => setIsCancelling(true)}>Cancel selected…</button>
        </div>
      )}
      {jobs.isPending && <div className="panel"><Bones rows={8} label="Reading jobs" /></div>}
      {isEmpty && <FirstCommand />}
      {jobs.isSuccess && !isEmpty && (rows.length > 0 ? (
        <JobsTable
          rows={rows}
          total={jobs.hasNextPage ? -1 : rows.length}
          search={search}
          onSearch={change}
          selected={selected}
          onSelected={setSelected}
          onEnd={() => {
            if (jobs.hasNextPage && !jobs.isFetchingNextPage) void jobs.fetchNextPage();
          }}
        />
      ) : (
        <div className="panel empty">
          <h2>No job matches</h2>
          <p>{total > 0 ? `${total} jobs match the search in other states.` : "Nothing has this text in its name."}</p>
          <button type="button" className="button" onClick={() => change({ q: undefined, status: undefined })}>Show all jobs</button>
        </div>
      ))}
      {isCancelling && (
        <BulkCancel
          jobs={picked}
          onClose={(done) => {
            setIsCancelling(false);
            if (done) setSelected({});
          }}
        />
      )}
    </>
  );
}

function FirstCommand() {
  return (
    <div className="panel empty">
      <h2>No jobs yet</h2>
      <p>A job spec says which model to train on which data, at which ZeRO stage and on how many ranks. The shortest useful one is five lines. Submit one from a terminal and watch it here:</p>
      <Command text="shardyard submit examples/gpt_stdlib.yaml --follow" />
      <p>Or write it on this page, with the bytes it will take beside it before anything starts.</p>
      <Link className="button primary" to="/new">Write a job spec</Link>
    </div>
  );
}
