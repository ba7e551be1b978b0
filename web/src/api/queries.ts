/** What can be read, and the key each answer is kept under. The feed marks keys stale by topic and job. */

import { infiniteQueryOptions, keepPreviousData, queryOptions } from "@tanstack/react-query";
import { api, body, type MetricsView, type PreflightWish } from "./client";
import type { paths } from "./schema";
import { extend, extendFrom } from "./extend";

export type JobSort = NonNullable<NonNullable<paths["/v1/jobs"]["get"]["parameters"]["query"]>["sort"]>;

export interface JobFilter {
  status?: string | undefined;
  q?: string | undefined;
  sort?: JobSort | undefined;
}

const PAGE_JOBS = 60;
const PAGE_CHECKPOINTS = 25; // tall rows

export const meQuery = queryOptions({
  queryKey: ["me"],
  queryFn: ({ signal }) => body(api.GET("/v1/me", { signal })),
  staleTime: Infinity,
});

export const jobsQuery = (filter: JobFilter) =>
  infiniteQueryOptions({
    queryKey: ["jobs", filter],
    queryFn: ({ signal, pageParam }) => body(api.GET("/v1/jobs", { signal, params: { query: { ...filter, limit: PAGE_JOBS, cursor: pageParam ?? undefined } } })),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor ?? null,
    placeholderData: keepPreviousData,
  });

export const jobQuery = (id: string) =>
  queryOptions({
    queryKey: ["job", id],
    queryFn: ({ signal }) => body(api.GET("/v1/jobs/{job_id}", { signal, params: { path: { job_id: id } } })),
  });

export interface StepRange {
  from: number;
  to: number;
}

/** How far a job is: a new attempt's curves are read anew. */
export interface Progress {
  attempt: number;
  step: number;
}

export const metricsQuery = (id: string, names: string, width: number, range: StepRange | null, progress: Progress) =>
  queryOptions({
    queryKey: ["metrics", id, names, width, range, progress.attempt],
    queryFn: async ({ signal, client, queryKey }) => {
      const read = async (from?: number, to?: number): Promise<MetricsView> => {
        const answer = await body(api.GET("/v1/jobs/{job_id}/metrics", { signal, params: { path: { job_id: id }, query: { names, width, from_step: from, to_step: to, format: "json" } } }));
        if (typeof answer === "string") throw new Error("The server sent the curves as a table.");
        return answer;
      };
      const known = range ? undefined : client.getQueryData<MetricsView>(queryKey);
      const from = known ? extendFrom(known, width, progress.step) : null;
      if (!known || from === null) return read(range?.from, range?.to);
      return extend(known, await read(from), from) ?? read();
    },
    placeholderData: keepPreviousData,
  });

export const seriesNamesQuery = (id: string) =>
  queryOptions({
    queryKey: ["metrics", id, "names"],
    queryFn: ({ signal }) => body(api.GET("/v1/jobs/{job_id}/metrics/names", { signal, params: { path: { job_id: id } } })),
  });

export const memoryQuery = (id: string) =>
  queryOptions({
    queryKey: ["memory", id],
    queryFn: ({ signal }) => body(api.GET("/v1/jobs/{job_id}/memory", { signal, params: { path: { job_id: id } } })),
  });

export const ledgerQuery = (id: string) =>
  queryOptions({
    queryKey: ["ledger", id],
    queryFn: ({ signal }) => body(api.GET("/v1/jobs/{job_id}/ledger", { signal, params: { path: { job_id: id } } })),
  });

/** Under the key of the ledger: both change with the steps that an attempt reports. */
export const jobPlanQuery = (id: string) =>
  queryOptions({
    queryKey: ["ledger", id, "plan"],
    queryFn: ({ signal }) => body(api.GET("/v1/jobs/{job_id}/plan", { signal, params: { path: { job_id: id } } })),
  });

/** Newest first; `removed`: those that retention took, too. */
export const checkpointsQuery = (id: string, removed = false) =>
  infiniteQueryOptions({
    queryKey: ["checkpoints", id, { removed }],
    queryFn: ({ signal, pageParam }) => body(api.GET("/v1/jobs/{job_id}/checkpoints", { signal, params: { path: { job_id: id }, query: { removed, limit: PAGE_CHECKPOINTS, cursor: pageParam ?? undefined } } })),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor ?? null,
    placeholderData: keepPreviousData,
  });

/** One with its shards; under the key of the list, so that what makes that stale makes it stale. */
export const checkpointQuery = (jobId: string, id: string) =>
  queryOptions({
    queryKey: ["checkpoints", jobId, id],
    queryFn: ({ signal }) => body(api.GET("/v1/checkpoints/{checkpoint_id}", { signal, params: { path: { checkpoint_id: id } } })),
  });

export const attemptsQuery = (id: string) =>
  queryOptions({
    queryKey: ["attempts", id],
    queryFn: ({ signal }) => body(api.GET("/v1/jobs/{job_id}/attempts", { signal, params: { path: { job_id: id } } })),
  });

/** Under the key of the attempts, so that what makes them stale makes it stale. */
export const lineageQuery = (id: string) =>
  queryOptions({
    queryKey: ["attempts", id, "lineage"],
    queryFn: ({ signal }) => body(api.GET("/v1/jobs/{job_id}/lineage", { signal, params: { path: { job_id: id } } })),
  });

export const preflightQuery = (id: string, wish: PreflightWish) =>
  queryOptions({
    queryKey: ["preflight", id, wish],
    queryFn: ({ signal }) => body(api.POST("/v1/jobs/{job_id}/preflight", { signal, params: { path: { job_id: id } }, body: { spec: {}, ...wish } as never })),
    placeholderData: keepPreviousData,
    retry: false,
  });

/** Looks through the whole store: only when somebody asks. */
export const orphansQuery = queryOptions({
  queryKey: ["orphans"],
  queryFn: ({ signal }) => body(api.GET("/v1/store/orphans", { signal })),
  enabled: false,
});

export const eventsQuery = (id: string) =>
  infiniteQueryOptions({
    queryKey: ["events", id],
    queryFn: ({ signal, pageParam }) => body(api.GET("/v1/jobs/{job_id}/events", { signal, params: { path: { job_id: id }, query: { limit: 200, cursor: pageParam ?? undefined } } })),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor ?? null,
  });

export const explainQuery = (id: string) =>
  queryOptions({
    queryKey: ["explain", id],
    queryFn: ({ signal }) => body(api.GET("/v1/jobs/{job_id}/explain", { signal, params: { path: { job_id: id } } })),
  });

export const nodesQuery = queryOptions({
  queryKey: ["nodes"],
  queryFn: ({ signal }) => body(api.GET("/v1/nodes", { signal })),
});

export const queueQuery = queryOptions({
  queryKey: ["queue"],
  queryFn: ({ signal }) => body(api.GET("/v1/queue", { signal })),
});
