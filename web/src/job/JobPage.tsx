/** One job: its head is always in sight; the view below is chosen in the address. */

import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { lazy, Suspense } from "react";
import { messageOf, Refused, type Job } from "../api/client";
import { jobQuery } from "../api/queries";
import { jobRoute, VIEWS, type View } from "../app/router";
import { NotFound } from "../app/Errors";
import { Bones, Notice } from "../ui/pieces";
import { Checkpoints } from "./Checkpoints";
import { Events } from "./Events";
import { JobHead } from "./JobHead";
import { Logs } from "./Logs";
import { SpecView } from "./SpecView";
import "./job.css";

const Training = lazy(() => import("./Training"));
const Memory = lazy(() => import("./Memory"));

const TITLES: Record<View, string> = { training: "Training", memory: "Memory and traffic", checkpoints: "Checkpoints", logs: "Logs", events: "Events", spec: "Spec" };

export function JobPage() {
  const { id } = jobRoute.useParams();
  const { view = "training" } = jobRoute.useSearch();
  const job = useQuery(jobQuery(id));
  if (job.error instanceof Refused && job.error.problem.status === 404) return <NotFound />;
  if (job.isPending) return <div className="panel"><Bones rows={6} label="Reading the job" /></div>;
  if (!job.data) return <Notice tone="bad" onRetry={() => void job.refetch()}>{messageOf(job.error)}</Notice>;
  return (
    <>
      <JobHead job={job.data} />
      <nav className="views" aria-label="Views of this job">
        {VIEWS.map((each) => (
          <Link key={each} to="/jobs/$id" params={{ id }} search={(old) => ({ ...old, view: each })} aria-current={each === view ? "page" : undefined} resetScroll={false}>
            {TITLES[each]}
          </Link>
        ))}
      </nav>
      <div className="view">
        <Suspense fallback={<div className="panel"><Bones rows={5} label="Reading" /></div>}>
          <ViewOf view={view} job={job.data} />
        </Suspense>
      </div>
    </>
  );
}

function ViewOf({ view, job }: { view: View; job: Job }) {
  switch (view) {
    case "training":
      return <Training key={job.id} job={job} />;
    case "memory":
      return <Memory key={job.id} job={job} />;
    case "checkpoints":
      return <Checkpoints key={job.id} job={job} />;
    case "logs":
      return <Logs key={job.id} job={job} />;
    case "events":
      return <Events key={job.id} job={job} />;
    case "spec":
      return <SpecView job={job} />;
  }
}
