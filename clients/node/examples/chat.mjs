/**
 * Ask an engine's model one question; everything that it takes comes from the engine:
 *
 *     node chat.mjs ENDPOINT QUESTION [--system TEXT] [--temperature T] [--max-tokens N] [--stop TEXT]...
 */
import { parseArgs } from "node:util";
import { Engine } from "nanocore-client";
import { IncrementalText, StopStrings } from "./text.mjs";
import { Tokenizer } from "./tokenizer.mjs";

const text = { type: "string" };
const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    system: text,
    temperature: text,
    "max-tokens": text,
    stop: { ...text, multiple: true, default: [] },
  },
});
const [endpoint, question] = positionals;

const engine = await Engine.connect(endpoint);
try {
  const tokenizer = await Tokenizer.load(engine);
  const system = values.system === undefined ? [] : [{ role: "system", content: values.system }];
  const prompt = tokenizer.encodeChat([...system, { role: "user", content: question }]);
  const sampling = { ...engine.welcome.model.default_sampling }; // what the model's makers recommend
  if (values.temperature !== undefined) sampling.temperature = Number(values.temperature);
  if (values["max-tokens"] !== undefined) sampling.max_tokens = Number(values["max-tokens"]);

  const interrupt = new AbortController();
  process.once("SIGINT", () => interrupt.abort(new Error("interrupted")));
  const incremental = new IncrementalText((tokenIds) => tokenizer.decode(tokenIds), prompt);
  const stops = new StopStrings(values.stop);
  for await (const output of engine.generate(prompt, sampling, { signal: interrupt.signal })) {
    const { text, stop } = stops.push(incremental.push(output.token_ids));
    process.stdout.write(text);
    if (stop !== undefined) break; // which aborts the request
    if (output.finish_reason) process.stdout.write(stops.flush());
    if (output.finish_reason === "error") throw new Error(output.message);
  }
  process.stdout.write("\n");
} finally {
  await engine.close();
}
