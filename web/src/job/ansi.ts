/** Terminal output as plain text. Pure. */

// CSI sequences, OSC sequences (titles, links) up to their end, and lone two-character escapes.
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])/g;
const CONTROLS = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/g;

/** Escape sequences go, other control characters become visible; everything else is left as it is, in any script. */
export function plain(text: string): string {
  return text.replace(ESCAPES, "").replace(CONTROLS, (control) => String.fromCodePoint(0x2400 + (control === "\u007f" ? 0x21 : control.charCodeAt(0))));
}
