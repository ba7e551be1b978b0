import { expect, test } from "vitest";
import { keptText } from "./kept";

test("damaged checkpoints are counted, and never said to resume", () => {
  expect(keptText(4, 0)).toMatch(/^4 kept; each resumes on other ranks/);
  expect(keptText(4, 3)).toMatch(/^4 kept, 3 of them damaged; 1 resumes on other ranks/);
  expect(keptText(4, 2)).toMatch(/2 of them damaged; 2 resume on other ranks/);
  expect(keptText(2, 2)).toBe("2 kept, 2 of them damaged; none resumes");
});
