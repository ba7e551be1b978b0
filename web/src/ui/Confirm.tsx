/** A question that names the thing. A native dialog: focus stays inside, Escape says no. */

import { useEffect, useRef, type ReactNode } from "react";

interface Props {
  title: string;
  verb: string;
  danger?: boolean;
  no?: string;
  busy?: boolean;
  impossible?: boolean;
  error?: string | null;
  children?: ReactNode;
  onConfirm: () => void;
  onClose: () => void;
}

export function Confirm({ title, verb, danger, no = "Keep as it is", busy, impossible, error, children, onConfirm, onClose }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  return (
    <dialog ref={dialog} onClose={onClose} aria-labelledby="confirm-title">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          onConfirm();
        }}
      >
        <h2 id="confirm-title" style={{ fontSize: 15 }}>{title}</h2>
        {children}
        {error && <p role="alert" style={{ color: "var(--bad)" }}>{error}</p>}
        <div className="actions">
          <button type="button" className="button" onClick={() => dialog.current?.close()}>{no}</button>
          <button type="submit" className={danger ? "button danger" : "button primary"} disabled={busy || impossible}>{busy ? "Asking…" : verb}</button>
        </div>
      </form>
    </dialog>
  );
}
