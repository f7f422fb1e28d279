"use strict";

// Words below this confidence are underlined.
const UNSURE = 0.5;
const SPEAKER_COLOURS = 8;
// The longest line of subtitles: letters, and seconds.
const CUE_LETTERS = 84;
const CUE_SECONDS = 7;
// How long the server has to say the last words of a live session, in milliseconds.
const LAST_WORDS = 20000;
// More audio than this waits to be sent: the connection is too slow. Bytes: ten seconds at 48 kHz.
const MOST_UNSENT = 960000;

const byId = (id) => document.getElementById(id);

// ---- what a transcript is: segments {start, end, text, speaker, words}, words {word, start, end, confidence, speaker}

function cleanWord(word) {
  return { ...word, word: String(word.word ?? word.text ?? "").trim() };
}

// The server's answer in any of its JSON forms.
function readTranscript(body) {
  const words = (body.words ?? []).map(cleanWord);
  const given = body.segments ?? [];
  if (given.length === 0) {
    const text = body.text ?? "";
    const end = words.length > 0 ? words[words.length - 1].end : body.duration ?? 0;
    return text === "" && words.length === 0 ? [] : [{ start: words[0]?.start ?? 0, end, text, words }];
  }
  const segments = given.map((segment) => ({
    start: segment.start,
    end: segment.end,
    text: String(segment.text ?? "").trim(),
    speaker: segment.speaker,
    words: (segment.words ?? []).map(cleanWord),
  }));
  if (segments.every((segment) => segment.words.length === 0)) {
    // Words of the whole recording: each belongs to the last segment that has begun.
    let at = 0;
    for (const word of words) {
      const middle = (word.start + word.end) / 2;
      while (at + 1 < segments.length && middle >= segments[at + 1].start) {
        at += 1;
      }
      segments[at].words.push(word);
    }
  }
  for (const segment of segments) {
    segment.speaker = segment.speaker ?? segment.words.find((word) => word.speaker)?.speaker;
  }
  return segments;
}

function clock(seconds) {
  const whole = Math.floor(seconds);
  const two = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours > 0 ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function subtitleTime(seconds, point) {
  const all = Math.round(seconds * 1000);
  const pad = (number, digits) => String(number).padStart(digits, "0");
  const [hours, minutes] = [Math.floor(all / 3600000), Math.floor(all / 60000) % 60];
  return `${pad(hours, 2)}:${pad(minutes, 2)}:${pad(Math.floor(all / 1000) % 60, 2)}${point}${pad(all % 1000, 3)}`;
}

// Lines of subtitles: segments, of which long ones are cut between words.
function cues(segments) {
  const found = [];
  for (const segment of segments) {
    let cue = null;
    const parts = segment.words.length > 0 ? segment.words : [{ ...segment, word: segment.text }];
    for (const part of parts) {
      const isLong =
        cue !== null &&
        (cue.text.length + 1 + part.word.length > CUE_LETTERS || part.end - cue.start > CUE_SECONDS);
      if (cue === null || isLong) {
        cue = { start: part.start, end: part.end, text: part.word, speaker: segment.speaker };
        found.push(cue);
      } else {
        cue.text += " " + part.word;
        cue.end = Math.max(cue.end, part.end);
      }
    }
  }
  return found.filter((cue) => cue.text !== "");
}

const spoken = (cue) => (cue.speaker ? `[${cue.speaker}]: ${cue.text}` : cue.text);

function toSrt(segments) {
  return cues(segments)
    .map((cue, index) => `${index + 1}\n${subtitleTime(cue.start, ",")} --> ${subtitleTime(cue.end, ",")}\n${spoken(cue)}\n`)
    .join("\n");
}

function toVtt(segments) {
  const safe = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const lines = cues(segments).map(
    (cue) => `${subtitleTime(cue.start, ".")} --> ${subtitleTime(cue.end, ".")}\n${safe(spoken(cue))}\n`
  );
  return ["WEBVTT\n", ...lines].join("\n");
}

function toText(segments) {
  return segments.map((segment) => spoken(segment) + "\n").join("");
}

// ---- what is shown

// What is on the page: segments, words with their elements in order of time, and what "Save JSON" saves.
const shown = { segments: [], timed: [], speakers: [], json: null, name: "transcript", lit: null, frame: 0 };

function status(text) {
  byId("status").textContent = text;
}

function complain(text) {
  byId("error").textContent = text;
  byId("error").hidden = text === "";
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) {
    made.className = className;
  }
  if (text !== undefined) {
    made.textContent = text;
  }
  return made;
}

