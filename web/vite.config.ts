import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

// `SHARDYARD_SERVER` names a running server for `npm run dev`.
const server = process.env.SHARDYARD_SERVER ?? "http://127.0.0.1:8470";

export default defineConfig({
  plugins: [react()],
  build: {
    outDir: "../server/static",
    emptyOutDir: true,
    target: "es2022",
    manifest: true,
    modulePreload: { polyfill: false },
  },
  server: { proxy: { "/v1": server, "/login": server, "/openapi.json": server } },
  test: { environment: "node", include: ["src/**/*.test.ts"] },
});
