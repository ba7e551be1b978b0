/** A plan is answered at once, or, for a user's own model, made in a rank process and fetched later. */

import { postYaml, refusalOf, type Plan } from "../api/client";
import type { components } from "../api/schema";

export type PendingPlan = components["schemas"]["PendingPlan"];

export function isPending(plan: Plan | PendingPlan): plan is PendingPlan {
  return "href" in plan;
}

const pending = new Map<string, string>(); // text → where its plan will be

export async function planOf(text: string, signal: AbortSignal): Promise<Plan | PendingPlan> {
  const href = pending.get(text);
  const answer = href === undefined ? await postYaml<Plan | PendingPlan>("/v1/plans", text, {}, signal) : await fetchPlan(href, signal);
  if (!isPending(answer)) return answer;
  if (answer.plan) return answer.plan;
  if (answer.status === "pending") pending.set(text, answer.href);
  else pending.delete(text);
  return answer;
}

async function fetchPlan(href: string, signal: AbortSignal): Promise<Plan | PendingPlan> {
  const response = await fetch(href, { signal, credentials: "same-origin" });
  if (!response.ok) throw await refusalOf(response);
  return (await response.json()) as Plan | PendingPlan;
}
