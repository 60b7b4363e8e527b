// Vercel's AI SDK: text, a stream, and a round with a tool.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "diptych", baseURL: process.env.COMPAT_URL + "/v1", apiKey: process.env.OPENAI_API_KEY, includeUsage: true,
});
const model = provider(process.env.COMPAT_MODEL);
const limits = { maxOutputTokens: 512, maxRetries: 0 };
const first = await generateText({ model, prompt: "Tell me about the sea.", ...limits });
const history = [{ role: "user", content: "Hello." }, ...first.response.messages, { role: "user", content: "Go on." }];
let length = 0;
for await (const piece of streamText({ model, messages: history, ...limits }).textStream) length += piece.length;
assert(length > 0);
const weather = tool({
  description: "The weather.", inputSchema: z.object({ cold: z.boolean() }), execute: async () => "rain",
});
const called = await generateText({ model, tools: { weather }, toolChoice: "required", prompt: "What is the weather?", ...limits });
assert(called.toolCalls.length > 0);
