/** The YAML editor. Loaded only with this page; problems stand at their lines. */

import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { yaml } from "@codemirror/lang-yaml";
import { bracketMatching, HighlightStyle, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { lintGutter, lintKeymap, setDiagnostics, type Diagnostic } from "@codemirror/lint";
import { EditorState, type Text } from "@codemirror/state";
import { drawSelection, EditorView, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { useEffect, useImperativeHandle, useRef, type Ref } from "react";
import type { FieldProblem } from "../api/client";

const inks = HighlightStyle.define([
  { tag: [tags.propertyName, tags.definition(tags.propertyName)], color: "var(--accent)" },
  { tag: [tags.string, tags.special(tags.string)], color: "var(--ink)" },
  { tag: tags.comment, color: "var(--ink-3)", fontStyle: "italic" },
  { tag: [tags.punctuation, tags.separator, tags.brace, tags.squareBracket], color: "var(--ink-3)" },
  { tag: [tags.number, tags.bool, tags.null, tags.keyword], color: "var(--ink)", fontWeight: "600" },
]);

const look = EditorView.theme({
  "&": { backgroundColor: "transparent", color: "var(--ink)", fontSize: "13px", height: "100%" },
  "&.cm-focused": { outline: "2px solid var(--accent)", outlineOffset: "-2px" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.6" },
  ".cm-content": { padding: "10px 0", caretColor: "var(--accent)" },
  ".cm-gutters": { backgroundColor: "transparent", color: "var(--ink-3)", border: "0" },
  ".cm-activeLine": { backgroundColor: "color-mix(in srgb, var(--sunken) 55%, transparent)" },
  ".cm-activeLineGutter": { backgroundColor: "transparent", color: "var(--ink)" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "color-mix(in srgb, var(--accent) 24%, transparent)" },
  ".cm-cursor": { borderLeftColor: "var(--accent)" },
  ".cm-tooltip": { border: "1px solid var(--rule-strong)", backgroundColor: "var(--panel)", color: "var(--ink)" },
  ".cm-diagnostic": { fontFamily: "var(--sans)" },
});

export interface EditorHandle {
  goTo: (line: number) => void;
}

interface Props {
  text: string;
  problems: readonly FieldProblem[];
  onText: (text: string) => void;
  onSubmit: () => void;
  ref?: Ref<EditorHandle>;
}

export default function Editor({ text, problems, onText, onSubmit, ref }: Props) {
  const holder = useRef<HTMLDivElement>(null);
  const view = useRef<EditorView | null>(null);
  const live = useRef({ onText, onSubmit });
  live.current = { onText, onSubmit };

  useEffect(() => {
    if (!holder.current) return undefined;
    const made = new EditorView({
      parent: holder.current,
      state: EditorState.create({
        doc: text,
        extensions: [
          lineNumbers(),
          lintGutter(),
          history(),
          drawSelection(),
          highlightActiveLine(),
          indentOnInput(),
          bracketMatching(),
          indentUnit.of("  "),
          yaml(),
          syntaxHighlighting(inks),
          look,
          EditorView.lineWrapping,
          EditorView.contentAttributes.of({ "aria-label": "Job spec in YAML. Escape, then Tab, leaves the editor." }),
          keymap.of([{ key: "Mod-Enter", run: () => (live.current.onSubmit(), true) }, indentWithTab, ...lintKeymap, ...historyKeymap, ...defaultKeymap]),
          EditorView.updateListener.of((update) => {
            if (update.docChanged) live.current.onText(update.state.doc.toString());
          }),
        ],
      }),
    });
    view.current = made;
    return () => made.destroy();
    // The document belongs to the editor after the first drawing.
  }, []);

  useEffect(() => {
    const current = view.current;
    if (!current || current.state.doc.toString() === text) return;
    current.dispatch({ changes: { from: 0, to: current.state.doc.length, insert: text } });
  }, [text]);

  useEffect(() => {
    const current = view.current;
    if (!current) return;
    current.dispatch(setDiagnostics(current.state, problems.flatMap((problem) => diagnosticOf(problem, current.state.doc))));
  }, [problems]);

  useImperativeHandle(ref, () => ({
    goTo(line) {
      const current = view.current;
      if (!current || line < 1 || line > current.state.doc.lines) return;
      const at = current.state.doc.line(line);
      current.dispatch({ selection: { anchor: at.from + (at.text.length - at.text.trimStart().length) }, scrollIntoView: true });
      current.focus();
    },
  }));

  return <div ref={holder} className="editor" />;
}

function diagnosticOf(problem: FieldProblem, doc: Text): Diagnostic[] {
  if (problem.line === null || problem.line === undefined || problem.line < 1) return [];
  const line = doc.line(Math.min(problem.line, doc.lines));
  const from = Math.min(line.from + Math.max(0, (problem.column ?? 1) - 1), line.to);
  const word = /^[^\s:,{}[\]]+/.exec(doc.sliceString(from, line.to))?.[0].length ?? 0;
  return [{ from, to: Math.max(from + word, Math.min(from + 1, line.to)), severity: "error", message: sentenceOf(problem) }];
}

export function sentenceOf(problem: FieldProblem): string {
  return problem.suggestion ? `${problem.message} Try ${problem.suggestion}.` : problem.message;
}
