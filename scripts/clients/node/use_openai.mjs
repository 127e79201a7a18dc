// OpenAI's client for Node.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { Colour, Place, WeatherTool, key, maxTokens, model, question, require, requireText, tryAll, url } from "./shared.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: question }];

await tryAll("openai", {
  "chat, streamed": async () => {
    let text = "";
    const chunks = await client.chat.completions.create({ model, messages, max_tokens: maxTokens, stream: true });
    for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? "";
    requireText(text);
  },
  "chat, `parse`": async () => {
    const answer = await client.chat.completions.parse({
      model, messages, response_format: zodResponseFormat(Colour, "colour"),
    });
    Colour.parse(answer.choices[0].message.parsed);
  },
  "chat, a loop with a tool": async () => {
    const weather = new WeatherTool();
    const tools = [zodFunction({ name: "weather", parameters: Place })];
    const asked = await client.chat.completions.parse({ model, messages, tools, tool_choice: "required" });
    const { message } = asked.choices[0];
    const results = message.tool_calls.map((call) => ({
      role: "tool", tool_call_id: call.id, content: weather.call(call.function.parsed_arguments),
    }));
    const answer = await client.chat.completions.create({
      model, tools, tool_choice: "none", max_tokens: maxTokens, messages: [...messages, message, ...results],
    });
    require(weather.cities.length, message);
    requireText(answer.choices[0].message.content);
  },
  "responses, streamed": async () => {
    const stream = client.responses.stream({ model, input: question, max_output_tokens: maxTokens });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    requireText(text);
  },
  "responses, `parse`": async () => {
    const answer = await client.responses.parse({
      model, input: question, text: { format: zodTextFormat(Colour, "colour") },
    });
    Colour.parse(answer.output_parsed);
  },
});
