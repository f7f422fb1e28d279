// A transcript: what it is, how it is saved, and how it plays along with its recording. Where the page has an element
// `[data-transcript]`, that is the address of one that is shown at once, `data-sound` that of its recording, and `data-name` what
// it is saved as.

// Words below this confidence are underlined.
const UNSURE = 0.5;
const SPEAKER_COLOURS = 8;
// Whose voice is not known: perhaps several people, so without a colour.
const UNKNOWN = "UNKNOWN";
// A word stays lit so long after its end, in seconds, where no other one begins.
const AFTERGLOW = 0.3;
// The longest line of subtitles: letters, and seconds.
const CUE_LETTERS = 84;
const CUE_SECONDS = 7;
export const byId = (id) => document.getElementById(id);

// ---- what a transcript is: segments {start, end, text, speaker, words}, words {word, start, end, confidence, speaker}

// Of the JSON of `flow transcribe`, or the service's verbose_json. Words of the latter are a list of their own: each belongs to
// the last segment that has begun.
export function segmentsOf(body) {
  const segments = body.segments.map((segment) => ({ ...segment, words: segment.words ?? [] }));
  let at = 0;
  for (const word of segments.length > 0 ? (body.words ?? []) : []) {
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
export const shown = { segments: [], timed: [], speakers: [], json: null, name: "transcript", lit: null, frame: 0 };

export function complain(text) {
  byId("error").textContent = text;
  byId("error").hidden = text === "";
}

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) {
    made.className = className;
  }
  if (text !== undefined) {
    made.textContent = text;
  }
  return made;
}

export function clearTranscript(name) {
  byId("transcript").replaceChildren();
  byId("result").hidden = true;
  byId("damage").hidden = true;
  const player = byId("player");
  player.pause();
  player.hidden = true;
  player.removeAttribute("src");
  byId("play-note").hidden = true;
  if (player.dataset.url) {
    URL.revokeObjectURL(player.dataset.url);
    delete player.dataset.url;
  }
  Object.assign(shown, { segments: [], timed: [], speakers: [], json: null, name, lit: null });
  complain("");
}

// The recording of what is shown: a file, or another Blob.
export function playAlong(blob) {
  const player = byId("player");
  player.dataset.url = URL.createObjectURL(blob);
  setSound(player.dataset.url);
}

function setSound(url) {
  const player = byId("player");
  player.src = url;
  player.hidden = false;
  byId("play-note").hidden = false;
}

function speakerClass(speaker) {
  if (!shown.speakers.includes(speaker)) {
    shown.speakers.push(speaker);
  }
  return `speaker-${shown.speakers.indexOf(speaker) % SPEAKER_COLOURS}`;
}

// A segment's elements: when and who, and the paragraph of its words.
export function segmentElement(segment) {
  const made = element("div", "segment");
  // That of its words: names are apart from it.
  made.dir = "auto";
  const head = element("div", "head");
  if (segment.start !== undefined) {
    const time = element("button", "", clock(segment.start));
    time.type = "button";
    time.title = "Play from here";
    time.addEventListener("click", () => playFrom(segment.start));
    head.append(time);
  }
  if (segment.speaker) {
    if (segment.speaker !== UNKNOWN) {
      made.classList.add(speakerClass(segment.speaker));
    }
    head.append(element("bdi", "speaker", segment.speaker));
  }
  const text = element("p");
  made.append(head, text);
  return [made, text];
}

export function fillWords(paragraph, segment) {
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
    if (typeof word.confidence === "number") {
      made.title = `confidence ${word.confidence.toFixed(2)}`;
      if (word.confidence < UNSURE) {
        made.classList.add("unsure");
      }
    }
    // A segment has the speaker of most of its words.
    if (word.speaker && word.speaker !== segment.speaker) {
      made.classList.add("other", speakerClass(word.speaker));
      made.title = [word.speaker, made.title].filter(Boolean).join(", ");
    }
    made.addEventListener("click", () => playFrom(word.start));
    paragraph.append(index > 0 ? " " : "", made);
    shown.timed.push({ start: word.start, end: word.end, element: made });
  });
}

// Shows a transcript of `flow transcribe`, or a verbose_json, as a whole.
export function showTranscript(body) {
  shown.json = body;
  shown.segments = segmentsOf(body);
  const languages = body.metadata?.languages ?? body.languages ?? [];
  // Fonts of the script are chosen by the language.
  byId("transcript").lang = languages.length === 1 ? languages[0] : "";
  const damagedAt = body.metadata?.damaged_at ?? body.damaged_at;
  const told = Array.isArray(body.warnings) ? body.warnings.map((warning) => `Warning: ${warning}.`) : [];
  if (typeof damagedAt === "number") {
    told.unshift(`The recording is damaged or cut off at ${clock(damagedAt)}: what comes after is not in the transcript.`);
  }
  if (told.length > 0) {
    byId("damage").textContent = told.join(" ");
    byId("damage").hidden = false;
  }
  for (const segment of shown.segments) {
    const [made, text] = segmentElement(segment);
    fillWords(text, segment);
    byId("transcript").append(made);
  }
  shown.timed.sort((a, b) => a.start - b.start);
  byId("result").hidden = shown.segments.length === 0;
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
  const isSpoken = index >= 0 && player.currentTime < shown.timed[index].end + AFTERGLOW;
  const word = isSpoken ? shown.timed[index].element : null;
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

byId("player").addEventListener("play", lightWord);
byId("player").addEventListener("seeked", lightWord);
byId("save-txt").addEventListener("click", () => save("txt", "text/plain", toText(shown.segments)));
byId("save-srt").addEventListener("click", () => save("srt", "application/x-subrip", toSrt(shown.segments)));
byId("save-vtt").addEventListener("click", () => save("vtt", "text/vtt", toVtt(shown.segments)));
byId("save-json").addEventListener("click", () => save("json", "application/json", JSON.stringify(shown.json, null, 1)));
document.addEventListener("keydown", (event) => {
  const player = byId("player");
  const isOfOther = event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented;
  if (event.key !== " " || isOfOther || player.hidden || event.target.closest("input, textarea, select, button, summary, audio")) {
    return;
  }
  event.preventDefault();
  if (player.paused) {
    player.play().catch(() => {});
  } else {
    player.pause();
  }
});

// ---- a transcript that the page names

async function load({ transcript, sound, name }) {
  clearTranscript(name);
  try {
    const response = await fetch(transcript);
    if (!response.ok) {
      throw new Error(`The transcript cannot be read: the server answers ${response.status}.`);
    }
    showTranscript(await response.json());
    if (sound) {
      setSound(sound);
    }
  } catch (error) {
    complain(error.message);
  }
}

const named = document.querySelector("[data-transcript]");
if (named) {
  load(named.dataset);
}
