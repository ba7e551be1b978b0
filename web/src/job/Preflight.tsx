/** What a resume or a fork would read and need, asked of the server before anything starts. */

import { useQuery } from "@tanstack/react-query";
import { messageOf, type Job, type Preflight as Answer, type PreflightWish } from "../api/client";
import { preflightQuery } from "../api/queries";
import { formatBytes, formatCount } from "../ui/format";

export function Preflight({ job, wish }: { job: Job; wish: PreflightWish }) {
  const asked = useQuery(preflightQuery(job.id, wish));
  return (
    <div className="preflight" role="status" aria-live="polite" aria-busy={asked.isFetching}>
      {asked.data ? <Told answer={asked.data} /> : asked.isError ? <p className="quiet">{messageOf(asked.error)}</p> : <p className="quiet">Looking at what it would read…</p>}
    </div>
  );
}

function Told({ answer }: { answer: Answer }) {
  const [least, most] = [Math.min(...answer.read_bytes), Math.max(...answer.read_bytes)];
  const each = least === most ? formatBytes(most) : `${formatBytes(least)} to ${formatBytes(most)}`;
  return (
    <>
      <p>
        {answer.checkpoint === null ? "Begins at step 0." : `Begins at step ${formatCount(answer.step)}${answer.resharded ? `, resharded from ${answer.from_ranks} × stage ${answer.from_stage} to ${answer.ranks} × stage ${answer.stage}` : ""}. Each rank reads ${each}.`}
      </p>
      <p style={answer.fits ? undefined : { color: "var(--bad)" }}>
        The largest rank needs {formatBytes(answer.plan.total_bytes)}
        {answer.device_memory_bytes === null ? "." : ` of ${formatBytes(answer.device_memory_bytes)}: ${answer.fits ? "it fits." : "it does not fit."}`}
      </p>
      {answer.passed_over.map((each) => <p key={each.checkpoint} style={{ color: "var(--warn)" }}>Passed over, step {formatCount(each.step)}: <bdi>{each.why}</bdi></p>)}
    </>
  );
}
