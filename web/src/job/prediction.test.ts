import { expect, test } from "vitest";
import { deviation } from "./Prediction";

test("a deviation is said of the measured step against the predicted one", () => {
  expect(deviation(-0.5)).toBe("+100 % against it");
  expect(deviation(0.25)).toBe("−20 % against it");
  expect(deviation(0.001)).toBe("as predicted");
});
