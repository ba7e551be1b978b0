/** Light or dark: the system's until somebody chooses here. `public/theme.js` does the same before the first paint. */

import { useSyncExternalStore } from "react";

export type Theme = "light" | "dark";

const KEY = "shardyard.theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

function chosen(): Theme | null {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : null;
  } catch {
    return null; // storage is off in this browser
  }
}

export function currentTheme(): Theme {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

function show(theme: Theme): void {
  document.documentElement.dataset.theme = theme;
  for (const listener of listeners) listener();
}

export function chooseTheme(theme: Theme): void {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // Kept for this page only.
  }
  show(theme);
}

system.addEventListener("change", () => {
  if (!chosen()) show(system.matches ? "dark" : "light");
});

export function onTheme(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function useTheme(): Theme {
  return useSyncExternalStore(onTheme, currentTheme);
}
