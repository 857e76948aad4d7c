// Encodes photographs, or without any a random picture:
//   node dist/encode.js --target http://localhost:50051 photo.jpg

import { createHash, randomBytes } from "node:crypto";
import { readFile } from "node:fs/promises";
import { parseArgs } from "node:util";
import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { VitwireClient } from "./client.js";
import {
  DataType,
  ItemSchema,
  Modality,
  Path,
  type GetModelResponse,
  type Item,
} from "./gen/vitwire/v1/encoder_pb.js";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    target: { type: "string", default: "http://localhost:50051" },
    token: { type: "string", default: process.env["VITWIRE_TOKEN"] ?? "" },
    ca: { type: "string", default: "" },
    timeout: { type: "string", default: "60" },
  },
});

/** The bytes of a JPEG, PNG, WebP, GIF or BMP file; the server decodes and prepares it. */
async function photo(path: string): Promise<Item> {
  const encoded = await readFile(path);
  const contentId = createHash("sha256").update(encoded).digest("hex");
  return create(ItemSchema, { modality: Modality.IMAGE, encoded, contentId });
}

/** A random picture of 8 x 8 tokens as uint8 patches, before normalisation and without the frame axis. */
function noise(model: GetModelResponse): Item {
  const side = 8 * model.mergeSize;
  const columns = model.channels * model.patchSize * model.patchSize;
  const data = randomBytes(side * side * columns);
  return create(ItemSchema, {
    modality: Modality.IMAGE,
    grid: { t: 1, h: side, w: side },
    pixels: { dataType: DataType.UINT8, shape: [BigInt(side * side), BigInt(columns)], data },
  });
}

async function main(): Promise<void> {
  const ca = values.ca ? await readFile(values.ca) : undefined;
  const timeoutMs = Number(values.timeout) * 1000;
  const client = new VitwireClient(values.target, { token: values.token || undefined, ca, timeoutMs });
  const model = await client.model();
  console.log(`${model.modelId} (${model.modelType}), width ${model.embeddingWidth}`);
  const items = positionals.length ? await Promise.all(positionals.map(photo)) : [noise(model)];
  for (const [index, { shape, rows, report }] of (await client.encode(items)).entries()) {
    const first = Array.from(rows.subarray(0, 4), (value) => value.toFixed(4)).join(" ");
    const name = positionals[index] ?? "noise";
    console.log(`${name}: ${shape[0]} x ${shape[1]}, path ${Path[report.path]}, tokens ${report.tokens}, [${first} ...]`);
  }
}

try {
  await main();
} catch (error) {
  if (!(error instanceof ConnectError)) throw error;
  console.error(`${Code[error.code]}: ${error.rawMessage}`);
  process.exitCode = 1;
}
