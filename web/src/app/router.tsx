/** The four pages and what each keeps in its address. A page's code is fetched when it is first opened. */

import { createRootRoute, createRoute, createRouter, lazyRouteComponent } from "@tanstack/react-router";
import type { JobSort } from "../api/queries";
import { Shell } from "./Shell";
import { NotFound, PageError } from "./Errors";

const text = (value: unknown): string | undefined => (typeof value === "string" && value !== "" ? value : typeof value === "number" ? String(value) : undefined);

const SORTS: readonly JobSort[] = ["created_at", "-created_at", "name", "-name", "status", "-status", "loss", "-loss", "step", "-step"];

export interface JobsSearch {
  status?: string | undefined;
  q?: string | undefined;
  sort?: JobSort | undefined;
  hide?: string | undefined; // columns not shown, by comma
}

export const VIEWS = ["training", "memory", "checkpoints", "logs", "events", "spec"] as const;
export type View = (typeof VIEWS)[number];

export interface JobSearch {
  view?: View | undefined;
  more?: string | undefined; // further series to chart, by comma
}

const root = createRootRoute({ component: Shell, notFoundComponent: NotFound, errorComponent: PageError });

export const jobsRoute = createRoute({
  getParentRoute: () => root,
  path: "/",
  validateSearch: (search: Record<string, unknown>): JobsSearch => ({ status: text(search.status), q: text(search.q), sort: SORTS.find((sort) => sort === search.sort), hide: text(search.hide) }),
  component: lazyRouteComponent(() => import("../jobs/JobsPage"), "JobsPage"),
});

export const jobRoute = createRoute({
  getParentRoute: () => root,
  path: "/jobs/$id",
  validateSearch: (search: Record<string, unknown>): JobSearch => ({ view: VIEWS.find((view) => view === search.view), more: text(search.more) }),
  component: lazyRouteComponent(() => import("../job/JobPage"), "JobPage"),
});

export const newRoute = createRoute({
  getParentRoute: () => root,
  path: "/new",
  validateSearch: (search: Record<string, unknown>): { from?: string | undefined } => ({ from: text(search.from) }),
  component: lazyRouteComponent(() => import("../new/NewJobPage"), "NewJobPage"),
});

export const clusterRoute = createRoute({
  getParentRoute: () => root,
  path: "/cluster",
  component: lazyRouteComponent(() => import("../cluster/ClusterPage"), "ClusterPage"),
});

export const router = createRouter({
  routeTree: root.addChildren([jobsRoute, jobRoute, newRoute, clusterRoute]),
  defaultPreload: "intent",
  scrollRestoration: true,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
