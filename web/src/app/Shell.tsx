/** The frame around every page: the bar, the way in, the feed's state. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { Link, Outlet, useRouterState } from "@tanstack/react-router";
import { useEffect } from "react";
import { messageOf, Refused } from "../api/client";
import { openFeed, useLinkState } from "../api/feed";
import { meQuery } from "../api/queries";
import { Notice } from "../ui/pieces";
import { chooseTheme, useTheme } from "../ui/theme";
import { Toasts } from "../ui/toasts";
import { Login } from "./Login";
import { Mark } from "./Mark";

export function Shell() {
  const me = useQuery(meQuery);
  if (me.error instanceof Refused && me.error.problem.status === 401) return <Login />;
  return (
    <>
      <a className="button skip" href="#page">Skip to the page</a>
      <Bar isIn={me.isSuccess} />
      <main id="page" tabIndex={-1}>
        {me.isError ? (
          <Notice tone="bad" onRetry={() => void me.refetch()}>{messageOf(me.error)} Is <code>shardyard serve</code> running?</Notice>
        ) : (
          <Outlet />
        )}
      </main>
      <Toasts />
    </>
  );
}

function Bar({ isIn }: { isIn: boolean }) {
  const path = useRouterState({ select: (state) => state.location.pathname });
  const isJobs = path === "/" || path.startsWith("/jobs");
  return (
    <header className="bar">
      <Link to="/" className="brand" aria-label="Shardyard, all jobs">
        <Mark />
        <span>Shardyard</span>
      </Link>
      <nav aria-label="Pages">
        <Link to="/" activeOptions={{ exact: true, includeSearch: false }} {...(isJobs && { "aria-current": "page" as const })}>Jobs</Link>
        <Link to="/cluster">Cluster</Link>
      </nav>
      <div className="right">
        {isIn && <Feed />}
        <ThemeButton />
        <Link to="/new" className="button primary">New job</Link>
      </div>
    </header>
  );
}

const LINK_WORDS = { connecting: "connecting", live: "live", lost: "reconnecting" };

function Feed() {
  const client = useQueryClient();
  const state = useLinkState();
  useEffect(() => openFeed(client), [client]);
  return (
    <span className="link-state" data-state={state} role="status" title={state === "lost" ? "The server does not answer; what you see may be old" : "Changes arrive as they happen"}>
      <i aria-hidden="true" />
      <span>{LINK_WORDS[state]}</span>
    </span>
  );
}

function ThemeButton() {
  const theme = useTheme();
  const next = theme === "dark" ? "light" : "dark";
  return (
    <button type="button" className="button plain icon" onClick={() => chooseTheme(next)} aria-label={`Use the ${next} theme`} title={`Use the ${next} theme`}>
      <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
        <circle cx="8" cy="8" r="6.2" fill="none" stroke="currentColor" strokeWidth="1.5" />
        <path d="M8 1.8a6.2 6.2 0 0 1 0 12.4Z" fill="currentColor" />
      </svg>
    </button>
  );
}
