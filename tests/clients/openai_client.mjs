// The official Node client of OpenAI's API against `flow serve`: ADDRESS KEY RECORDING. As openai_client.py, but for live
// sessions: this client opens them over TLS alone.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [address, key, path] = process.argv.slice(2);
// The package lies in the folder in which this is run.
const require = createRequire(pathToFileURL(join(process.cwd(), "package.json")));
const { OpenAI, toFile } = require("openai");
const recording = readFileSync(path);
console.log("openai", require("openai/version").VERSION);

const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: key, maxRetries: 0 });

async function transcribe(fields = {}, { by = client, bytes = recording } = {}) {
  const file = await toFile(bytes, "talk.wav");
  return by.audio.transcriptions.create({ model: "small", file, ...fields });
}

async function all(stream) {
  const events = [];
  for await (const event of stream) {
    events.push(event);
  }
  return events;
}

async function refused(kind, status, call) {
  const error = await call.then(
    () => assert.fail(`${kind.name} is not thrown`),
    (error) => error,
  );
  assert.ok(error instanceof kind, error);
  assert.equal(error.status, status);
  assert.ok(error.requestID);
  return error;
}

const models = await client.models.list();
assert.deepEqual(models.data.map((model) => model.id), ["small"]);

const plain = (await transcribe()).text;
assert.ok(plain.split(" ").length >= 3, plain);
assert.equal(await transcribe({ response_format: "text" }), `${plain}\n`);
assert.match(await transcribe({ response_format: "srt" }), /^1\n00:00:0.* --> /);
assert.match(await transcribe({ response_format: "vtt" }), /^WEBVTT\n\n/);
const verbose = await transcribe({ response_format: "verbose_json", timestamp_granularities: ["word", "segment"] });
assert.equal(verbose.words.map((word) => word.word.trim()).join(" "), plain);
assert.equal(verbose.segments.map((segment) => segment.text.trim()).join(" "), plain);
const diarized = await transcribe({ response_format: "diarized_json", chunking_strategy: "auto" });
assert.ok(diarized.segments.length > 0 && diarized.segments.every((segment) => segment.speaker));
console.log("forms: as expected");

const events = await all(await transcribe({ stream: true }));
const done = events.pop();
assert.equal(done.type, "transcript.text.done");
assert.equal(done.text, plain);
assert.equal(events.map((event) => event.delta).join(""), plain);
console.log("streams: as expected");

const scored = await transcribe({ include: ["logprobs"] });
assert.equal(scored.logprobs.map((token) => token.token).join(""), plain);
assert.equal(Buffer.from(scored.logprobs.flatMap((token) => token.bytes)).toString(), plain);
assert.ok(scored.logprobs.every((token) => token.logprob <= 0));
const scoredEvents = await all(await transcribe({ include: ["logprobs"], stream: true }));
assert.deepEqual(scoredEvents.flatMap((event) => (event.type === "transcript.text.delta" ? event.logprobs : [])), scoredEvents.at(-1).logprobs);
console.log("log probabilities: as expected");

const wrongKey = client.withOptions({ apiKey: "sk-wrong" });
const noKey = await refused(OpenAI.AuthenticationError, 401, transcribe({}, { by: wrongKey }));
assert.equal(noKey.code, "invalid_api_key");
const unknown = await refused(OpenAI.NotFoundError, 404, transcribe({ model: "whisper-1" }));
assert.deepEqual([unknown.code, unknown.param], ["model_not_found", "model"]);
const large = Buffer.concat([recording, Buffer.alloc(2 << 20)]);
const tooLarge = await refused(OpenAI.APIError, 413, transcribe({}, { bytes: large }));
assert.equal(tooLarge.code, "request_too_large");
const broken = await refused(OpenAI.BadRequestError, 400, transcribe({}, { bytes: Buffer.from("no recording") }));
assert.equal(broken.param, "file");
console.log("errors: as expected");
