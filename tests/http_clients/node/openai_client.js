// openai: every call shape of chats, completions, responses, embeddings and models.
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import { all, answer, assert, baseURL, messages, model, question, schema } from './expected.js';

const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const greedy = { model, temperature: 0 };
const Sum = z.object({ sum: z.number().int() });
const tool = { type: 'function', function: { name: 'save_sum', parameters: schema } };
const named = { type: 'function', function: { name: 'save_sum' } };
const oneCall = { tools: [tool], tool_choice: named, parallel_tool_calls: false };

async function chats() {
  const chat = client.chat.completions;
  const whole = await chat.create({ messages, ...greedy });
  assert.equal(whole.choices[0].message.content, answer);
  assert.equal(whole.choices[0].finish_reason, 'stop');
  const usage = { stream: true, stream_options: { include_usage: true } };
  const chunks = await all(await chat.create({ messages, ...greedy, ...usage }));
  const last = chunks.pop();
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? '').join(''), answer);
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
  const helper = chat.stream({ messages, ...greedy });
  assert.equal(await helper.finalContent(), answer);
  const format = { response_format: zodResponseFormat(Sum, 'sum') };
  const parsed = await chat.parse({ messages, ...greedy, ...format });
  assert.deepEqual(parsed.choices[0].message.parsed, { sum: 579 });
  const called = await chat.create({ messages, ...greedy, ...oneCall });
  const [call] = called.choices[0].message.tool_calls;
  assert.deepEqual(JSON.parse(call.function.arguments), { sum: 579 });
  const told = [called.choices[0].message, { role: 'tool', tool_call_id: call.id, content: 'ok' }];
  const after = await chat.create({ messages: [...messages, ...told, ...messages], ...greedy });
  assert.ok(after.choices[0].message.content);
  const streamed = await chat.stream({ messages, ...greedy, ...oneCall }).finalMessage();
  assert.deepEqual(JSON.parse(streamed.tool_calls[0].function.arguments), { sum: 579 });
  const several = await chat.create({ messages, ...greedy, n: 2, logprobs: true, top_logprobs: 2 });
  assert.equal(several.choices.length, 2);
  assert.equal(several.choices[1].logprobs.content[0].top_logprobs.length, 2);
  const hot = { messages, model, temperature: 2, seed: 7, max_tokens: 40, ignore_eos: true };
  const [one, same] = [await chat.create(hot), await chat.create(hot)];
  assert.equal(one.choices[0].message.content, same.choices[0].message.content);
}

async function completions() {
  const prompt = `<|im_start|>user\n${question}<|im_end|>\n<|im_start|>assistant\n`;
  const asked = { prompt, max_tokens: 30, ...greedy };
  assert.equal((await client.completions.create(asked)).choices[0].text, answer);
  const chunks = await all(await client.completions.create({ ...asked, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(''), answer);
}

async function responses() {
  const input = question;
  const whole = await client.responses.create({ input, ...greedy });
  assert.equal(whole.output_text, answer);
  assert.equal((await client.responses.retrieve(whole.id)).output_text, answer);
  await client.responses.delete(whole.id);
  const stream = await client.responses.create({ input, stream: true, store: false, ...greedy });
  const events = await all(stream);
  assert.equal(events[0].type, 'response.created');
  assert.equal(events.at(-1).type, 'response.completed');
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  const helper = client.responses.stream({ input, ...greedy });
  assert.equal((await helper.finalResponse()).output_text, answer);
  const text = { format: zodTextFormat(Sum, 'sum') };
  const parsed = await client.responses.parse({ input, text, ...greedy });
  assert.deepEqual(parsed.output_parsed, { sum: 579 });
  const tools = [{ type: 'function', name: 'save_sum', parameters: schema, strict: true }];
  const forced = { tools, tool_choice: { type: 'function', name: 'save_sum' } };
  const one = { parallel_tool_calls: false };
  const called = await client.responses.create({ input, ...forced, ...one, ...greedy });
  assert.equal(called.output[0].type, 'function_call');
  assert.deepEqual(JSON.parse(called.output[0].arguments), { sum: 579 });
}

async function others() {
  const models = await all(client.models.list());
  assert.deepEqual(models.map((one) => one.id), [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
  const vectors = await client.embeddings.create({ model, input: ['red', 'green'] });
  assert.equal(vectors.data[0].embedding.length, vectors.data[1].embedding.length);
  assert.ok(vectors.data[0].embedding.every(Number.isFinite));
  const long = [{ role: 'user', content: 'red '.repeat(4000) }];
  await assert.rejects(client.chat.completions.create({ messages: long, ...greedy }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, 'context_length_exceeded');
    return true;
  });
  const other = client.chat.completions.create({ messages, model: 'other' });
  await assert.rejects(other, OpenAI.NotFoundError);
  const left = client.chat.completions.stream({ messages, ...greedy, ignore_eos: true });
  for await (const _ of left) break;
  assert.ok(left.aborted || left.controller.signal.aborted);
}

for (const part of [chats, completions, responses, others]) await part();
