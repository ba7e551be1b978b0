/** The checkpoint store beside the database: what nothing refers to, when somebody asks for it. */

import { useQuery } from "@tanstack/react-query";
import { messageOf } from "../api/client";
import { meQuery, orphansQuery } from "../api/queries";
import { formatBytes, formatCount } from "../ui/format";
import { Notice, Panel } from "../ui/pieces";

export function Store() {
  const me = useQuery(meQuery);
  const found = useQuery(orphansQuery);
  if (me.data?.role !== "admin") return null;
  const button = <button type="button" className="button" disabled={found.isFetching} onClick={() => void found.refetch()}>{found.isFetching ? "Looking…" : "Look for orphans"}</button>;
  return (
    <Panel title="Store" aside={button} flush>
      {found.isError && <Notice tone="bad">{messageOf(found.error)}</Notice>}
      {!found.data && !found.isError && <p className="quiet store-word">Lists what lies in the store that no job or checkpoint refers to. Nothing is removed.</p>}
      {found.data?.items.length === 0 && <p className="store-word" role="status">Nothing is without an owner: {formatCount(found.data.jobs)} jobs were looked through.</p>}
      {found.data && found.data.items.length > 0 && (
        <div className="scroll-x" tabIndex={0} role="region" aria-label="Orphans">
          <table className="facts">
            <thead><tr><th scope="col">Kind</th><th scope="col">Job</th><th scope="col">Place</th><th scope="col" className="num">Size</th><th scope="col">What it is</th></tr></thead>
            <tbody>
              {found.data.items.map((item) => (
                <tr key={`${item.job_id}/${item.place}`}>
                  <th scope="row">{item.kind}</th>
                  <td className="mono">{item.job_id || "–"}</td>
                  <td className="mono">{item.place || "–"}</td>
                  <td className="num">{formatBytes(item.bytes)}</td>
                  <td>{item.meaning}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}
