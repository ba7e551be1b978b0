/** The yard: every node with its slots and who holds them, and the queue with the reason each job waits. */

import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { messageOf, type Node, type QueueItem } from "../api/client";
import { nodesQuery, queueQuery } from "../api/queries";
import { useNow } from "../ui/clock";
import { formatAge, formatAgo, formatBytes, formatCount, formatTime } from "../ui/format";
import { Reason } from "../ui/Reason";
import { Bones, Command, Notice, Panel } from "../ui/pieces";
import { Store } from "./Store";
import "./cluster.css";

export function ClusterPage() {
  const nodes = useQuery(nodesQuery);
  const queue = useQuery(queueQuery);
  const items = nodes.data?.items ?? [];
  const alive = items.filter((node) => node.alive);
  const [slots, free] = [sum(alive, (node) => node.slots), sum(alive, (node) => node.free_slots)];
  return (
    <>
      <div className="page-head">
        <h1>Cluster</h1>
        {nodes.isSuccess && items.length > 0 && (
          <p className="quiet">{alive.length} {alive.length === 1 ? "node" : "nodes"}, {formatCount(slots - free)} of {formatCount(slots)} slots held</p>
        )}
      </div>
      {nodes.isPending && <div className="panel"><Bones rows={4} label="Looking at the cluster" /></div>}
      {nodes.isError && <Notice tone="bad" onRetry={() => void nodes.refetch()}>{messageOf(nodes.error)}</Notice>}
      {nodes.isSuccess && items.length === 0 && (
        <div className="panel empty">
          <h2>No nodes yet</h2>
          <p>The local one appears a few seconds after the server starts. To add another machine, run this on it:</p>
          <Command text="shardyard node --help" />
        </div>
      )}
      <div className="nodes">{items.map((node) => <NodeCard key={node.id} node={node} />)}</div>
      <h2 className="queue-title">Queue</h2>
      {queue.isPending && <div className="panel"><Bones rows={3} label="Reading the queue" /></div>}
      {queue.isError && <Notice tone="bad" onRetry={() => void queue.refetch()}>{messageOf(queue.error)}</Notice>}
      {queue.isSuccess && (queue.data.items.length === 0 ? <p className="panel queue-empty quiet">Nothing waits.</p> : <Queue items={queue.data.items} />)}
      <h2 className="queue-title">Checkpoints</h2>
      <Store />
    </>
  );
}

function sum<T>(items: readonly T[], of: (item: T) => number): number {
  return items.reduce((total, item) => total + of(item), 0);
}

function NodeCard({ node }: { node: Node }) {
  const now = useNow();
  const hues = new Map([...new Set(node.holders.map((holder) => holder.job_id))].map((id, index) => [id, index % 6]));
  const free = Math.max(0, node.slots - node.holders.length);
  return (
    <section className="panel node" data-alive={node.alive}>
      <header>
        <h2 className="mono">{node.address}</h2>
        <span className="quiet">{node.device === "cuda" ? "GPU" : "CPU"} · {formatBytes(node.memory_bytes)} memory · {formatBytes(node.device_memory_bytes)} a slot</span>
        <span className="push">
          {node.alive ? <span className="quiet">{node.free_slots} of {node.slots} free</span> : <span className="badge bad" title={formatTime(node.seen_at, now)}>gone, last seen {formatAgo(node.seen_at, now)}</span>}
        </span>
      </header>
      <ol className="slots" aria-label={`${node.slots} slots`}>
        {node.holders.map((holder) => (
          <li key={`${holder.job_id}-${holder.rank}`} data-hue={hues.get(holder.job_id)}>
            <Link to="/jobs/$id" params={{ id: holder.job_id }} title={`${holder.job_name}, rank ${holder.rank}, attempt ${holder.attempt}`}>
              <bdi>{holder.job_name}</bdi>
              <span>rank {holder.rank}</span>
            </Link>
          </li>
        ))}
        {Array.from({ length: node.alive ? free : 0 }, (_, index) => <li key={index} className="free">free</li>)}
      </ol>
    </section>
  );
}

function Queue({ items }: { items: readonly QueueItem[] }) {
  const now = useNow();
  return (
    <Panel title={`${items.length} waiting`} aside={<span className="quiet">in the order of start</span>} flush>
      <div className="scroll-x" tabIndex={0} role="region" aria-label="Queue">
        <table className="facts">
          <thead>
            <tr><th scope="col" className="num">Place</th><th scope="col">Job</th><th scope="col" className="num">Ranks</th><th scope="col" className="num">Priority</th><th scope="col" className="num">Waits</th><th scope="col">Why</th></tr>
          </thead>
          <tbody>
            {items.map((item) => (
              <tr key={item.job_id}>
                <td className="num">{item.position}</td>
                <th scope="row"><Link to="/jobs/$id" params={{ id: item.job_id }}><bdi>{item.name}</bdi></Link></th>
                <td className="num">{item.ranks}</td>
                <td className="num">{item.priority}</td>
                <td className="num">{formatAge(item.waiting_since, now)}</td>
                <td>
                  <Reason text={item.reason?.sentence ?? "Waiting for the controller's next look."} />
                  {item.unblock && <p className="quiet">{item.unblock}</p>}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}
