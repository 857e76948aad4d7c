// A client of the encoder service: retries, deadlines, a token, and rows as Float32Array.

import { createHash } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { create } from "@bufbuild/protobuf";
import { anyUnpack, type Duration } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient, type Client, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { Status } from "./gen/google/rpc/status_pb.js";
import {
  DataType,
  EncodeRequestSchema,
  EncoderService,
  type EmbeddingChunk,
  type EncodeResponse,
  type GetModelResponse,
  type Item,
  type ItemReport,
} from "./gen/vitwire/v1/encoder_pb.js";

/** Rows of one item, in row-major order. */
export interface Embedding {
  readonly shape: readonly [rows: number, columns: number];
  readonly rows: Float32Array;
  readonly report: ItemReport;
}

export interface Options {
  /** Bearer token, sent with every request. */
  readonly token?: string | undefined;
  /** PEM file of root certificates for https:// URLs; by default those of Node. */
  readonly ca?: Buffer | undefined;
  /** Milliseconds for a whole call, including retries. */
  readonly timeoutMs?: number;
}

const FIRST_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 400;

/** The items that the server did not encode because it is full, and when to send them again. */
class Full extends Error {
  constructor(
    message: string,
    readonly retryMs: number,
  ) {
    super(message);
  }
}

export class VitwireClient {
  private readonly client: Client<typeof EncoderService>;
  private readonly timeoutMs: number;

  /** `baseUrl` is http://host:port, or https://host:port for TLS. */
  constructor(baseUrl: string, options: Options = {}) {
    const authorize: Interceptor = (next) => (request) => {
      if (options.token) request.header.set("authorization", `Bearer ${options.token}`);
      return next(request);
    };
    const nodeOptions = options.ca ? { ca: options.ca } : {};
    this.client = createClient(EncoderService, createGrpcTransport({ baseUrl, nodeOptions, interceptors: [authorize] }));
    this.timeoutMs = options.timeoutMs ?? 60_000;
  }

  async model(): Promise<GetModelResponse> {
    return this.client.getModel({}, { timeoutMs: this.timeoutMs });
  }

  /** The embeddings of all items, in order. Items that a full server refused are sent again when it says so. */
  async encode(items: readonly Item[]): Promise<Embedding[]> {
    const deadline = Date.now() + this.timeoutMs;
    const done = new Map<number, Embedding>();
    for (let backoff = FIRST_BACKOFF_MS; ; backoff = Math.min(2 * backoff, MAX_BACKOFF_MS)) {
      const pending = items.map((_, index) => index).filter((index) => !done.has(index));
      try {
        await this.attempt(items, pending, done, deadline);
        return items.map((_, index) => done.get(index)!);
      } catch (error) {
        const delay = retryDelay(error, backoff);
        if (delay === undefined || Date.now() + delay >= deadline) throw error;
        console.error(`retrying in ${Math.round(delay)} ms: ${(error as Error).message}`);
        await sleep(delay);
      }
    }
  }

  /** One RPC: adds embeddings to `done`, by index in `items`. Throws Full if items remain. */
  private async attempt(
    items: readonly Item[],
    pending: readonly number[],
    done: Map<number, Embedding>,
    deadline: number,
  ): Promise<void> {
    const sent = pending.map((index) => items[index]!);
    const request = create(EncodeRequestSchema, { items: sent, outputType: DataType.FLOAT32 });
    const assembling = new Map<number, Float32Array>();
    const full: Full[] = [];
    const options = { timeoutMs: Math.max(1, deadline - Date.now()), headers: hint(sent) };
    for await (const response of this.client.encode(request, options)) {
      const index = pending[response.item];
      if (index === undefined) throw new ConnectError(`item ${response.item} was not requested`, Code.Internal);
      if (response.result.case === "error") {
        full.push(refused(index, response.result.value));
      } else if (response.result.case === "chunk") {
        const embedding = added(assembling, index, response.result.value, response);
        if (embedding) done.set(index, embedding);
      }
    }
    if (full.length) throw new Full(full[0]!.message, Math.max(...full.map((each) => each.retryMs)));
    if (pending.some((index) => !done.has(index))) throw new ConnectError("items are missing", Code.Internal);
  }
}

/** Copies a chunk into the rows of its item; returns the embedding with the last one. */
function added(
  assembling: Map<number, Float32Array>,
  index: number,
  chunk: EmbeddingChunk,
  response: EncodeResponse,
): Embedding | undefined {
  const [rows, columns] = chunk.shape.map(Number);
  if (rows === undefined || columns === undefined || chunk.dataType !== DataType.FLOAT32) {
    throw new ConnectError(`item ${index}: expected rows of float32`, Code.Internal);
  }
  const values = assembling.get(index) ?? new Float32Array(rows * columns);
  assembling.set(index, values);
  new Uint8Array(values.buffer).set(chunk.data, Number(chunk.row) * columns * Float32Array.BYTES_PER_ELEMENT);
  if (!chunk.last) return undefined;
  return { shape: [rows, columns], rows: values, report: response.report! };
}

/** A refused item as an error to retry; throws what a retry does not help against. */
function refused(index: number, status: Status): Full {
  for (const detail of status.details) {
    const info = anyUnpack(detail, RetryInfoSchema);
    if (info?.retryDelay) return new Full(`item ${index}: ${status.message}`, milliseconds(info.retryDelay));
  }
  throw new ConnectError(`item ${index}: ${status.message}`, status.code);
}

/** Milliseconds until a retry; undefined if it would not help. */
function retryDelay(error: unknown, backoff: number): number | undefined {
  if (error instanceof Full) return error.retryMs;
  if (!(error instanceof ConnectError)) return undefined;
  if (error.code === Code.Unavailable) return backoff * (0.8 + 0.4 * Math.random());
  if (error.code !== Code.ResourceExhausted) return undefined;
  const [info] = error.findDetails(RetryInfoSchema);
  return info?.retryDelay ? milliseconds(info.retryDelay) : undefined;
}

function milliseconds(duration: Duration): number {
  return Number(duration.seconds) * 1000 + duration.nanos / 1e6;
}

/** The header on which a proxy can hash, so that equal content reaches the replica that has it cached. */
function hint(items: readonly Item[]): Record<string, string> {
  const contentId = items.find((item) => item.contentId)?.contentId;
  if (!contentId) return {};
  return { "x-vitwire-content-id": createHash("sha256").update(contentId).digest("hex").slice(0, 32) };
}