function clearTranscript(name) {
  byId("transcript").replaceChildren();
  byId("result").hidden = true;
  byId("player").pause();
  byId("player").hidden = true;
  Object.assign(shown, { segments: [], timed: [], speakers: [], json: null, name, lit: null });
  complain("");
}

// A segment's elements: when and who, and the paragraph of its words.
function segmentElement(segment) {
  const made = element("div", "segment");
  const head = element("div", "head");
  if (segment.start !== undefined) {
    const time = element("button", "", clock(segment.start));
    time.type = "button";
    time.title = "Play from here";
    time.addEventListener("click", () => playFrom(segment.start));
    head.append(time);
  }
  if (segment.speaker) {
    if (!shown.speakers.includes(segment.speaker)) {
      shown.speakers.push(segment.speaker);
    }
    made.classList.add(`speaker-${shown.speakers.indexOf(segment.speaker) % SPEAKER_COLOURS}`);
    head.append(element("span", "speaker", segment.speaker));
  }
  const text = element("p");
  text.dir = "auto";
  made.append(head, text);
  return [made, text];
}

function fillWords(paragraph, segment) {
  if (segment.words.length === 0) {
    const word = element("span", "word", segment.text);
    word.addEventListener("click", () => playFrom(segment.start));
    shown.timed.push({ start: segment.start, end: segment.end, element: word });
    paragraph.replaceChildren(word);
    return;
  }
  paragraph.replaceChildren();
  segment.words.forEach((word, index) => {
    const made = element("span", "word", word.word);
    if (typeof word.confidence === "number" && word.confidence < UNSURE) {
      made.classList.add("unsure");
      made.title = `confidence ${word.confidence.toFixed(2)}`;
    }
    made.addEventListener("click", () => playFrom(word.start));
    paragraph.append(index > 0 ? " " : "", made);
    shown.timed.push({ start: word.start, end: word.end, element: made });
  });
}

function showSegments(segments) {
  shown.segments = segments;
  for (const segment of segments) {
    const [made, text] = segmentElement(segment);
    fillWords(text, segment);
    byId("transcript").append(made);
  }
  shown.timed.sort((a, b) => a.start - b.start);
  byId("result").hidden = segments.length === 0;
}

function playFrom(seconds) {
  const player = byId("player");
  if (!player.hidden) {
    player.currentTime = seconds;
    player.play();
  }
}

