/** Where to begin: complete specs, each the shortest that is useful. */

export interface Template {
  name: string;
  text: string;
}

export const TEMPLATES: readonly Template[] = [
  {
    name: "GPT on the standard library",
    text: `name: gpt-on-stdlib
tags: [demo]
model: {kind: gpt, layers: 4, hidden: 128, heads: 4, context: 128}
data: {kind: text, path: stdlib, tokenizer: {kind: bpe, vocab: 4096}}
train:
  steps: 300
  global_batch: 16      # sequences per optimizer step
  micro_batch: 4        # V = 16 / 4 = 4 micro-batches
zero: {stage: auto}     # or 0, 1, 2, 3: the bits are the same
resources: {ranks: 2}
`,
  },
  {
    name: "MLP on digits",
    text: `name: mlp-on-digits
model: {kind: mlp, hidden: [128, 64, 32]}
data: {kind: digits}
train:
  steps: 500
  global_batch: 64
  micro_batch: 16
  optimizer: {kind: adamw, lr: 1.0e-3}
zero: {stage: 2}
resources: {ranks: 2}
checkpoint: {every: 100}
`,
  },
  {
    name: "Your own model",
    text: `name: my-model
model:
  kind: python
  entry: "my_model:build"       # module:function
  path: /absolute/path/to/code
  kwargs: {}
data: {kind: tokens, path: /absolute/path/to/train.bin}
train:
  steps: 1000
zero: {stage: auto}
resources: {ranks: 4}
`,
  },
];
