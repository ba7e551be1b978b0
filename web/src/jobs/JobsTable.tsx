/** The table of jobs. Sorting is the server's; only rows in sight are in the document; on a narrow screen a row becomes a card. */

import { columnVisibilityFeature, createColumnHelper, rowSelectionFeature, rowSortingFeature, tableFeatures, useTable, type RowSelectionState } from "@tanstack/react-table";
import { Link } from "@tanstack/react-router";
import { useWindowVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";
import type { JobRow } from "../api/client";
import type { JobSort } from "../api/queries";
import type { JobsSearch } from "../app/router";
import { useNow } from "../ui/clock";
import { formatAge, formatCount, formatDuration, formatNumber, formatTime, shortId, toNumber } from "../ui/format";
import { readable } from "../ui/ansi";
import { Sparkline } from "../ui/Sparkline";
import { State, toneOf } from "../ui/State";
import { Yardstick } from "../ui/Yardstick";
import { ColumnPicker } from "./ColumnPicker";

const features = tableFeatures({ rowSortingFeature, rowSelectionFeature, columnVisibilityFeature });
const helper = createColumnHelper<typeof features, JobRow>();

const WIDTHS: Record<string, string> = {
  select: "20px",
  status: "minmax(112px, 128px)",
  name: "minmax(180px, 1fr)",
  step: "minmax(130px, 210px)",
  loss: "76px",
  curve: "108px",
  shape: "108px",
  priority: "64px",
  created_at: "66px",
};

const columns = helper.columns([
  helper.display({
    id: "select",
    enableHiding: false,
    header: () => <span className="visually-hidden">Select</span>,
    cell: ({ row }) => <input type="checkbox" aria-label={`Select ${row.original.name}`} checked={row.getIsSelected()} onChange={row.getToggleSelectedHandler()} />,
  }),
  helper.accessor("status", { header: "State", enableHiding: false, cell: ({ row }) => <State status={row.original.status} /> }),
  helper.accessor("name", { header: "Name", enableHiding: false, cell: ({ row }) => <NameCell job={row.original} /> }),
  helper.accessor("step", { header: "Progress", cell: ({ row }) => <ProgressCell job={row.original} /> }),
  helper.accessor("loss", { header: "Loss", sortDescFirst: false, cell: ({ row }) => <LossCell job={row.original} /> }),
  helper.display({
    id: "curve",
    header: "Curve",
    cell: ({ row }) => <Sparkline values={row.original.sparkline} label={`Loss curve of ${row.original.name}`} />,
  }),
  helper.display({ id: "shape", header: "Ranks × stage", cell: ({ row }) => <ShapeCell job={row.original} /> }),
  helper.accessor("priority", { header: "Priority", enableSorting: false, cell: ({ getValue }) => getValue() }),
  helper.accessor("created_at", { header: "Age", cell: ({ getValue }) => <AgeCell at={getValue()} /> }),
]);

function NameCell({ job }: { job: JobRow }) {
  const note = job.status === "running" ? (job.phase && job.phase !== "training" ? job.phase : null) : job.reason?.sentence;
  return (
    <>
      <Link to="/jobs/$id" params={{ id: job.id }} className="job-name"><bdi>{job.name}</bdi></Link>
      <span className="job-id mono" title={job.id}>{shortId(job.id)}</span>
      {job.tags.map((tag) => <bdi key={tag} className="tag">{tag}</bdi>)}
      {note && <span className="job-note" data-tone={toneOf(job.status)}><bdi>{readable(note)}</bdi></span>}
    </>
  );
}

function ProgressCell({ job }: { job: JobRow }) {
  return (
    <>
      <span className="progress-text">
        <span><b>{formatCount(job.step)}</b> / {formatCount(job.steps)}</span>
        {job.status === "running" && job.eta_seconds !== null && <span className="quiet">{formatDuration(job.eta_seconds)} left</span>}
      </span>
      <Yardstick step={job.step} steps={job.steps} tone={toneOf(job.status)} label={`Progress of ${job.name}`} />
    </>
  );
}

function LossCell({ job }: { job: JobRow }) {
  const loss = toNumber(job.loss);
  return <span className={loss !== null && !Number.isFinite(loss) ? "not-finite" : undefined}>{formatNumber(job.loss)}</span>;
}

function ShapeCell({ job }: { job: JobRow }) {
  return <span title={`${job.ranks} ranks, ZeRO stage ${job.stage ?? "not yet chosen"}`}>{job.ranks} × <span className="stage">{job.stage ?? "auto"}</span></span>;
}

function AgeCell({ at }: { at: string }) {
  const now = useNow();
  return <time dateTime={at} title={formatTime(at, now)}>{formatAge(at, now)}</time>;
}

interface Props {
  rows: JobRow[];
  total: number; // -1: more than those read so far
  search: JobsSearch;
  onSearch: (search: JobsSearch) => void;
  selected: RowSelectionState;
  onSelected: (selected: RowSelectionState) => void;
  onEnd: () => void;
}

export function JobsTable({ rows, total, search, onSearch, selected, onSelected, onEnd }: Props) {
  const sort = search.sort ?? "-created_at";
  const sorting = useMemo(() => [{ id: sort.replace(/^-/, ""), desc: sort.startsWith("-") }], [sort]);
  const hidden = search.hide ?? "priority";
  const columnVisibility = useMemo(() => Object.fromEntries(hidden.split(",").map((id) => [id, false])), [hidden]);
  const table = useTable({
    features,
    columns,
    data: rows,
    getRowId: (row) => row.id,
    manualSorting: true,
    enableSortingRemoval: false,
    state: { sorting, rowSelection: selected, columnVisibility },
    onSortingChange: (update) => {
      const [first] = typeof update === "function" ? update(sorting) : update;
      onSearch({ sort: first && (`${first.desc ? "-" : ""}${first.id}` as JobSort) });
    },
    onRowSelectionChange: (update) => onSelected(typeof update === "function" ? update(selected) : update),
  });
  const body = useRef<HTMLDivElement>(null);
  const [offset, setOffset] = useState(0);
  useLayoutEffect(() => setOffset(body.current?.offsetTop ?? 0), []);
  const drawn = table.getRowModel().rows;
  const virtual = useWindowVirtualizer({ count: drawn.length, estimateSize: () => 50, overscan: 8, scrollMargin: offset, getItemKey: (index) => drawn[index]?.id ?? index });
  const items = virtual.getVirtualItems();
  const lastShown = items.at(-1)?.index ?? 0;
  useEffect(() => {
    if (lastShown >= rows.length - 10) onEnd();
  }, [lastShown, rows.length, onEnd]);
  const grid = table.getVisibleLeafColumns().map((column) => WIDTHS[column.id] ?? "1fr").join(" ");
  const [top, bottom] = [(items[0]?.start ?? offset) - offset, virtual.getTotalSize() - ((items.at(-1)?.end ?? offset) - offset)];

  return (
    <div className="panel jobs" style={{ "--grid": grid } as React.CSSProperties}>
      <div role="table" aria-label="Jobs" aria-rowcount={total === -1 ? -1 : total + 1}>
        <div role="rowgroup">
          {table.getHeaderGroups().map((group) => (
            <div key={group.id} role="row" aria-rowindex={1} className="jobs-head">
              {group.headers.map((header) => {
                const direction = header.column.getIsSorted();
                return (
                  <div key={header.id} role="columnheader" data-column={header.column.id} aria-sort={direction === "asc" ? "ascending" : direction === "desc" ? "descending" : undefined}>
                    {header.column.getCanSort() ? (
                      <button type="button" onClick={header.column.getToggleSortingHandler()}>
                        <table.FlexRender header={header} />
                        <span aria-hidden="true">{direction === "asc" ? "↑" : direction === "desc" ? "↓" : ""}</span>
                      </button>
                    ) : (
                      <table.FlexRender header={header} />
                    )}
                  </div>
                );
              })}
            </div>
          ))}
        </div>
        <div role="rowgroup" ref={body} style={{ paddingTop: Math.max(0, top), paddingBottom: Math.max(0, bottom) }}>
          {items.map((item) => {
            const row = drawn[item.index];
            if (!row) return null;
            return (
              <div key={row.id} role="row" className="jobs-row" aria-rowindex={item.index + 2} aria-selected={row.getIsSelected()} data-index={item.index} ref={virtual.measureElement}>
                {row.getVisibleCells().map((cell) => (
                  <div key={cell.id} role="cell" data-column={cell.column.id}>
                    <table.FlexRender cell={cell} />
                  </div>
                ))}
              </div>
            );
          })}
        </div>
      </div>
      <ColumnPicker
        columns={table.getAllLeafColumns().filter((column) => column.getCanHide()).map((column) => ({ id: column.id, title: String(column.columnDef.header), shown: column.getIsVisible() }))}
        onToggle={(id, shown) => {
          const next = new Set(hidden.split(",").filter(Boolean));
          if (shown) next.delete(id);
          else next.add(id);
          onSearch({ hide: [...next].join(",") || "none" });
        }}
      />
    </div>
  );
}