// The number of the last word that begins at a time or before; -1 if none does.
function wordAt(timed, seconds) {
  let [low, high] = [0, timed.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (timed[middle].start <= seconds) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

function lightWord() {
  const player = byId("player");
  const index = wordAt(shown.timed, player.currentTime);
  const word = index >= 0 && player.currentTime < shown.timed[index].end + 0.3 ? shown.timed[index].element : null;
  if (word !== shown.lit) {
    shown.lit?.classList.remove("now");
    word?.classList.add("now");
    if (word && !player.paused) {
      word.scrollIntoView({ block: "nearest" });
    }
    shown.lit = word;
  }
  cancelAnimationFrame(shown.frame);
  if (!player.paused && !player.ended) {
    shown.frame = requestAnimationFrame(lightWord);
  }
}

function save(ending, type, text) {
  const link = element("a");
  const url = URL.createObjectURL(new Blob([text], { type }));
  link.href = url;
  link.download = `${shown.name}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// ---- the server

let key = "";

async function request(path, options) {
  const headers = key === "" ? {} : { Authorization: `Bearer ${key}` };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
    throw new Error(key === "" ? "The server asks for an API key." : "The server does not know this API key.");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    const why = body?.error?.message ?? `The server answers ${response.status}.`;
    const retry = response.headers.get("Retry-After");
    throw new Error(retry ? `${why} (Try again in ${retry} s.)` : why);
  }
  return response.json();
}

async function loadModels() {
  const models = (await request("/v1/models", {})).data ?? [];
  const chosen = byId("model").value;
  const options = models.map((model) => element("option", "", model.id));
  byId("model").replaceChildren(...options);
  if (models.some((model) => model.id === chosen)) {
    byId("model").value = chosen;
  }
  byId("model-choice").hidden = models.length < 2;
}

let running = null;

function setBusy(controller) {
  running = controller;
  byId("cancel").hidden = controller === null;
  byId("file").disabled = controller !== null;
  byId("speak").disabled = controller !== null;
}

async function transcribe(file) {
  clearTranscript(file.name.replace(/\.[^.]*$/, "") || "transcript");
  const form = new FormData();
  if (byId("model").value !== "") {
    form.append("model", byId("model").value);
  }
  form.append("response_format", "verbose_json");
  form.append("timestamp_granularities[]", "word");
  form.append("timestamp_granularities[]", "segment");
  if (byId("diarize").checked) {
    form.append("diarize", "true");
  }
  form.append("file", file, file.name);
  const controller = new AbortController();
  setBusy(controller);
  status(`Transcribing ${file.name} …`);
  const began = performance.now();
  try {
    const body = await request("/v1/audio/transcriptions", { method: "POST", body: form, signal: controller.signal });
    shown.json = body;
    const player = byId("player");
    if (player.dataset.url) {
      URL.revokeObjectURL(player.dataset.url);
    }
    player.dataset.url = URL.createObjectURL(file);
    player.src = player.dataset.url;
    player.hidden = false;
    showSegments(readTranscript(body));
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    status(shown.segments.length > 0 ? `Done in ${seconds} s.` : "Nothing was heard in this recording.");
  } catch (error) {
    status("");
    complain(controller.signal.aborted ? "Cancelled." : error.message);
  } finally {
    setBusy(null);
  }
}

// ---- the microphone

let live = null;

function liveUrl() {
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  const model = byId("model").value;
  const named = model === "" ? "" : `&model=${encodeURIComponent(model)}`;
  return `${scheme}//${location.host}/v1/realtime?intent=transcription${named}`;
}

async function startSpeaking() {
  if (!navigator.mediaDevices?.getUserMedia || !window.AudioWorkletNode) {
    complain("The browser gives the microphone only to pages of https:// or localhost.");
    return;
  }
  clearTranscript("live");
  const session = {
    items: new Map(),
    // Items that are committed and not complete.
    waiting: new Set(),
    // Audio from before the server was ready.
    early: [],
    socket: null,
    // Made here, while the browser knows that somebody pressed a button.
    context: new AudioContext(),
    stream: null,
    node: null,
    ending: false,
  };
  live = session;
  byId("speak").setAttribute("aria-pressed", "true");
  byId("speak").textContent = "Stop";
  byId("file").disabled = true;
  try {
    // Says whether a key is needed: a WebSocket does not.
    await loadModels();
    session.stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: false } });
    await session.context.resume();
    await session.context.audioWorklet.addModule("/page-worklet.js");
    if (live === session) {
      connect(session);
    } else {
      stopCapture(session);
    }
  } catch (error) {
    // Where "Stop" was pressed meanwhile, nothing is to be told.
    stopCapture(session);
    endLive(session, error.message);
  }
}

function connect(session) {
  const protocols = key === "" ? ["realtime"] : ["realtime", `openai-insecure-api-key.${key}`];
  const socket = new WebSocket(liveUrl(), protocols);
  session.socket = socket;
  socket.addEventListener("message", (message) => follow(session, JSON.parse(message.data)));
  socket.addEventListener("close", () => {
    endLive(session, session.ending ? "" : session.error ?? "The connection was closed.");
  });
  session.node = new AudioWorkletNode(session.context, "capture", { numberOfOutputs: 0 });
  session.node.port.onmessage = ({ data }) => {
    if (data.rate) {
      session.rate = data.rate;
      configure(session);
    } else if (data.audio && !session.ready) {
      session.early.push(data.audio);
    } else if (data.audio && socket.readyState === WebSocket.OPEN) {
      if (socket.bufferedAmount > MOST_UNSENT) {
        endLive(session, "The connection is too slow for live transcription.");
        return;
      }
      socket.send(data.audio);
    } else if (data.done) {
      if (socket.readyState === WebSocket.OPEN) {
        // The answer to the second comes after all that the first commits.
        socket.send(JSON.stringify({ type: "input_audio_buffer.commit" }));
        socket.send(JSON.stringify({ type: "input_audio_buffer.clear" }));
      }
      stopCapture(session);
    }
  };
  session.context.createMediaStreamSource(session.stream).connect(session.node);
  status("Connecting …");
}

// Tells the server of the format, as soon as both it and the worklet are there.
function configure(session) {
  if (!session.rate || !session.created) {
    return;
  }
  const update = {
    type: "transcription",
    audio: { input: { format: { type: "audio/pcm", rate: session.rate } } },
    include: ["item.input_audio_transcription.partials", "item.input_audio_transcription.words"],
  };
  session.socket.send(JSON.stringify({ type: "session.update", session: update }));
}

function itemOf(session, id) {
  if (!session.items.has(id)) {
    const [made, text] = segmentElement({});
    const [said, partial] = [element("span"), element("span", "partial")];
    text.append(said, " ", partial);
    byId("transcript").append(made);
    byId("result").hidden = false;
    session.items.set(id, { made, text, said, partial });
  }
  return session.items.get(id);
}

