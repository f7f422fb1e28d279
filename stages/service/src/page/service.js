// The service: its API key, requests, and models.

import { byId, element } from "/page-transcript.js";

export let key = "";

export function setKey(given) {
  key = given;
}

export async function request(path, options) {
  const headers = key === "" ? {} : { Authorization: `Bearer ${key}` };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  });
  if (response.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
    const refused = new Error(key === "" ? "The server asks for an API key." : "The server does not know this API key.");
    refused.lacksKey = key === "";
    throw refused;
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    const why = body?.error?.message ?? `The server answers ${response.status}.`;
    const retry = response.headers.get("Retry-After");
    const error = new Error(retry ? `${why} (Try again in ${retry} s.)` : why);
    error.isLoading = body?.error?.code === "model_loading";
    throw error;
  }
  return response.json();
}

// Whether the service takes jobs.
export let hasJobs = false;

export async function loadModels() {
  const body = await request("/v1/models", {});
  const models = body.data ?? [];
  hasJobs = body.jobs === true;
  const chosen = byId("model").value;
  const options = models.map((model) => element("option", "", model.id));
  byId("model").replaceChildren(...options);
  if (models.some((model) => model.id === chosen)) {
    byId("model").value = chosen;
  }
  byId("model-choice").hidden = models.length < 2;
  byId("diarize-choice").hidden = !models.some((model) => model.diarization);
}

// Waits for the first model, which is loaded when the service starts.
export async function waitForModels() {
  for (let waited = false; ; waited = true) {
    try {
      await loadModels();
      if (waited) {
        status("");
      }
      return;
    } catch (error) {
      if (!error.isLoading) {
        throw error;
      }
      status("The model is being loaded …");
      await new Promise((resume) => setTimeout(resume, 1000));
    }
  }
}

export function status(text) {
  byId("status").textContent = text;
}
