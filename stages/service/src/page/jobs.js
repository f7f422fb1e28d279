// Jobs: recordings that are transcribed later, whether this page is open or not, and their list.

import { byId, clearTranscript, complain, element, playAlong, showTranscript } from "/page-transcript.js";
import { hasJobs, request, status } from "/page-service.js";

// Between two looks at jobs that wait or run, in milliseconds.
const INTERVAL = 2000;

let timer = null;
// Recordings that were sent from this page, by the ids of their jobs: they play along.
const recordings = new Map();

export async function submitJob(form, file) {
  const job = await request("/v1/jobs", { method: "POST", body: form });
  recordings.set(job.id, file);
  status(`${file.name} is transcribed as a job.`);
  await showJobs();
}

// Shows the list, and looks again while a job waits or runs. Without jobs in the service there is nothing to be seen.
export async function showJobs() {
  clearTimeout(timer);
  if (!hasJobs) {
    return;
  }
  const jobs = (await request("/v1/jobs?limit=20", {})).data;
  byId("job-choice").hidden = false;
  byId("jobs").hidden = jobs.length === 0;
  byId("job-list").replaceChildren(...jobs.map(jobElement));
  if (jobs.some((job) => isOpen(job))) {
    timer = setTimeout(() => showJobs().catch((error) => complain(error.message)), INTERVAL);
  }
}

function isOpen(job) {
  return job.state === "queued" || job.state === "running";
}

function jobElement(job) {
  const made = element("li", "row");
  const name = element("span", "", job.file_name);
  name.dir = "auto";
  made.append(name, element("span", "note", job.error?.message ?? job.state));
  if (job.state === "running") {
    const progress = element("progress", "");
    progress.setAttribute("aria-label", job.file_name);
    if (job.audio_seconds) {
      progress.max = job.audio_seconds;
      progress.value = job.done_seconds;
    }
    made.append(progress);
  }
  // Others have no words to be shown.
  if (job.state === "done" && job.response_format === "verbose_json") {
    made.append(button("Show", () => showResult(job)));
  }
  made.append(button(isOpen(job) ? "Cancel" : "Remove", () => remove(job)));
  return made;
}

function button(text, action) {
  const made = element("button", "", text);
  made.type = "button";
  made.addEventListener("click", () => action().catch((error) => complain(error.message)));
  return made;
}

async function showResult(job) {
  const body = await request(`/v1/jobs/${job.id}/result`, {});
  clearTranscript(job.file_name.replace(/\.[^.]*$/, "") || "transcript");
  showTranscript(body);
  if (recordings.has(job.id)) {
    playAlong(recordings.get(job.id));
  }
  status("");
}

async function remove(job) {
  await request(`/v1/jobs/${job.id}`, { method: "DELETE" });
  if (!isOpen(job)) {
    recordings.delete(job.id);
  }
  await showJobs();
}
