import { Link } from "@tanstack/react-router";
import type { Job } from "../api/client";
import { Panel } from "../ui/pieces";

/** The spec as stored, with every default written out. */
export function SpecView({ job }: { job: Job }) {
  return (
    <Panel title="Spec" aside={<Link className="button push" to="/new" search={{ from: job.id }}>Copy into a new job</Link>} flush>
      <pre className="spec" tabIndex={0} aria-label="The job spec as YAML">{job.spec_yaml}</pre>
    </Panel>
  );
}
