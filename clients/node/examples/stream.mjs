/**
 * One greedy request, its token ids on stdout as they arrive; of a structured output, if one is given as JSON:
 *
 *     node stream.mjs ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS] ['{"choice": ["yes", "no"]}']
 */
import { Engine } from "nanocore-client";

const [endpoint, prompt, maxTokens = "16", structured = "null"] = process.argv.slice(2);
if (!prompt) {
  console.error("usage: node stream.mjs ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS] [STRUCTURED_OUTPUTS]");
  process.exit(2);
}

let engine;
try {
  engine = await Engine.connect(endpoint);
  const structured_outputs = JSON.parse(structured) ?? undefined;
  const sampling = { temperature: 0, max_tokens: Number(maxTokens), structured_outputs };
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
