// clients.mjs URL PARROT_URL: the packages `openai` and `@anthropic-ai/sdk` drive the server. URL serves the model of examples/, PARROT_URL
// one that thinks, speaks and calls a tool. Prints a line per check that fails; the last line has the counts.
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";

const [url, parrotUrl] = process.argv.slice(2);
let passed = 0, failed = 0;
const check = (ok, text) => { if (ok) passed++; else { failed++; console.log("FAIL " + text); } };
const openai = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const parrot = new OpenAI({ baseURL: parrotUrl + "/v1", apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const claude = new Anthropic({ baseURL: parrotUrl, apiKey: "none", maxRetries: 0 });
const ask = [{ role: "user", content: "Where is Romeo?" }];
const model = (await openai.models.list()).data[0].id;
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

async function run(name, body) {
  try { await body(); } catch (e) { check(false, name + ": " + (e.stack || e)); }
}
await run("chat", async () => {
  const r = await openai.chat.completions.create({ model, messages: ask, max_tokens: 12, temperature: 0 });
  const text = r.choices[0].message.content;
  check(text.length > 5 && r.usage.completion_tokens === 12, "chat: " + JSON.stringify(r));
  let streamed = "", usage;
  for await (const e of await openai.chat.completions.create({ model, messages: ask, max_tokens: 12, temperature: 0, stream: true, stream_options: { include_usage: true } })) {
    streamed += e.choices[0]?.delta?.content ?? "";
    usage = e.usage ?? usage;
  }
  check(streamed === text && usage.completion_tokens === 12, "chat, stream: " + streamed);
  const final = await openai.chat.completions.stream({ model, messages: ask, max_tokens: 12, temperature: 0 }).finalContent();
  check(final === text, "chat, the stream helper: " + final);
});
await run("error", async () => {
  try {
    await openai.chat.completions.create({ model, messages: [{ role: "user", content: 7 }] });
    check(false, "no error");
  } catch (e) { check(e instanceof OpenAI.BadRequestError && e.param === "messages[0].content", "error: " + e); }
});
await run("abort", async () => {
  const stream = await openai.chat.completions.create({ model, messages: ask, max_tokens: 400, stream: true });
  for await (const e of stream) { if (e.choices.length) break; }
  check((await openai.models.list()).data.length === 1, "after an aborted stream");
});
await run("JSON schema", async () => {
  const schema = { type: "object", properties: { who: { enum: ["Romeo", "Juliet"] }, ok: { type: "boolean" } }, required: ["who", "ok"], additionalProperties: false };
  const r = await openai.chat.completions.create({ model, messages: ask, max_tokens: 300, response_format: { type: "json_schema", json_schema: { name: "x", strict: true, schema } } });
  const x = JSON.parse(r.choices[0].message.content);
  check(["Romeo", "Juliet"].includes(x.who) && typeof x.ok === "boolean", "schema: " + r.choices[0].message.content);
});
await run("completions", async () => {
  const r = await openai.completions.create({ model, prompt: "ROMEO:", max_tokens: 8, temperature: 0, logprobs: 2 });
  check(r.choices[0].logprobs.tokens.length === 8, "completions: " + JSON.stringify(r));
});
await run("embeddings", async () => {
  const r = await openai.embeddings.create({ model, input: ["one", "two"] });
  const sum = r.data[1].embedding.reduce((a, x) => a + x * x, 0);
  check(r.data.length === 2 && Math.abs(sum - 1) < 1e-3, "embeddings: " + sum);
});
await run("tools", async () => {
  const messages = [{ role: "user", content: "Does it rain?" }], tools = [{ type: "function", function: { name: "rain", parameters } }];
  const r = await parrot.chat.completions.create({ model, messages, tools });
  const m = r.choices[0].message;
  check(r.choices[0].finish_reason === "tool_calls" && JSON.parse(m.tool_calls[0].function.arguments).city === "Ulm", "tools: " + JSON.stringify(m));
  const streamed = await parrot.chat.completions.stream({ model, messages, tools }).finalChatCompletion();
  check(streamed.choices[0].message.tool_calls[0].function.name === "rain", "tools, stream");
  messages.push(m, { role: "tool", tool_call_id: m.tool_calls[0].id, content: "yes" });
  check((await parrot.chat.completions.create({ model, messages, tools })).choices[0].message.content === "It rains.", "tools, the result");
});
await run("responses", async () => {
  const r = await openai.responses.create({ model, input: "Where is Romeo?", max_output_tokens: 12, temperature: 0 });
  check(r.output_text.length > 5, "responses: " + JSON.stringify(r));
  let text = "", last;
  for await (const e of await openai.responses.create({ model, input: "Where is Romeo?", max_output_tokens: 12, temperature: 0, stream: true })) {
    if (e.type === "response.output_text.delta") text += e.delta;
    last = e;
  }
  check(text === r.output_text && last.type === "response.incomplete", "responses, stream: " + text);
  const input = [{ role: "user", content: "Does it rain?" }], tools = [{ type: "function", name: "rain", parameters, strict: false }];
  const call = await parrot.responses.create({ model, input, tools });
  const f = call.output.find(o => o.type === "function_call");
  check(f && JSON.parse(f.arguments).city === "Ulm", "responses, tools: " + JSON.stringify(call.output));
  const final = await parrot.responses.stream({ model, input, tools }).finalResponse();
  check(final.output.length === 3 && final.status === "completed", "responses, tools, stream");
  const answer = await parrot.responses.create({ model, input: [...input, ...call.output, { type: "function_call_output", call_id: f.call_id, output: "yes" }], tools });
  check(answer.output_text === "It rains.", "responses, the result: " + answer.output_text);
});
await run("messages", async () => {
  const r = await anthropic.messages.create({ model, max_tokens: 12, temperature: 0, messages: ask });
  check(r.content[0].text.length > 5 && r.stop_reason === "max_tokens" && r.usage.output_tokens === 12, "messages: " + JSON.stringify(r));
  const streamed = await anthropic.messages.stream({ model, max_tokens: 12, temperature: 0, messages: ask }).finalMessage();
  check(streamed.content[0].text === r.content[0].text && streamed.usage.output_tokens === 12, "messages, stream: " + JSON.stringify(streamed));
  const messages = [{ role: "user", content: "Does it rain?" }], tools = [{ name: "rain", input_schema: parameters }];
  const call = await claude.messages.stream({ model, max_tokens: 50, messages, tools }).finalMessage();
  const use = call.content.find(b => b.type === "tool_use");
  check(call.stop_reason === "tool_use" && use.input.city === "Ulm" && call.content[0].type === "thinking", "messages, tools: " + JSON.stringify(call));
  messages.push({ role: "assistant", content: call.content }, { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "yes" }] });
  check((await claude.messages.create({ model, max_tokens: 50, messages, tools })).content[0].text === "It rains.", "messages, the result");
  try {
    await anthropic.messages.create({ model, messages: ask });
    check(false, "no error");
  } catch (e) { check(e instanceof Anthropic.BadRequestError && e.error.error.type === "invalid_request_error", "messages, error: " + e); }
  check((await anthropic.messages.countTokens({ model, messages: ask })).input_tokens > 3, "count_tokens");
});
console.log(`clients: ${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
