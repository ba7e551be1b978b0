import { Link } from "@tanstack/react-router";
import { messageOf } from "../api/client";
import { Notice } from "../ui/pieces";

export function NotFound() {
  return (
    <div className="panel empty">
      <h1>There is no such page</h1>
      <p>The address may be cut off, or the page may have moved.</p>
      <Link className="button" to="/">All jobs</Link>
    </div>
  );
}

/** A page that cannot be drawn says so; the rest of the dashboard stays. */
export function PageError({ error, reset }: { error: unknown; reset: () => void }) {
  return <Notice tone="bad" onRetry={reset}>This page could not be drawn: {messageOf(error)}</Notice>;
}
