// A recording that is chosen or dropped is transcribed by the service, and plays along.

import { byId, clearTranscript, complain, playAlong, showTranscript, shown } from "/page-transcript.js";
import { showJobs, submitJob } from "/page-jobs.js";
import { request, setKey, status, waitForModels } from "/page-service.js";
import { isSpeaking, toggleSpeaking } from "/page-microphone.js";

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
  if (byId("as-job").checked) {
    status(`Sending ${file.name} …`);
    await submitJob(form, file).catch((error) => {
      status("");
      complain(error.message);
    });
    return;
  }
  const controller = new AbortController();
  setBusy(controller);
  status(`Transcribing ${file.name} …`);
  const began = performance.now();
  try {
    const body = await request("/v1/audio/transcriptions", { method: "POST", body: form, signal: controller.signal });
    showTranscript(body);
    playAlong(file);
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

byId("speak").addEventListener("click", toggleSpeaking);
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
  setKey(byId("key").value.trim());
  byId("key-form").hidden = true;
  complain("");
  waitForModels()
    .then(showJobs)
    .catch((error) => complain(error.message));
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
  if (file && running === null && !isSpeaking()) {
    byId("file").files = event.dataTransfer.files;
    transcribe(file);
  }
});
// What the form asks for by itself is not an error.
waitForModels()
  .then(showJobs)
  .catch((error) => error.lacksKey || complain(error.message));
