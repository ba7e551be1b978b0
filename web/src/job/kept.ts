import { formatCount } from "../ui/format";

/** What a job's checkpoints are good for; damaged ones are kept and good for nothing. */
export function keptText(kept: number, damaged: number): string {
  const uses = "on other ranks or at another stage, with the same bits";
  if (damaged === 0) return `${formatCount(kept)} kept; each resumes ${uses}`;
  const usable = kept - damaged;
  const others = usable === 0 ? "none resumes" : `${formatCount(usable)} ${usable === 1 ? "resumes" : "resume"} ${uses}`;
  return `${formatCount(kept)} kept, ${formatCount(damaged)} of them damaged; ${others}`;
}
