// An answer over gRPC, from the .proto alone. Arguments: the server's address, the .proto file.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const address = process.argv[2] ?? "127.0.0.1:50051";
const proto =
  process.argv[3] ??
  fileURLToPath(new URL("../../proto/ortolan/v1/ortolan.proto", import.meta.url));

const { ortolan } = grpc.loadPackageDefinition(
  loader.loadSync(proto, { keepCase: true, longs: Number, defaults: true }),
);
const client = new ortolan.v1.InferenceService(address, grpc.credentials.createInsecure());

const call = client.Chat(
  {
    messages: [
      { role: "system", content: "Answer in one short sentence." },
      { role: "user", content: "What is the capital of France?" },
    ],
    sampling: { max_tokens: 48, temperature: 0 },
  },
  { deadline: Date.now() + 60_000 }, // the request's: then the server stops computing
);
for await (const response of call) {
  process.stdout.write(response.text);
  if (response.usage) console.log(`\n${response.usage.completion_tokens} tokens`);
}
client.close();
