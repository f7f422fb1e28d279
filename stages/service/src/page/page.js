"use strict";

// Words below this confidence are underlined.
const UNSURE = 0.5;
const SPEAKER_COLOURS = 8;
// The longest line of subtitles: letters, and seconds.
const CUE_LETTERS = 84;
const CUE_SECONDS = 7;
const byId = (id) => document.getElementById(id);

// ---- what a transcript is: segments {start, end, text, speaker, words}, words {word, start, end, confidence, speaker}

// The server's verbose_json. Its words are a list of their own: each belongs to the last segment that has begun.
function readTranscript(body) {
  const segments = body.segments.map(({ start, end, text, speaker }) => ({ start, end, text, speaker, words: [] }));
  let at = 0;
  for (const word of body.words) {
    const middle = (word.start + word.end) / 2;
    while (at + 1 < segments.length && middle >= segments[at + 1].start) {
      at += 1;
    }
    segments[at].words.push(word);
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

function subtitleTime(milliseconds, point) {
  const pad = (number, digits) => String(number).padStart(digits, "0");
  const seconds = Math.floor(milliseconds / 1000);
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return `${pad(hours, 2)}:${pad(minutes, 2)}:${pad(seconds % 60, 2)}${point}${pad(milliseconds % 1000, 3)}`;
}

// A cue takes one millisecond at least: players show no other.
function subtitleTimes(cue, point) {
  const start = Math.round(cue.start * 1000);
  const end = Math.max(Math.round(cue.end * 1000), start + 1);
  return `${subtitleTime(start, point)} --> ${subtitleTime(end, point)}`;
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
  // `-->` within a text would be read as times.
  const safe = (text) => text.replace(/-{2,}>/g, "->");
  return cues(segments)
    .map((cue, index) => `${index + 1}\n${subtitleTimes(cue, ",")}\n${safe(spoken(cue))}\n`)
    .join("\n");
}

function toVtt(segments) {
  const safe = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const lines = cues(segments).map((cue) => `${subtitleTimes(cue, ".")}\n${safe(spoken(cue))}\n`);
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
    // It fails where it is paused before it has begun, and where the browser cannot play the format, as the player shows.
    player.play().catch(() => {});
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
});
// The same file may be chosen again.
byId("file").addEventListener("click", () => {
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
    byId("file").files = event.dataTransfer.files;
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
