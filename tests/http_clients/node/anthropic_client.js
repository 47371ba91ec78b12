// @anthropic-ai/sdk: messages whole and streamed, tools, count_tokens, errors.
import Anthropic from '@anthropic-ai/sdk';
import { all, answer, assert, messages, model, schema, url } from './expected.js';

const client = new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0 });
const greedy = { model, max_tokens: 64, temperature: 0 };
const oneCall = {
  tools: [{ name: 'save_sum', input_schema: schema }],
  tool_choice: { type: 'tool', name: 'save_sum', disable_parallel_tool_use: true },
};

const whole = await client.messages.create({ messages, ...greedy });
assert.equal(whole.content[0].text, answer);
assert.equal(whole.stop_reason, 'end_turn');
const events = await all(await client.messages.create({ messages, stream: true, ...greedy }));
assert.equal(events[0].type, 'message_start');
assert.equal(events.at(-1).type, 'message_stop');
assert.equal(await client.messages.stream({ messages, ...greedy }).finalText(), answer);
const called = await client.messages.create({ messages, ...oneCall, ...greedy });
assert.equal(called.content[0].type, 'tool_use');
assert.deepEqual(called.content[0].input, { sum: 579 });
const streamed = await client.messages.stream({ messages, ...oneCall, ...greedy }).finalMessage();
assert.deepEqual(streamed.content[0].input, { sum: 579 });
const counted = await client.messages.countTokens({ messages, model });
const { input_tokens: fresh, cache_read_input_tokens: cached } = whole.usage;
assert.equal(counted.input_tokens, fresh + (cached ?? 0));
const models = await all(client.models.list());
assert.deepEqual(models.map((one) => one.id), [model]);
const other = client.messages.create({ messages, ...greedy, model: 'other' });
await assert.rejects(other, Anthropic.NotFoundError);
