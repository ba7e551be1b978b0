/** Small pieces every page uses: waiting, failing, copying, telling. */

import { useState, type ReactNode } from "react";

export function Bone({ width }: { width?: string | number }) {
  return <span className="bone" style={{ width }} aria-hidden="true" />;
}

/** Bones in place of rows that have not come yet; said once to a screen reader. */
export function Bones({ rows, label }: { rows: number; label: string }) {
  return (
    <div role="status" aria-label={label} style={{ display: "grid", gap: 14, padding: 14 }}>
      {Array.from({ length: rows }, (_, index) => <Bone key={index} width={`${92 - ((index * 17) % 40)}%`} />)}
    </div>
  );
}

export function Notice({ tone, children, onRetry }: { tone: "bad" | "warn" | "still"; children: ReactNode; onRetry?: () => void }) {
  return (
    <div className={`notice ${tone}`} role={tone === "bad" ? "alert" : "status"}>
      <div>{children}</div>
      {onRetry && <button type="button" className="button" onClick={onRetry}>Try again</button>}
    </div>
  );
}

export function Command({ text }: { text: string }) {
  const [copied, setCopied] = useState(false);
  const copy = () => {
    void navigator.clipboard?.writeText(text).then(() => {
      setCopied(true);
      setTimeout(() => setCopied(false), 1600);
    });
  };
  return (
    <div className="command">
      <code tabIndex={0}>{text}</code>
      <button type="button" className="button plain" onClick={copy} aria-label={`Copy ${text}`}>{copied ? "Copied" : "Copy"}</button>
    </div>
  );
}

export function Panel({ title, aside, children, flush }: { title: ReactNode; aside?: ReactNode; children: ReactNode; flush?: boolean }) {
  return (
    <section className="panel">
      <header>
        <h2>{title}</h2>
        {aside}
      </header>
      {flush ? children : <div className="body">{children}</div>}
    </section>
  );
}
