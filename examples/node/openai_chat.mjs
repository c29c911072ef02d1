// An answer by OpenAI's client for Node. Argument: the server's address.
import OpenAI from "openai";

const address = process.argv[2] ?? "http://127.0.0.1:8000";
const client = new OpenAI({
  baseURL: `${address}/v1`,
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});

const [model] = (await client.models.list()).data;
const stream = await client.chat.completions.create({
  model: model.id,
  messages: [
    { role: "system", content: "Answer in one short sentence." },
    { role: "user", content: "What is the capital of France?" },
  ],
  max_tokens: 48,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta.content ?? "");
  if (chunk.usage) console.log(`\n${chunk.usage.completion_tokens} tokens`);
}
