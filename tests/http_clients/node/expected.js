// What all scripts ask the demo model, and what it answers when it is greedy.
import assert from 'node:assert/strict';

export const url = process.argv[2];
export const baseURL = `${url}/v1`;
export const model = 'demo';
export const question = 'What is 123 + 456?';
export const answer = '123 + 456 = 579';
export const messages = [{ role: 'user', content: question }];
export const schema = {
  type: 'object',
  properties: { sum: { type: 'integer' } },
  required: ['sum'],
  additionalProperties: false,
};

/** All that an async iterable gives. */
export async function all(iterable) {
  const found = [];
  for await (const one of iterable) found.push(one);
  return found;
}

export { assert };
