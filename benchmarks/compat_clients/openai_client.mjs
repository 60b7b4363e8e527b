// OpenAI's client for Node: chat and responses, whole and streamed, and a round with a tool.
import assert from "node:assert";
import OpenAI from "openai";

const model = process.env.COMPAT_MODEL;
const client = new OpenAI({ baseURL: process.env.COMPAT_URL + "/v1", maxRetries: 0 });
const parameters = { type: "object", properties: { is_cold: { type: "boolean" } }, required: ["is_cold"], additionalProperties: false };

const messages = [{ role: "user", content: "Tell me about the sea." }];
const first = await client.chat.completions.create({ model, messages, max_completion_tokens: 24 });
messages.push(first.choices[0].message, { role: "user", content: "Go on." });
const stream = client.chat.completions.stream({ model, messages, max_completion_tokens: 24 });
assert((await stream.finalChatCompletion()).choices.length === 1);

const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const asked = [{ role: "user", content: "What is the weather?" }];
const called = await client.chat.completions.create({ model, messages: asked, tools, tool_choice: "required", max_tokens: 512 });
const [call] = called.choices[0].message.tool_calls;
asked.push(called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "rain" });
assert((await client.chat.completions.create({ model, messages: asked, tools, max_tokens: 24 })).choices.length === 1);

const input = [{ role: "user", content: "Tell me about the sea." }];
const answer = await client.responses.create({ model, input, max_output_tokens: 24, store: false });
input.push(...answer.output, { role: "user", content: "Go on." });
let last;
for await (const event of await client.responses.create({ model, input, max_output_tokens: 24, store: false, stream: true })) last = event;
assert(["response.completed", "response.incomplete"].includes(last.type));
