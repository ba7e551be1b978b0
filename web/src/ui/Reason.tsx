/** Why something is as it is: a sentence stands in the line, a report opens on request. */

import { readable } from "./ansi";

const SENTENCE_CHARS = 260;

export function Reason({ text }: { text: string }) {
  const shown = readable(text);
  if (shown.length <= SENTENCE_CHARS && !shown.includes("\n")) return <span className="quiet"><bdi>{shown}</bdi></span>;
  const [first = ""] = shown.split("\n", 1);
  return (
    <details className="reason">
      <summary className="quiet"><bdi>{first.length > SENTENCE_CHARS ? `${first.slice(0, SENTENCE_CHARS)}…` : first}</bdi></summary>
      <pre tabIndex={0}>{shown}</pre>
    </details>
  );
}
