/**
 * One greedy request, its token ids on stdout as they arrive:
 *
 *     node stream.mjs ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS]
 */
import { Engine } from "nanocore-client";

const [endpoint, prompt, maxTokens = "16"] = process.argv.slice(2);
if (!prompt) {
  console.error("usage: node stream.mjs ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS]");
  process.exit(2);
}

let engine;
try {
  engine = await Engine.connect(endpoint);
  const sampling = { temperature: 0, max_tokens: Number(maxTokens) };
  for await (const { token_ids, finish_reason } of engine.generate(
    prompt.split(",").map(Number),
    sampling,
  )) {
    for (const tokenId of token_ids) console.log(tokenId);
    if (finish_reason) console.log(`finish_reason: ${finish_reason}`);
  }
} catch (error) {
  console.error(`${error.code ?? error.name}: ${error.message}`.replaceAll("\n", " "));
  process.exitCode = 1;
} finally {
  await engine?.close();
}
