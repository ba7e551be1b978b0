/** The mark: four ranks, each owning its own shard of one length. */
export function Mark({ size = 20 }: { size?: number }) {
  return (
    <svg width={size} height={size} viewBox="0 0 20 20" aria-hidden="true">
      <g fill="currentColor" opacity="0.22">
        <path d="M0 1h20v3.4H0ZM0 5.9h20v3.4H0ZM0 10.8h20v3.4H0ZM0 15.7h20v3.4H0Z" />
      </g>
      <g fill="var(--accent)">
        <path d="M0 1h5v3.4H0ZM5 5.9h5v3.4H5ZM10 10.8h5v3.4h-5ZM15 15.7h5v3.4h-5Z" />
      </g>
    </svg>
  );
}
