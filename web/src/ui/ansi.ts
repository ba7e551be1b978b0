/** Terminal output as plain text. Pure. */

import { formatTime } from "./format";

// CSI sequences, OSC sequences (titles, links) up to their end, and lone two-character escapes.
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])/g;
const CONTROLS = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/g;
const OVERRIDES = /[\u202d\u202e]/g; // not the isolates and embeddings, which mixed scripts need

const INSTANTS = /\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)/g;

/** A sentence of the server for a person here: plain, with its instants in local time. */
export function readable(text: string): string {
  return plain(text).trim().replace(INSTANTS, (instant) => formatTime(instant));
}

/**
 * Escape sequences go; other control characters become visible, and so do overrides of the direction, which show a text
 * as another than it is. Everything else is left as it is, in any script.
 */
export function plain(text: string): string {
  return text.replace(ESCAPES, "").replace(OVERRIDES, "\ufffd").replace(CONTROLS, (control) => String.fromCodePoint(0x2400 + (control === "\u007f" ? 0x21 : control.charCodeAt(0))));
}
