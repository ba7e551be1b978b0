/** What happened to the job and who caused it, newest first. */

import { useInfiniteQuery } from "@tanstack/react-query";
import { messageOf, type Job } from "../api/client";
import { eventsQuery } from "../api/queries";
import { useNow } from "../ui/clock";
import { formatTime } from "../ui/format";
import { Bones, Notice, Panel } from "../ui/pieces";
import { Reason } from "../ui/Reason";
import { State } from "../ui/State";

export function Events({ job }: { job: Job }) {
  const events = useInfiniteQuery(eventsQuery(job.id));
  const now = useNow();
  if (events.isPending) return <div className="panel"><Bones rows={5} label="Reading the events" /></div>;
  if (!events.data) return <Notice tone="bad" onRetry={() => void events.refetch()}>{messageOf(events.error)}</Notice>;
  const items = events.data.pages.flatMap((page) => page.items).sort((a, b) => b.id - a.id);
  return (
    <Panel title="Events" aside={<span className="quiet">newest first</span>} flush>
      <ol className="events">
        {items.map((event) => (
          <li key={event.id}>
            <time dateTime={event.at}>{formatTime(event.at, now)}</time>
            <div>
              <div className="event-line">
                <Reason text={event.message || event.action} />
                {event.new && event.new !== event.old && <span className="edge">{event.old && <><State status={event.old} /> <span aria-hidden="true">→</span></>} <State status={event.new} /></span>}
              </div>
              <p className="quiet">
                <span className="mono">{event.action}</span> · {event.actor}
                {event.attempt !== null && ` · attempt ${event.attempt}`}
                {event.rank !== null && ` · rank ${event.rank}`}
                {event.cause && ` · ${event.cause}`}
              </p>
            </div>
          </li>
        ))}
      </ol>
      {events.hasNextPage && <p className="more"><button type="button" className="button" disabled={events.isFetchingNextPage} onClick={() => void events.fetchNextPage()}>Older events</button></p>}
    </Panel>
  );
}
