/** The one door to the server: typed by its OpenAPI, and every refusal is a `Refused` that carries the problem document. */

import createClient from "openapi-fetch";
import type { components, paths } from "./schema";

type Schemas = components["schemas"];

export type Job = Schemas["JobView"];
export type JobRow = Schemas["JobListItem"];
export type JobPage = Schemas["JobPage"];
export type Attempt = Schemas["AttemptView"];
export type Action = JobRow["allowed_actions"][number];
export type Series = Schemas["SeriesView"];
export type MetricsView = Schemas["MetricsView"];
export type MemoryView = Schemas["MemoryView"];
export type MemorySample = Schemas["MemorySampleView"];
export type LedgerView = Schemas["LedgerView"];
export type LogLine = Schemas["LogLine"];
export type LogView = Schemas["LogView"];
export type Checkpoint = Schemas["CheckpointView"];
export type Lineage = Schemas["LineageView"];
export type Preflight = Schemas["PreflightView"];
export type PreflightWish = Partial<Schemas["PreflightRequest"]>;
export type Orphans = Schemas["OrphansView"];
export type JobEvent = Schemas["EventView"];
export type Plan = Schemas["PlanView"];
export type JobPlan = Schemas["JobPlanView"];
export type StagePlan = Schemas["StagePlan"];
export type Node = Schemas["NodeView"];
export type QueueItem = Schemas["QueueItem"];
export type Explain = Schemas["ExplainView"];
export type FieldProblem = Schemas["FieldProblem"];
export type Problem = Schemas["Problem"];

export class Refused extends Error {
  readonly problem: Problem;

  constructor(problem: Problem) {
    super(problem.detail || problem.title);
    this.name = "Refused";
    this.problem = problem;
  }
}

/** Reads a refusal whatever its body is: a proxy in between may answer with something that is no problem document. */
export async function refusalOf(response: Response): Promise<Refused> {
  const body: unknown = await response.json().catch(() => null);
  const given = typeof body === "object" && body !== null ? (body as Partial<Problem>) : {};
  return new Refused({
    type: "about:blank",
    code: "unknown",
    title: response.statusText || `HTTP ${response.status}`,
    detail: `The server answered ${response.status}.`,
    ...given,
    errors: given.errors ?? [],
    status: response.status,
  });
}

export const api = createClient<paths>({ baseUrl: "", credentials: "same-origin" });

api.use({
  async onResponse({ response }) {
    if (!response.ok) throw await refusalOf(response.clone());
    return undefined;
  },
});

/** The body of an answer that is known to be a success: refusals were thrown on the way. */
export async function body<T>(answer: Promise<{ data?: T }>): Promise<T> {
  const { data } = await answer;
  if (data === undefined) throw new Error("The server answered without a body.");
  return data;
}

/** Sends a spec as the YAML the person wrote, so that the server can name lines. */
export async function postYaml<T>(path: "/v1/plans" | "/v1/jobs", text: string, headers: Record<string, string> = {}, signal?: AbortSignal): Promise<T> {
  const response = await fetch(path, { method: "POST", body: text, headers: { "Content-Type": "application/yaml", ...headers }, credentials: "same-origin", signal: signal ?? null });
  if (!response.ok) throw await refusalOf(response);
  return (await response.json()) as T;
}

export function messageOf(error: unknown): string {
  if (error instanceof Refused) return error.message;
  if (error instanceof TypeError) return "The server does not answer.";
  return error instanceof Error ? error.message : String(error);
}
