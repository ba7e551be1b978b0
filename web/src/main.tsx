import { QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { newAnswerCache } from "./api/cache";
import { router } from "./app/router";
import "./styles/tokens.css";
import "./styles/ground.css";
import "./styles/pieces.css";
import "./styles/shell.css";

const root = document.getElementById("root");
if (!root) throw new Error("index.html has no #root");
createRoot(root).render(
  <StrictMode>
    <QueryClientProvider client={newAnswerCache()}>
      <RouterProvider router={router} />
    </QueryClientProvider>
  </StrictMode>,
);
