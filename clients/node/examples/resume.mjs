/**
 * Two samples that outlive their engine: kill it, start another one at the endpoint within a minute, and they go on.
 *
 *     node resume.mjs ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS]
 *
 * Prints each sample's index and the token id as it arrives, and how each ended.
 */
import { Engine } from "nanocore-client";

const [endpoint, prompt, maxTokens = "1000"] = process.argv.slice(2);
if (!prompt) {
  console.error("usage: node resume.mjs ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS]");
  process.exit(2);
}

const engine = await Engine.connect(endpoint, { resumeMs: 60_000 });
const sampling = { n: 2, seed: 7, max_tokens: Number(maxTokens), presence_penalty: 0.5, ignore_eos: true };
for await (const output of engine.generate(prompt.split(",").map(Number), sampling)) {
  for (const tokenId of output.token_ids) console.log(`${output.index} ${tokenId}`);
  if (output.finish_reason) console.log(`${output.index} finish_reason: ${output.finish_reason}`);
}
await engine.close();