function follow(session, event) {
  const kind = String(event.type).replace("conversation.item.input_audio_transcription", "transcription");
  if (kind === "session.created") {
    session.created = true;
    configure(session);
  } else if (kind === "session.updated") {
    session.ready = true;
    session.early.splice(0).forEach((audio) => session.socket.send(audio));
    status("Listening: speak.");
  } else if (kind === "transcription.delta") {
    const item = itemOf(session, event.item_id);
    item.said.textContent += event.delta;
    item.partial.textContent = "";
  } else if (kind === "transcription.partial") {
    itemOf(session, event.item_id).partial.textContent = event.partial;
  } else if (kind === "transcription.completed") {
    complete(session, event);
  } else if (kind === "transcription.failed") {
    session.items.get(event.item_id)?.partial.replaceChildren();
    complain(event.error?.message ?? "A part could not be transcribed.");
    session.waiting.delete(event.item_id);
    finishIfDone(session);
  } else if (kind === "input_audio_buffer.committed") {
    session.waiting.add(event.item_id);
  } else if (kind === "input_audio_buffer.cleared") {
    session.noMore = true;
    finishIfDone(session);
  } else if (kind === "error" && !(event.error?.code === "input_audio_buffer_commit_empty" && session.ending)) {
    session.error = event.error?.message ?? "The server reports an error.";
    complain(session.error);
  }
}

function complete(session, event) {
  const words = (event.words ?? []).map(cleanWord);
  const item = session.items.get(event.item_id);
  if (event.transcript === "") {
    item?.made.remove();
  } else {
    const start = words[0]?.start ?? 0;
    const end = words.length > 0 ? words[words.length - 1].end : start;
    const segment = { start, end, text: event.transcript, words };
    shown.segments.push(segment);
    shown.json = { segments: shown.segments, text: shown.segments.map((one) => one.text).join(" ") };
    fillWords((item ?? itemOf(session, event.item_id)).text, segment);
  }
  session.waiting.delete(event.item_id);
  finishIfDone(session);
}

// After "Stop", the session ends with the last item that was committed.
function finishIfDone(session) {
  if (session.noMore && session.waiting.size === 0) {
    endLive(session, "");
  }
}

function stopSpeaking(session) {
  if (session.ending) {
    return;
  }
  session.ending = true;
  byId("speak").disabled = true;
  if (!session.ready || session.socket.readyState !== WebSocket.OPEN) {
    endLive(session, "");
    return;
  }
  status("The last words …");
  session.node.port.postMessage("stop");
  setTimeout(() => endLive(session, "The server did not answer in time."), LAST_WORDS);
}

function stopCapture(session) {
  session.stream?.getTracks().forEach((track) => track.stop());
  session.node?.disconnect();
  if (session.context && session.context.state !== "closed") {
    session.context.close();
  }
}

function endLive(session, why) {
  if (live !== session) {
    return;
  }
  live = null;
  session.ending = true;
  stopCapture(session);
  session.socket?.close();
  byId("speak").setAttribute("aria-pressed", "false");
  byId("speak").textContent = "Speak into the microphone";
  byId("speak").disabled = false;
  byId("file").disabled = false;
  status(why === "" ? "Done." : "");
  if (why !== "") {
    complain(why);
  }
}

// ---- what the user does

byId("speak").addEventListener("click", () => {
  if (live === null) {
    startSpeaking();
  } else {
    stopSpeaking(live);
  }
});
byId("cancel").addEventListener("click", () => running?.abort());
byId("file").addEventListener("change", () => {
  const file = byId("file").files[0];
  if (file) {
    transcribe(file);
  }
  byId("file").value = "";
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key-form").hidden = true;
  complain("");
  loadModels().catch((error) => complain(error.message));
});
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    byId("drop").classList.add("over");
  });
}
for (const name of ["dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    byId("drop").classList.remove("over");
  });
}
document.addEventListener("drop", (event) => {
  const file = event.dataTransfer?.files[0];
  if (file && running === null && live === null) {
    transcribe(file);
  }
});
byId("player").addEventListener("play", lightWord);
byId("player").addEventListener("seeked", lightWord);
byId("save-txt").addEventListener("click", () => save("txt", "text/plain", toText(shown.segments)));
byId("save-srt").addEventListener("click", () => save("srt", "application/x-subrip", toSrt(shown.segments)));
byId("save-vtt").addEventListener("click", () => save("vtt", "text/vtt", toVtt(shown.segments)));
byId("save-json").addEventListener("click", () => save("json", "application/json", JSON.stringify(shown.json, null, 1)));
loadModels().catch((error) => complain(error.message));
