/** Which columns to show; the choice is in the address, so going back keeps it. */

interface Props {
  columns: readonly { id: string; title: string; shown: boolean }[];
  onToggle: (id: string, shown: boolean) => void;
}

export function ColumnPicker({ columns, onToggle }: Props) {
  return (
    <details
      className="column-picker"
      onBlur={(event) => {
        if (!event.currentTarget.contains(event.relatedTarget)) event.currentTarget.open = false;
      }}
      onKeyDown={(event) => {
        if (event.key === "Escape") event.currentTarget.open = false;
      }}
    >
      <summary aria-label="Choose columns" title="Choose columns">
        <svg width="14" height="14" viewBox="0 0 14 14" aria-hidden="true"><path d="M1 1.5h3v11H1Zm4.5 0h3v11h-3Zm4.5 0h3v11h-3Z" fill="none" stroke="currentColor" strokeWidth="1.2" /></svg>
      </summary>
      <div className="panel">
        {columns.map(({ id, title, shown }) => (
          <label key={id}>
            <input type="checkbox" checked={shown} onChange={() => onToggle(id, !shown)} />
            {title}
          </label>
        ))}
      </div>
    </details>
  );
}
