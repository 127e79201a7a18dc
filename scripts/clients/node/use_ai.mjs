// Vercel's AI SDK: its providers for responses (the default), for chat, for servers like OpenAI's, and for Anthropic's.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { Colour, Place, WeatherTool, key, maxTokens, model, question, require, requireText, tryAll, url } from "./shared.mjs";

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const compatible = createOpenAICompatible({ name: "apex", baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: key });
const providers = {
  "responses": openai(model),
  "chat": openai.chat(model),
  "a server like OpenAI's": compatible(model),
  "Anthropic's messages": anthropic(model),
};

// The first step must call the tool, the second must not.
function loopOf(weather) {
  return {
    prompt: question, maxOutputTokens: maxTokens, maxRetries: 0, stopWhen: stepCountIs(2),
    tools: { weather: tool({ description: "The weather of a place", inputSchema: Place, execute: weather.call }) },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  };
}

const checks = {};
for (const [name, provider] of Object.entries(providers)) {
  checks[`${name}, an answer, streamed`] = async () => {
    const errors = [];
    const result = streamText({
      model: provider, prompt: question, maxOutputTokens: maxTokens, maxRetries: 0,
      onError: ({ error }) => errors.push(error),
    });
    let text = "";
    for await (const part of result.textStream) text += part;
    if (errors.length) throw errors[0];
    requireText(text);
  };
  checks[`${name}, \`Output.object\``] = async () => {
    const output = Output.object({ schema: Colour });
    Colour.parse((await generateText({ model: provider, prompt: question, maxRetries: 0, output })).output);
  };
  checks[`${name}, a loop with a tool`] = async () => {
    const weather = new WeatherTool();
    const { text, steps } = await generateText({ model: provider, ...loopOf(weather) });
    require(weather.cities.length && steps.length === 2, steps.map((step) => step.content));
    requireText(text);
  };
}

await tryAll("ai", checks);
