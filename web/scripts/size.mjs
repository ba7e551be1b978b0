// Adds up, gzipped, what the browser fetches before the jobs page stands: the page, its entry chunk with static imports, styles, public files.
// Exit code 1 above the limit.
import { readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const LIMIT_BYTES = 250 * 1024;
const root = new URL("../../server/static/", import.meta.url);
const manifest = JSON.parse(readFileSync(new URL(".vite/manifest.json", root), "utf8"));

function reach(key, seen = new Set()) {
  if (seen.has(key)) return seen;
  seen.add(key);
  for (const child of manifest[key].imports ?? []) reach(child, seen);
  return seen;
}

// The jobs page is a chunk of its own: the first load is the entry plus that page.
const keys = new Set([...reach("index.html"), ...Object.keys(manifest).filter((key) => key.endsWith("jobs/JobsPage.tsx")).flatMap((key) => [...reach(key)])]);
const files = new Set(["index.html", "theme.js", "favicon.svg"]);
for (const key of keys) {
  files.add(manifest[key].file);
  for (const sheet of manifest[key].css ?? []) files.add(sheet);
}
let total = 0;
for (const file of files) {
  const bytes = gzipSync(readFileSync(new URL(file, root)), { level: 9 }).length;
  total += bytes;
  console.log(`${String(bytes).padStart(9)}  ${file}`);
}
console.log(`${String(total).padStart(9)}  first load, gzipped (limit ${LIMIT_BYTES})`);
process.exit(total > LIMIT_BYTES ? 1 : 0);
