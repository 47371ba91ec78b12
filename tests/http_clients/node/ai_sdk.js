// The AI SDK: OpenAI's provider on both its APIs, and the provider of compatible servers.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { embed, generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { all, answer, assert, baseURL, model, question as prompt } from './expected.js';

const openai = createOpenAI({ baseURL, apiKey: 'none' });
const compatible = createOpenAICompatible({
  name: 'nanocore',
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const Sum = z.object({ sum: z.number().int() });
const common = { prompt, temperature: 0, maxRetries: 0, maxOutputTokens: 64 };
const providerOptions = {
  openai: { parallelToolCalls: false },
  nanocore: { parallel_tool_calls: false },
};

for (const one of [openai(model), openai.chat(model), compatible(model)]) {
  const asked = { model: one, ...common };
  const whole = await generateText(asked);
  assert.equal(whole.text, answer);
  assert.equal(whole.finishReason, 'stop');
  assert.ok(whole.usage.outputTokens > 3);
  const stream = streamText(asked);
  assert.equal((await all(stream.textStream)).join(''), answer);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  const saved = [];
  const execute = ({ sum }) => saved.push(sum);
  const tools = { save_sum: tool({ inputSchema: Sum, execute }) };
  const forced = { tools, toolChoice: { type: 'tool', toolName: 'save_sum' }, providerOptions };
  await generateText({ ...asked, ...forced });
  assert.deepEqual(saved, [579]);
  const streamed = streamText({ ...asked, ...forced });
  await streamed.consumeStream();
  assert.deepEqual((await streamed.toolCalls).map((call) => call.input), [{ sum: 579 }]);
  const first = ({ stepNumber }) => (stepNumber ? { toolChoice: 'none' } : {});
  const loop = { ...forced, stopWhen: stepCountIs(2), prepareStep: first };
  assert.equal((await generateText({ ...asked, ...loop })).steps.length, 2);
  const object = await generateText({ ...asked, output: Output.object({ schema: Sum }) });
  assert.deepEqual(object.output, { sum: 579 });
  const partial = streamText({ ...asked, output: Output.object({ schema: Sum }) });
  assert.deepEqual((await all(partial.partialOutputStream)).at(-1), { sum: 579 });
}

const vector = await embed({ model: openai.textEmbeddingModel(model), value: 'red apple' });
assert.ok(vector.embedding.every(Number.isFinite));
