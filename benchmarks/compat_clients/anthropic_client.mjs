// Anthropic's client for Node: two turns, the second one streamed, and a round with a tool.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const model = process.env.COMPAT_MODEL;
const client = new Anthropic({ baseURL: process.env.COMPAT_URL, maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me about the sea." }];
const first = await client.messages.create({ model, messages, max_tokens: 24 });
messages.push({ role: "assistant", content: first.content }, { role: "user", content: "Go on." });
assert((await client.messages.stream({ model, messages, max_tokens: 24 }).finalMessage()).stop_reason);

const input_schema = { type: "object", properties: { is_cold: { type: "boolean" } }, required: ["is_cold"], additionalProperties: false };
const tools = [{ name: "get_weather", input_schema }];
const asked = [{ role: "user", content: "What is the weather?" }];
const answer = await client.messages.create({ model, messages: asked, tools, tool_choice: { type: "any" }, max_tokens: 512 });
const call = answer.content.find((block) => block.type === "tool_use");
asked.push({ role: "assistant", content: answer.content });
asked.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "rain" }] });
assert((await client.messages.create({ model, messages: asked, tools, max_tokens: 24 })).stop_reason);
