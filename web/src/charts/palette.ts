/** Canvas cannot read custom properties: this reads them once per theme. */

import { currentTheme } from "../ui/theme";

let theme = "";
let styles: CSSStyleDeclaration | null = null;

/** The value of a custom property in the theme shown now, such as `colour("--rule")`. */
export function colour(property: string): string {
  if (styles === null || theme !== currentTheme()) {
    theme = currentTheme();
    styles = getComputedStyle(document.documentElement);
  }
  return styles.getPropertyValue(property).trim();
}

/** The same colour let through by `share` (0 to 1). The page's colours are six hex digits, so two more are the alpha. */
export function wash(property: string, share: number): string {
  return colour(property) + Math.round(share * 255).toString(16).padStart(2, "0");
}
