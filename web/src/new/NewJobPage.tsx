/** Write a spec, see its plan and its mistakes as you type, submit it. */

import { keepPreviousData, useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { lazy, Suspense, useEffect, useMemo, useRef, useState } from "react";
import { messageOf, postYaml, Refused, type FieldProblem, type Job } from "../api/client";
import { jobQuery } from "../api/queries";
import { newRoute } from "../app/router";
import { Bones, Notice } from "../ui/pieces";
import { tell } from "../ui/toasts";
import type { EditorHandle } from "./Editor";
import { isPending, planOf } from "./plan";
import { PlanPanel } from "./PlanPanel";
import { TEMPLATES } from "./templates";
import "../job/job.css";
import "./new.css";

const Editor = lazy(() => import("./Editor"));

const TYPING_MS = 350;
const NO_PROBLEMS: readonly FieldProblem[] = [];

export function NewJobPage() {
  const { from } = newRoute.useSearch();
  const source = useQuery({ ...jobQuery(from ?? ""), enabled: from !== undefined });
  if (from !== undefined && source.isPending) return <div className="panel"><Bones rows={8} label="Reading the spec" /></div>;
  return <Draft key={from ?? "new"} start={source.data?.spec_yaml ?? TEMPLATES[0]?.text ?? ""} copied={source.data?.name} />;
}

function Draft({ start, copied }: { start: string; copied: string | undefined }) {
  const [text, setText] = useState(start);
  const settled = useSettled(text, TYPING_MS);
  const editor = useRef<EditorHandle>(null);
  const plan = useQuery({
    queryKey: ["plan", settled],
    queryFn: ({ signal }) => planOf(settled, signal),
    placeholderData: keepPreviousData,
    refetchInterval: (query) => (query.state.data && isPending(query.state.data) ? 1000 : false),
    refetchOnWindowFocus: false,
    staleTime: Infinity,
  });
  const submit = useSubmit(text);
  const refusal = submit.error instanceof Refused ? submit.error : plan.error instanceof Refused ? plan.error : null;
  const problems = refusal?.problem.errors ?? NO_PROBLEMS;
  const isOld = settled !== text || plan.isPlaceholderData;
  const send = () => {
    if (!submit.isPending) submit.mutate();
  };
  return (
    <>
      <div className="page-head">
        <h1>New job</h1>
        {copied !== undefined && <span className="quiet">copied from <bdi>{copied}</bdi></span>}
        <label className="quiet">
          Begin with{" "}
          <select className="select" value="" onChange={(event) => setText(TEMPLATES[Number(event.target.value)]?.text ?? text)}>
            <option value="" disabled>a template</option>
            {TEMPLATES.map((template, index) => <option key={template.name} value={index}>{template.name}</option>)}
          </select>
        </label>
        <span className="push quiet keys"><kbd>Ctrl</kbd> <kbd>Enter</kbd></span>
        <button type="button" className="button primary" disabled={submit.isPending} onClick={send}>{submit.isPending ? "Submitting…" : "Submit job"}</button>
      </div>
      <div className="draft">
        <section className="panel draft-editor" aria-label="Job spec">
          <Suspense fallback={<Bones rows={10} label="Reading the editor" />}>
            <Editor ref={editor} text={text} problems={problems} onText={(next) => {
              setText(next);
              if (submit.isError) submit.reset();
            }} onSubmit={send} />
          </Suspense>
        </section>
        <section className="panel draft-plan" aria-label="Plan" aria-busy={isOld}>
          <header><h2>Plan</h2><span className="quiet">bytes of the largest rank, before anything starts</span></header>
          <div className="body">
            <Problems refusal={refusal} problems={problems} onGo={(line) => editor.current?.goTo(line)} />
            {!refusal && (submit.isError || plan.isError) && <Notice tone="bad" onRetry={() => void plan.refetch()}>{messageOf(submit.error ?? plan.error)}</Notice>}
            <PlanBody plan={plan.data} text={settled} isOld={isOld || refusal !== null} isWaiting={plan.isPending} />
          </div>
        </section>
      </div>
    </>
  );
}

function PlanBody({ plan, text, isOld, isWaiting }: { plan: Awaited<ReturnType<typeof planOf>> | undefined; text: string; isOld: boolean; isWaiting: boolean }) {
  if (!plan) return isWaiting ? <Bones rows={5} label="Planning" /> : null;
  if (!isPending(plan)) return <PlanPanel plan={plan} chosen={stageIn(text)} isOld={isOld} />;
  if (plan.error) return <Notice tone="bad">The model could not be planned: {plan.error}</Notice>;
  return <Bones rows={5} label="Your model is being planned in a process of its own" />;
}

/** The stage a spec's text names; null when it leaves the choice to the plan. Only for marking a row: the server reads the spec. */
function stageIn(text: string): number | null {
  const found = /\bstage:\s*([0-3])\b/.exec(text)?.[1];
  return found === undefined ? null : Number(found);
}

function Problems({ refusal, problems, onGo }: { refusal: Refused | null; problems: readonly FieldProblem[]; onGo: (line: number) => void }) {
  if (!refusal) return null;
  return (
    <div className="problems" role="alert">
      {problems.length === 0 && <p>{refusal.message}</p>}
      <ul>
        {problems.map((problem) => (
          <li key={`${problem.pointer}${problem.message}`}>
            {problem.line != null ? <button type="button" className="button plain" onClick={() => onGo(problem.line ?? 1)}>line {problem.line}</button> : <code>{problem.pointer}</code>}
            <span>
              {problem.line != null && <code>{fieldOf(problem.pointer)}</code>} {problem.message}
              {problem.suggestion && <> Try <code>{problem.suggestion}</code>.</>}
            </span>
          </li>
        ))}
      </ul>
    </div>
  );
}

/** A pointer as people name fields: /train/steps is train.steps. */
function fieldOf(pointer: string): string {
  return pointer.slice(1).split("/").map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~")).join(".");
}

function useSettled(text: string, ms: number): string {
  const [settled, setSettled] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(text), ms);
    return () => clearTimeout(timer);
  }, [text, ms]);
  return settled;
}

/** One key per text: pressing twice, or again after a lost answer, makes one job. */
function useSubmit(text: string) {
  const client = useQueryClient();
  const navigate = useNavigate();
  const key = useMemo(() => idempotencyKey(text), [text]);
  return useMutation({
    mutationFn: () => postYaml<Job>("/v1/jobs", text, { "Idempotency-Key": key }),
    onSuccess: (job) => {
      client.setQueryData(jobQuery(job.id).queryKey, job);
      void client.invalidateQueries({ queryKey: ["jobs"] });
      tell(`“${job.name}” is queued.`);
      void navigate({ to: "/jobs/$id", params: { id: job.id } });
    },
  });
}

function idempotencyKey(text: string): string {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return `web-${text.length}-${Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

