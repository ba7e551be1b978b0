import { expect, it } from "vitest";
import { plain } from "./ansi";

it("drops colours, cursor movement, titles and links, and keeps the words", () => {
  expect(plain("\u001b[1;32mok\u001b[0m \u001b]0;title\u0007\u001b]8;;http://x\u001b\\link\u001b]8;;\u001b\\\u001b[2K")).toBe("ok link");
});

it("leaves every script and every angle bracket alone", () => {
  expect(plain("训练 <b>& تدريب</b>\t1")).toBe("训练 <b>& تدريب</b>\t1");
});

it("makes other control characters visible", () => {
  expect(plain("a\u0000b\u007f")).toBe("a␀b␡");
});

it("does not let a text be shown as another than it is", () => {
  expect(plain("invoice\u202egnp.exe \u2067עברית\u2069")).toBe("invoice\ufffdgnp.exe \u2067עברית\u2069");
});
