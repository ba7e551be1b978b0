import { expect, test } from "vitest";
import { countedIn } from "./counts";

test("images are samples, text and token files are tokens", () => {
  const of = (kind: string) => countedIn({ spec: { data: { kind } } });
  expect(["digits", "text", "tokens"].map(of)).toEqual(["Samples", "Tokens", "Tokens"]);
});
