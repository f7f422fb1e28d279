// The microphone: what it gives goes to the server over a WebSocket, and words come back.

import { byId, clearTranscript, complain, element, fillWords, playAlong, segmentElement, shown } from "/page-transcript.js";
import { key, loadModels, status } from "/page-service.js";

// After "Stop": the session ends when nothing comes from the server for so long, in milliseconds.
const LAST_WORDS = 60000;
// More audio than this waits to be sent: the server or the connection is too slow. Seconds, of samples of two bytes.
const MOST_UNSENT = 10;

// What a browser takes as a subprotocol of a WebSocket, which is how the API key is sent.
const TOKEN = /^[A-Za-z0-9!#$%&'*+.^_`|~-]*$/;

let live = null;

export const isSpeaking = () => live !== null;

export function toggleSpeaking() {
  if (live === null) {
    startSpeaking();
  } else {
    stopSpeaking(live);
  }
}

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
  if (!TOKEN.test(key)) {
    complain("Browsers cannot send this API key for live transcription: it holds more than letters, digits and !#$%&'*+-.^_`|~");
    return;
  }
  clearTranscript("live");
  byId("file").value = "";
  const session = {
    items: new Map(),
    // Items that are committed and not complete.
    waiting: new Set(),
    // Audio from before the server was ready.
    early: [],
    // All audio, to be played along with its words.
    heard: [],
    // Whether words come again as segments, with their speakers.
    diarize: byId("diarize").checked,
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
    endLive(session, session.error ?? "The connection was closed.");
  });
  session.node = new AudioWorkletNode(session.context, "capture");
  session.node.port.onmessage = ({ data }) => {
    if (data.rate) {
      session.rate = data.rate;
      configure(session);
    } else if (data.audio && !session.ready) {
      session.early.push(data.audio);
      session.heard.push(data.audio);
    } else if (data.audio && socket.readyState === WebSocket.OPEN) {
      session.heard.push(data.audio);
      if (socket.bufferedAmount > MOST_UNSENT * 2 * session.rate) {
        endLive(session, "The server or the connection is too slow for live transcription.");
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
  // The microphone may be unplugged, or taken back.
  session.stream.getTracks().forEach((track) => track.addEventListener("ended", () => stopSpeaking(session)));
  // It gives silence; some browsers run only what is connected to something that is heard.
  session.node.connect(session.context.destination);
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
    include: ["partials", "words", ...(session.diarize ? ["speakers"] : [])].map(
      (name) => `item.input_audio_transcription.${name}`,
    ),
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
  if (session.ending) {
    waitForLastWords(session);
  }
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
  } else if (kind === "transcription.segment") {
    addSpeakers(session, event);
  } else if (kind === "transcription.completed") {
    complete(session, event);
  } else if (kind === "transcription.failed") {
    complain(event.error?.message ?? "A part could not be transcribed.");
    const item = session.items.get(event.item_id);
    if (session.diarize && item) {
      item.transcript = item.said.textContent;
      item.partial.textContent = "";
      closeIfSaid(session, event.item_id);
      return;
    }
    keepSaid(item);
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
    if (!session.ready) {
      // What the page asks for is not to be had.
      endLive(session, session.error);
    }
  }
}

const trimmed = (words) => words.map((word) => ({ ...word, word: word.word.trim() }));

// Words whose speaker is known: they leave the item, before which they then stand.
function addSpeakers(session, event) {
  const item = itemOf(session, event.item_id);
  const { start, end, text, speaker } = event;
  const [made, paragraph] = segmentElement({ start, speaker });
  item.made.before(made);
  showSegment(paragraph, { start, end, text, speaker, words: trimmed(event.words) });
  item.said.textContent = item.said.textContent.trimStart().slice(text.length).trimStart();
  closeIfSaid(session, event.item_id);
}

// Forgets a completed item once all of its words have speakers.
function closeIfSaid(session, id) {
  const item = session.items.get(id);
  if (item?.transcript !== undefined && item.said.textContent.trim() === "") {
    item.made.remove();
    item.isComplete = true;
    session.waiting.delete(id);
    finishIfDone(session);
  }
}

function complete(session, event) {
  const words = trimmed(event.words);
  const item = session.items.get(event.item_id);
  if (session.diarize && event.transcript !== "") {
    const waiting = item ?? itemOf(session, event.item_id);
    waiting.transcript = event.transcript;
    waiting.partial.textContent = "";
    closeIfSaid(session, event.item_id);
    return;
  }
  if (event.transcript === "") {
    item?.made.remove();
    session.items.delete(event.item_id);
  } else {
    const start = words[0]?.start ?? 0;
    const end = words.length > 0 ? words[words.length - 1].end : start;
    addSegment(item ?? itemOf(session, event.item_id), { start, end, text: event.transcript, words });
  }
  session.waiting.delete(event.item_id);
  finishIfDone(session);
}

function addSegment(item, segment) {
  item.isComplete = true;
  showSegment(item.text, segment);
}

function showSegment(paragraph, segment) {
  shown.segments.push(segment);
  shown.json = { segments: shown.segments, text: shown.segments.map((one) => one.text).join(" ") };
  fillWords(paragraph, segment);
}

// Keeps what was said of an item that will not be completed, at the end of what is before it: times are not known.
function keepSaid(item) {
  if (!item || item.isComplete) {
    return;
  }
  const text = item.said.textContent;
  if (text === "") {
    item.isComplete = true;
    item.made.remove();
  } else {
    const end = shown.segments[shown.segments.length - 1]?.end ?? 0;
    addSegment(item, { start: end, end, text, words: [] });
  }
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
  waitForLastWords(session);
}

function waitForLastWords(session) {
  clearTimeout(session.timer);
  session.timer = setTimeout(() => endLive(session, "The server did not answer in time."), LAST_WORDS);
}

function stopCapture(session) {
  session.stream?.getTracks().forEach((track) => track.stop());
  session.node?.disconnect();
  if (session.context && session.context.state !== "closed") {
    session.context.close();
  }
}

// The head of a WAV file of one channel of 16 bits.
function waveHeader({ rate, heard }) {
  const bytes = heard.reduce((sum, part) => sum + part.byteLength, 0);
  const view = new DataView(new ArrayBuffer(44));
  const name = (at, text) => [...text].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  name(0, "RIFF");
  view.setUint32(4, 36 + bytes, true);
  name(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, rate * 2, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  name(36, "data");
  view.setUint32(40, bytes, true);
  return view.buffer;
}

function endLive(session, why) {
  if (live !== session) {
    return;
  }
  live = null;
  clearTimeout(session.timer);
  session.ending = true;
  session.items.forEach(keepSaid);
  stopCapture(session);
  session.socket?.close();
  byId("speak").setAttribute("aria-pressed", "false");
  byId("speak").textContent = "Speak into the microphone";
  byId("speak").disabled = false;
  byId("file").disabled = false;
  byId("result").hidden = shown.segments.length === 0;
  if (shown.segments.length > 0) {
    playAlong(new Blob([waveHeader(session), ...session.heard], { type: "audio/wav" }));
  }
  status(why === "" ? "Done." : "");
  if (why !== "") {
    complain(why);
  }
}
