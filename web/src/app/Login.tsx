/** Shown when the server does not know the browser: the link that `shardyard serve` prints, or the token pasted here. */

import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, messageOf } from "../api/client";
import { Command } from "../ui/pieces";
import { Mark } from "./Mark";

export function Login() {
  const client = useQueryClient();
  const [token, setToken] = useState("");
  const login = useMutation({
    mutationFn: () => api.POST("/v1/login", { body: { token: token.trim() } }),
    onSuccess: () => client.invalidateQueries(),
  });
  return (
    <main className="login">
      <form
        className="panel"
        onSubmit={(event) => {
          event.preventDefault();
          login.mutate();
        }}
      >
        <Mark size={36} />
        <h1>Who is there?</h1>
        <p>Open the login link that <code>shardyard serve</code> printed, or paste the token. This prints it again:</p>
        <Command text="shardyard token" />
        <label className="field">
          <span>Token</span>
          <input className="input" type="password" autoComplete="current-password" required value={token} onChange={(event) => setToken(event.target.value)} />
        </label>
        {login.isError && <p role="alert" style={{ color: "var(--bad)" }}>{messageOf(login.error)}</p>}
        <button type="submit" className="button primary" disabled={login.isPending}>{login.isPending ? "Asking…" : "Enter"}</button>
      </form>
    </main>
  );
}
